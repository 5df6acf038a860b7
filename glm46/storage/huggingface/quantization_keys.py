"""Finds the keys of a `quantization_config` that glm46 does not know, so that they are refused by name.

An unknown key may change what the model computes, as an online rotation does. The keys in the tables below are safe:

* `schemes.scheme_of` reads them, or
* the types of the tensors show the same, as for the list of quantised modules, or
* they only describe how the scales were found or how a library loads the folder, or
* they describe how servers round activations and the cache, which a trainer does not do.

Sources: compressed-tensors 0.20 `quantization/quant_config.py`, `quant_scheme.py`, `quant_args.py`; transformers 5.24
`utils/quantization_config.py` (CompressedTensorsConfig, FineGrainedFP8Config); vLLM `quantization/fp8.py`.
"""

from collections.abc import Mapping
from typing import Any

from glm46.config.faults import show

Allowed = Mapping[str, tuple[Any, ...] | None]
"""Permitted values by known key, or None if every value is permitted. Empty values are always permitted."""

_FP8: Allowed = {
    "quant_method": None,
    "weight_block_size": None,
    "activation_scheme": None,
    "fmt": ("e4m3",),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "modules_to_convert": None,
    "modules_to_not_convert": None,
    "ignored_layers": None,
    "dequantize": None,
    "is_checkpoint_fp8_serialized": (True,),
}

_COMPRESSED: Allowed = {
    "quant_method": None,
    "format": None,
    "config_groups": None,
    "ignore": None,
    "quantization_status": None,
    "version": None,
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "run_compressed": None,
    "dequantize": None,
    "use_optimized_inference": None,
}
_SPARSITY: Allowed = {
    "format": ("dense",),
    "targets": None,
    "ignore": None,
    "registry_requires_subclass": None,
    "global_sparsity": None,
    "sparsity_structure": ("unstructured", "0:0"),
}
_GROUP: Allowed = {
    "targets": None,
    "weights": None,
    "input_activations": None,
    "output_activations": None,
    "format": None,
}
_WEIGHTS: Allowed = {
    "num_bits": None,
    "type": None,
    "symmetric": None,
    "strategy": None,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
    "observer": None,
    "observer_kwargs": None,
    "scale_dtype": None,
    "zp_dtype": None,
}


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Return "name = value" for each key that is not known, or whose value is not permitted.

    Args:
        config: a `quantization_config` of the method "fp8" or "compressed-tensors".
    """
    if config.get("quant_method") == "fp8":
        return _unread(config, _FP8)
    sparsity = config.get("sparsity_config")
    if not isinstance(sparsity, Mapping):
        return _unread(config, _COMPRESSED)
    others = {key: value for key, value in config.items() if key != "sparsity_config"}
    return _unread(others, _COMPRESSED) + _unread(sparsity, _SPARSITY, "sparsity_config.")


def unread_keys_of_group(group: Mapping[str, Any], format: str) -> list[str]:
    """Return the same for an entry of `config_groups` and its `weights`.

    Args:
        group: the entry.
        format: the format of the whole config. An entry may not have another one.
    """
    allowed = {**_GROUP, "format": (format,)}
    return _unread(group, allowed) + _unread(group["weights"], _WEIGHTS, "weights.")


def _unread(table: Mapping[str, Any], allowed: Allowed, prefix: str = "") -> list[str]:
    lines = []
    for key, value in table.items():
        permitted = allowed.get(key, ())
        is_permitted = permitted is None or value in permitted or _is_empty(value)
        if not is_permitted:
            lines.append(f"{prefix}{key} = {show(value)}")
    return lines


def _is_empty(value: object) -> bool:
    """Return True for null, false, 0, an empty text or list, and a table of such values."""
    if isinstance(value, Mapping):
        return all(_is_empty(inner) for inner in value.values())
    return value in (None, False, "", [])
