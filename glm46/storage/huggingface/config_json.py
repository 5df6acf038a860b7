"""Reads Hugging Face's ``config.json`` into a `ModelShape`, and writes it back with all other fields unchanged.

The rotary keys have two forms: ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling`` at the top level
(transformers 4, the published GLM files), or all inside ``rope_parameters`` (transformers 5). Both are read, and a file
keeps its form. Defaults of library classes are never used: they are not GLM's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glm46.config.errors import UserError, raise_if
from glm46.config.model import GONE_KEYS, ModelShape, RopeScalingConfig
from glm46.config.presets import RELATIVES
from glm46.files.file_content import read_json_object
from glm46.storage.checkpoint.folder_kind import Kind, require_kind
from glm46.storage.huggingface.indexer_keys import INDEXER_KEYS, complete_indexer, put_indexer_types

CONFIG = "config.json"

_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", "rope_scaling")
_MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
_OURS_ONLY = ("sliding_window",)
"""Keys of `ModelShape` that Hugging Face's GLM does not have."""

_GROUPED = "glm4_moe"
_LATENT = "glm4_moe_lite"
_SPARSE = "glm_moe_dsa"
_ARCHITECTURES = {
    _GROUPED: ["Glm4MoeForCausalLM"],
    _LATENT: ["Glm4MoeLiteForCausalLM"],
    _SPARSE: ["GlmMoeDsaForCausalLM"],
}
"""Architectures by model_type: with grouped-query attention, latent attention, and sparse latent attention."""
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    **GONE_KEYS,
}
"""The only implemented value of each key that selects a computation."""
_OF_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATENT_REMEDY = (
    "glm46 computes latent attention with low-rank queries, keys and values; take a model that has this key"
)
_NOT_OF_LATENT = ("head_dim", "use_qk_norm")
"""Keys of `ModelShape` that GLM-4.7-Flash's file lacks; transformers takes head_dim for qk_rope_head_dim."""

_ABSENT: dict[str, tuple[str, ...]] = {_GROUPED: (*_OF_LATENT, *INDEXER_KEYS), _LATENT: INDEXER_KEYS, _SPARSE: ()}
"""Keys of `ModelShape` that a model_type lacks."""
_LATENT_SWITCHES = (*_OF_LATENT, "rope_interleave")
_COMPUTED: dict[str, tuple[str, ...]] = {
    _GROUPED: (),
    _LATENT: _LATENT_SWITCHES,
    _SPARSE: (*_LATENT_SWITCHES, "index_topk", "indexer_rope_interleave"),
}
"""Keys of `_INERT` that select a computation of this model_type."""

_INERT: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "index_topk": (),
    "indexer_rope_interleave": (),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "q_lora_rank": (),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "scoring_func": ("sigmoid",),
    "sliding_window": (),
    "topk_method": ("noaux_tc",),
    "use_sliding_window": (False,),
}
"""Keys of related models that select a computation and that GLM lacks, with the values that (like null) keep GLM's."""
_INERT_ROPE: dict[str, tuple[Any, ...]] = {"truncate": (True,), "finetuned": (True, False)}
"""The same for the keys of rope_scaling."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's ``config.json``. Raises UserError if the file is missing or does not hold a JSON object."""
    file = folder / CONFIG
    if not file.is_file():
        require_kind(folder, Kind.HUGGING_FACE)
    return read_json_object(file, "download it: it has the shape of the model")


def shape_of(raw: Mapping[str, Any], file: str = CONFIG) -> ModelShape:
    """Convert a config to a model shape.

    Args:
        raw: content of config.json.
        file: file name for the messages.

    Raises:
        UserError: one fault for each key that is missing, invalid, or selects a computation that is not implemented.
    """
    if (kind := raw.get("model_type", _GROUPED)) not in [*_ARCHITECTURES]:
        hint = ", of images and text" if "vision_config" in raw else ""
        relative = next((relative_name for relative_name, (_, kinds) in RELATIVES.items() if kind in kinds), hint)
        raise UserError(
            f"{file}: model_type = {kind!r}: another model{relative}; glm46 computes "
            f"{_GROUPED!r}, which GLM-4.5, 4.5-Air, 4.6 and 4.7 have, {_LATENT!r} of GLM-4.7-Flash, and {_SPARSE!r} of "
            "GLM-5, 5.1 and 5.2; take one of them"
        )
    raw = dict(raw)
    fixed = {"architectures": _ARCHITECTURES[kind]} | _FIXED
    if kind != _GROUPED:
        fixed |= _complete_latent(raw)
    faults = [f"{file}: {fault}" for fault in (complete_indexer(raw) if kind == _SPARSE else ())]
    faults += [
        f"{file}: {key} = {raw[key]!r}: glm46 computes the model without it; take a model that does not have it"
        for key, plain in _INERT.items()
        if key not in _COMPUTED[kind] and raw.get(key) not in (None, *plain)
    ]
    faults += [f"{file}: {fault}" for fault in _layer_faults(raw, kind)]
    faults += [
        f"{file}: {key} = {raw[key]!r}: not a config of {kind}; expected {value!r}"
        for key, value in fixed.items()
        # 1, 1.0 and true are equal in Python, but not to readers of an export.
        if (value_found := raw.get(key, value)) != value
        or (isinstance(value, int) and type(value_found) is not type(value))
    ]
    if kind != _GROUPED:
        faults += [f"{file}: {key} = None: {_LATENT_REMEDY}" for key in _OF_LATENT if raw.get(key, 0) is None]
    if "model_type" not in raw:
        faults.append(f"{file}: model_type is missing; expected {_GROUPED!r}, {_LATENT!r} or {_SPARSE!r}")
    keys, rope_faults = _rope(raw)
    faults += [f"{file}: {fault}" for fault in rope_faults]
    mtp = [raw[key] for key in _MTP_KEYS if key in raw]
    if not mtp:
        faults.append(f"{file}: num_nextn_predict_layers is missing; set it to 0 for a model without MTP layers")
    elif any(value != mtp[0] for value in mtp):
        faults.append(f"{file}: num_nextn_predict_layers = {mtp[0]}, but num_mtp_layers = {mtp[1]}; remove one of them")
    else:
        keys["num_nextn_predict_layers"] = mtp[0]
    special_keys = (*_ROPE_KEYS, *_OURS_ONLY, _MTP_KEYS[0], *_ABSENT[kind])
    plain = [name for name in ModelShape.model_fields if name not in special_keys]
    faults += [f"{file}: {name} is missing; add it" for name in (*plain, *GONE_KEYS) if name not in raw]
    raise_if(faults)
    keys |= {name: raw[name] for name in plain}
    try:
        return ModelShape.model_validate(keys)
    except ValidationError as error:
        rows = [(".".join(map(str, row["loc"])), row) for row in error.errors()]
        raise UserError(*(f"{file}: {key} = {row['input']!r}: {row['msg']}" for key, row in rows)) from error


def _complete_latent(raw: dict[str, Any]) -> dict[str, Any]:
    """Add the meaning of absent keys to a latent config, in place. Returns the values that keys must have if
    present."""
    parts: list[Any] = [raw.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    width = sum(parts) if all(isinstance(part, int) for part in parts) else raw.get("v_head_dim")
    fixed = {"head_dim": parts[1], "qk_head_dim": width, "v_head_dim": width, "use_qk_norm": False}
    if raw.get("model_type") == _SPARSE and raw.get("head_dim") == parts[0]:
        fixed["head_dim"] = parts[0]  # GLM-5.2 names the other part of a head; no reader computes with it
    fixed |= {"num_key_value_heads": raw.get("num_attention_heads"), "attention_bias": False}
    fixed |= {"partial_rotary_factor": 1.0, "rope_interleave": True, "indexer_rope_interleave": True}
    wrong = {key: value for key, value in fixed.items() if value is not None and raw.get(key, value) != value}
    raw |= {key: value for key, value in {"head_dim": width, "use_qk_norm": False}.items() if key not in wrong}
    if "partial_rotary_factor" not in (raw.get("rope_parameters") or {}):
        raw.setdefault("partial_rotary_factor", 1.0)
    raw.setdefault("initializer_range", 0.02)
    if isinstance(kinds := raw.get("mlp_layer_types"), list):  # transformers has this key instead
        raw.setdefault("first_k_dense_replace", (*kinds, "sparse").index("sparse"))
    return wrong


def stated_ids(config: Mapping[str, Any], file: Path | str) -> list[int]:
    """Return the ids in ``eos_token_id`` of a file, which is one id or a list of them. Raises UserError if it is
    something else."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(id_) is not int for id_ in ids):
        raise UserError(f"{file}: eos_token_id = {value!r}: must be an id or a list of ids; correct it or copy it anew")
    return ids


def config_of(shape: ModelShape, raw: Mapping[str, Any] | None, *, eos_ids: list[int], dtype: str) -> dict[str, Any]:
    """Make the ``config.json`` of a model. Raises UserError if the shape has a sliding window, which readers of the
    export would ignore.

    Args:
        shape: shape of the exported weights.
        raw: a config to start from, such as the imported folder's. Keys that agree with `shape`, and keys that
            `ModelShape` lacks, stay unchanged. None: a new config in the form of GLM's published files.
        eos_ids: ids that end a text, the padding id first; only used without `raw`.
        dtype: type of the exported weights, such as "bfloat16".
    """
    if shape.sliding_window is not None:
        raise UserError(
            f"sliding_window = {shape.sliding_window} of [model.shape] or of the last stage of text: GLM's models "
            "have none, so readers of the export would attend to all tokens; train without a window before exporting"
        )
    base_shape = None if raw is None else shape_of(raw)
    kind = _SPARSE if shape.is_sparse else _LATENT if shape.is_latent else _GROUPED
    absent = (*_ABSENT[kind], *(_NOT_OF_LATENT if shape.is_latent else ()))
    if raw is None:
        config = {"model_type": kind, "architectures": _ARCHITECTURES[kind]} | _FIXED
        config |= {"topk_method": "noaux_tc"} if shape.is_latent else {}
    else:
        config = json.loads(json.dumps(raw))  # a copy of all levels
    for name in ModelShape.model_fields:
        is_changed = base_shape is None or getattr(base_shape, name) != getattr(shape, name)
        if is_changed and name not in (*_OURS_ONLY, *absent):
            _put(config, name, shape)
    if "mlp_layer_types" in config or (shape.is_latent and shape.first_k_dense_replace != 1):
        config["mlp_layer_types"] = _mlp_layer_types(shape.num_hidden_layers, shape.first_k_dense_replace)
    old_ids = [] if raw is None else stated_ids(raw, CONFIG)
    # The ids in the file are from another tokenizer if none of ours is among them; a file may list only some of ours.
    if raw is None or (old_ids and eos_ids and set(eos_ids).isdisjoint(old_ids)):
        config |= {"eos_token_id": eos_ids, "pad_token_id": eos_ids[0]}
    if raw is None:
        config["use_cache"] = True
    config.pop("quantization_config", None)  # describes the imported weights, not the exported ones
    # Keep the file's spelling; a new file gets the spelling that all versions of transformers read.
    config["dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"] = dtype
    assert shape_of(config) == shape
    return config


def _put(config: dict[str, Any], name: str, shape: ModelShape) -> None:
    """Write one key of a shape, under each name and place that the config already has for it."""
    value = getattr(shape, name)
    if name == _MTP_KEYS[0]:
        for key in [key for key in _MTP_KEYS if key in config] or [name]:
            config[key] = value
    elif name == "rope_scaling":
        _put_scaling(config, shape)
    elif name == "indexer_types":
        put_indexer_types(config, value)
    elif name in _ROPE_KEYS:
        places = [place for place in (config, config.get("rope_parameters")) if place and name in place]
        for place in places or [config]:
            place[name] = value
    else:
        config[name] = value


def _put_scaling(config: dict[str, Any], shape: ModelShape) -> None:
    scaling: dict[str, Any] | None = None
    if shape.rope_scaling is not None:
        # Omit the keys that only YaRN has: a reader would warn of them.
        is_linear = shape.rope_scaling.rope_type == "linear"
        scaling = shape.rope_scaling.model_dump(exclude_none=True, exclude_defaults=is_linear)
    if "rope_parameters" in config:
        kept = {key: config["rope_parameters"].get(key) for key in _ROPE_KEYS if key in config["rope_parameters"]}
        config["rope_parameters"] = (scaling or {"rope_type": "default"}) | kept
        config.pop("rope_scaling", None)
    else:
        config["rope_scaling"] = scaling


def _mlp_layer_types(layers: int, dense: int) -> list[str]:
    return ["dense"] * min(dense, layers) + ["sparse"] * (layers - dense)


def _layer_faults(raw: Mapping[str, Any], kind: str) -> list[str]:
    """Return the faults of the keys with a kind for each layer, which transformers 5 has."""
    layers = raw.get("num_hidden_layers")
    dense = raw.get("first_k_dense_replace")
    if not (isinstance(layers, int) and isinstance(dense, int)):
        return []
    attention = "indexed_attention" if kind == _SPARSE else "full_attention"
    expected = {"layer_types": [attention] * layers, "mlp_layer_types": _mlp_layer_types(layers, dense)}
    return [
        f"{key} has other kinds of layers than {', '.join(sorted(set(kinds)))}, or others in these places; take a "
        "model that has not"
        for key, kinds in expected.items()
        if raw.get(key) not in (None, kinds)
    ]


def _rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the three rotary keys of a shape from either form. Returns them and their faults."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name), dict | None):
            return {}, [f"{name} = {raw[name]!r}: must be a table"]
    inside = raw.get("rope_parameters") or {}
    keys: dict[str, Any] = {}
    faults = []
    for name in _ROPE_KEYS[:2]:
        values = [place[name] for place in (inside, raw) if name in place]
        if not values:
            # No default of 1: rotating whole heads of a GLM gives wrong text without an error.
            faults.append(f"{name} is missing, at the top level and inside rope_parameters; add it")
        elif any(value != values[0] for value in values):
            faults.append(
                f"{name} = {values[1]!r} at the top level, but {values[0]!r} inside rope_parameters; remove one of them"
            )
        else:
            keys[name] = values[0]
    scaling = dict(raw.get("rope_scaling") or {}) or {k: v for k, v in inside.items() if k not in _ROPE_KEYS}
    for name in _ROPE_KEYS[:2]:
        scaling.pop(name, None)
    old_type = scaling.pop("type", None)
    rope_type = scaling.get("rope_type", old_type)
    known_keys = ("rope_type", *RopeScalingConfig.model_fields)
    unknown = {k: v for k, v in scaling.items() if k not in known_keys and v not in (None, *_INERT_ROPE.get(k, ()))}
    scaling = {key: value for key, value in scaling.items() if key in known_keys and value is not None}
    if rope_type is None and (scaling or unknown):
        faults.append("rope_scaling.rope_type is missing; add it")
    elif rope_type not in (None, "default", "linear", "yarn"):
        faults.append(f"rope_scaling.rope_type = {rope_type!r}: glm46 computes 'linear' and 'yarn'; take one of them")
    elif unknown and (rope_type in ("linear", "yarn") or "mrope_section" in unknown):
        settings = ", ".join(f"rope_scaling.{key} = {value!r}" for key, value in unknown.items())
        faults.append(
            f"{settings}: glm46 computes {rope_type} positions without these keys; take a model that does not have them"
        )
    elif rope_type not in (None, "default"):
        scaling["rope_type"] = rope_type
        if rope_type == "yarn":  # the default of transformers
            scaling.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
        keys["rope_scaling"] = scaling
    return keys, faults
