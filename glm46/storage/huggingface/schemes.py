"""Quantised weights of a Hugging Face folder: which weights, in which format, and their entry in config.json.

Sources for the layers that stay in BF16: config.json of GLM-4.5-FP8 and GLM-4.5-Air-FP8, and llm-compressor
`examples/model_free_ptq/glm_4.6_fp8_block.py`. The published FP8 folders of GLM-5 keep `weights_proj` in BF16, which
they call `indexers_proj`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from glm46.config.errors import UserError, raise_if
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.quantization_keys import unread_keys, unread_keys_of_group
from glm46.storage.huggingface.scheme_names import FP8_NAMES, SCHEME_NAMES

CONFIG_KEY = "quantization_config"
_OLD_CONFIG_KEY = "compression_config"
ERRORS_FILE = "quantization_errors.json"

Scheme = Fp8 | Int4

FP8_SCHEMES = dict(zip(FP8_NAMES, (Fp8(), Fp8(block=None)), strict=True))
SCHEMES: dict[str, Scheme] = dict(zip(SCHEME_NAMES, (*FP8_SCHEMES.values(), Int4()), strict=True))
"""Schemes of an export, by `--dtype`."""

_IGNORED = ["lm_head", "re:.*embed_tokens$", "re:.*mlp[.]gate$", "re:.*eh_proj$", "re:.*shared_head.*"]
_IGNORED_INDEXERS = ["re:.*indexer[.].*", "re:.*indexers_proj$"]
"""By the names of the weights, and by the name under which servers build `weights_proj`."""


def quantised_names(names: HFNames, scheme: Scheme | None) -> frozenset[str]:
    """Return the Hugging Face names of the weights that an export quantises: the projections of attention, dense layers
    and experts, except families with a size that does not fit the scheme."""
    if scheme is None:
        return frozenset()
    without = {None, *_unfit_families(names, scheme)}
    return frozenset(name for name, (entry, _) in names.places.items() if entry.row.fp8_family not in without)


def _unfit_families(names: HFNames, scheme: Scheme) -> list[str]:
    """Return families with a weight that does not fit. All of a family stays in BF16, since servers fuse its
    weights."""
    places = [(entry.row.fp8_family, part.hf_shape) for entry, part in names.places.values()]
    return sorted({family for family, shape in places if family is not None and not scheme.fits(shape)})


def config_of_scheme(scheme: Scheme, names: HFNames) -> dict[str, Any]:
    """Return the `quantization_config` of an export. Raises UserError if no projection of this model fits the
    scheme."""
    if not quantised_names(names, scheme):
        multiple = scheme.group if isinstance(scheme, Int4) else scheme.grid(1)[1]
        name = next(name for name, other in SCHEMES.items() if other == scheme)
        raise UserError(
            f"--dtype {name}: no projection of this model has sizes that are multiples of {multiple}; use fp8-channel"
        )
    has_indexers = any(entry.row.part == "indexer" for entry, _ in names.places.values())
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.group_of_config()},
        "ignore": [
            *_IGNORED,
            *(_IGNORED_INDEXERS if has_indexers else []),
            *(f"re:.*{family}$" for family in _unfit_families(names, scheme)),
        ],
        "kv_cache_scheme": None,
    }


def scheme_of(raw: Mapping[str, Any], file: str) -> Scheme | None:
    """Return the scheme of a folder's weights; None if they are not quantised. Raises UserError if the quantisation is
    not supported, or has an unread key that could change what the model computes.

    Args:
        raw: content of the folder's config.json.
        file: file name for the message.
    """
    if raw.get(_OLD_CONFIG_KEY):
        raise UserError(f"{file}: {_OLD_CONFIG_KEY} is the old name of {CONFIG_KEY}, which servers read; rename it")
    config = raw.get(CONFIG_KEY)
    if config is None:
        return None
    scheme, unread = _read_scheme(config)
    raise_if(
        [
            f"{file}: {CONFIG_KEY}.{key}: glm46 does not read this key, which may change what the model computes; use "
            "the BF16 model, or a folder that was quantised without it"
            for key in unread
        ]
    )
    if scheme is None:
        raise UserError(
            f"{file}: {CONFIG_KEY} is not supported; use the BF16 model, or weights quantised as compressed-tensors in "
            "FP8 with one scale per block or row or in INT4 with one per group, or as fp8 with weight_block_size"
        )
    return scheme


def _read_scheme(config: Mapping[str, Any]) -> tuple[Scheme | None, list[str]]:
    """Return the scheme and the keys that are not read; None and no keys if the scheme is not supported."""
    try:
        if config["quant_method"] == "fp8":
            rows, columns = config["weight_block_size"]
            return Fp8((int(rows), int(columns)), "_scale_inv"), unread_keys(config)
        if config["quant_method"] == "compressed-tensors":
            ((name, group),) = config["config_groups"].items()
            scheme = _scheme_of_group(config["format"], group["weights"])
            group_keys = unread_keys_of_group(group, config["format"])
            unread = [*unread_keys(config), *(f"config_groups.{name}.{key}" for key in group_keys)]
            return scheme, unread if scheme else []
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    return None, []


def _scheme_of_group(format: str, weights: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a compressed-tensors group; None if it is not supported."""
    if not weights["symmetric"]:
        return None
    bits = weights["num_bits"]
    strategy = weights["strategy"]
    if format == Fp8.format and bits == 8 and weights.get("type", "float") == "float":
        if strategy == "channel":
            return Fp8(None)
        if strategy == "block":
            rows, columns = weights["block_structure"]
            return Fp8((int(rows), int(columns)))
    # With "weight", also called "static", columns were rounded in another order but are stored in the usual one;
    # "group" and "dynamic" permute them.
    is_ordered = weights.get("actorder") in (None, False, "weight", "static")
    if format == Int4.format and bits == 4 and weights.get("type", "int") == "int" and is_ordered:
        group_size = int(weights["group_size"])
        return Int4(group_size) if strategy == "group" and group_size % 8 == 0 else None
    return None


def error_of(weight: Tensor, parts: Mapping[str, Tensor], scheme: Scheme) -> dict[str, float]:
    """Return the quantisation error: its norm over the weight's norm, and the largest absolute error of one element."""
    shape = tuple(weight.shape)
    difference = scheme.dequantise(parts, shape, tuple((0, size) for size in shape)).sub_(weight)
    norm = weight.norm().item()
    relative = difference.norm().item() / norm if norm > 0 else 0.0
    return {"relative": relative, "largest": difference.abs().max().item()}
