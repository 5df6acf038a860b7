"""Quantised weights of a Hugging Face folder: which ones, in which format, and what its config.json says about it.

The layers that stay in BF16: config.json of GLM-4.5-FP8 and GLM-4.5-Air-FP8, and llm-compressor
`examples/model_free_ptq/glm_4.6_fp8_block.py`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from glm46.config.errors import UserError
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.scheme_names import FP8_NAMES, SCHEME_NAMES

CONFIG_KEY = "quantization_config"
ERRORS_FILE = "quantization_errors.json"

Scheme = Fp8 | Int4

FP8_SCHEMES = dict(zip(FP8_NAMES, (Fp8(), Fp8(block=None)), strict=True))
SCHEMES: dict[str, Scheme] = dict(zip(SCHEME_NAMES, (*FP8_SCHEMES.values(), Int4()), strict=True))
"""Schemes of an export, by `--dtype`."""

_IGNORED = ["lm_head", "re:.*embed_tokens$", "re:.*mlp[.]gate$", "re:.*eh_proj$", "re:.*shared_head.*"]


def quantised_names(names: HFNames, scheme: Scheme | None) -> frozenset[str]:
    """Hugging Face names of the weights that an export quantises: the projections of attention, dense layers and
    experts, except families with a size that does not fit the scheme."""
    if scheme is None:
        return frozenset()
    without = {None, *_unfit_families(names, scheme)}
    return frozenset(name for name, (entry, _) in names.places.items() if entry.row.fp8_family not in without)


def _unfit_families(names: HFNames, scheme: Scheme) -> list[str]:
    """Families with a weight that does not fit the scheme. All of a family stays in BF16, since servers fuse them."""
    places = [(entry.row.fp8_family, part.hf_shape) for entry, part in names.places.values()]
    return sorted({family for family, shape in places if family is not None and not scheme.fits(shape)})


def config_of_scheme(scheme: Scheme, names: HFNames) -> dict[str, Any]:
    """The `quantization_config` of an export. Raises UserError if no projection of this model fits the scheme."""
    if not quantised_names(names, scheme):
        multiple = scheme.group if isinstance(scheme, Int4) else scheme.grid(1)[1]
        name = next(name for name, known in SCHEMES.items() if known == scheme)
        raise UserError(
            f"--dtype {name}: no projection of this model has sizes that are multiples of {multiple}; use fp8-channel"
        )
    return {
        "quant_method": "compressed-tensors", "format": scheme.format, "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.group_of_config()},
        "ignore": _IGNORED + [f"re:.*{family}$" for family in _unfit_families(names, scheme)],
        "kv_cache_scheme": None,
    }  # fmt: skip


def scheme_of(raw: Mapping[str, Any], file: str) -> Scheme | None:
    """The scheme of a folder's weights; None if they are not quantised. Raises UserError if the quantisation is not
    supported.

    Args:
        raw: content of its config.json.
        file: named in the message.
    """
    if (config := raw.get(CONFIG_KEY)) is None:
        return None
    try:
        if config["quant_method"] == "fp8":
            rows, columns = config["weight_block_size"]
            return Fp8((int(rows), int(columns)), "_scale_inv")
        if config["quant_method"] == "compressed-tensors":
            (group,) = config["config_groups"].values()
            if (scheme := _scheme_of_group(config["format"], group["weights"])) is not None:
                return scheme
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise UserError(
        f"{file}: {CONFIG_KEY} is not supported; use the BF16 model, or weights quantised as compressed-tensors in FP8 "
        "with one scale per block or row or in INT4 with one per group, or as fp8 with weight_block_size"
    )


def _scheme_of_group(format: str, weights: Mapping[str, Any]) -> Scheme | None:
    """The scheme of compressed-tensors, or None if it is another one."""
    if not weights["symmetric"]:
        return None
    kind = (format, weights["num_bits"], weights["strategy"])
    if kind == (Fp8.format, 8, "channel"):
        return Fp8(None)
    if kind == (Fp8.format, 8, "block"):
        rows, columns = weights["block_structure"]
        return Fp8((int(rows), int(columns)))
    # With "weight", also called "static", columns were rounded in another order and are stored as without; "group" and
    # "dynamic" permute them.
    is_ordered = weights.get("actorder") in (None, "weight", "static")
    if kind == (Int4.format, 4, "group") and int(weights["group_size"]) % 8 == 0 and is_ordered:
        return Int4(int(weights["group_size"]))
    return None


def error_of(weight: Tensor, parts: Mapping[str, Tensor], scheme: Scheme) -> dict[str, float]:
    """Quantisation error: its norm relative to the weight's norm, and the largest absolute error of one element."""
    shape = tuple(weight.shape)
    difference = scheme.dequantise(parts, shape, tuple((0, size) for size in shape)).sub_(weight)
    norm = weight.norm().item()
    relative = difference.norm().item() / norm if norm > 0 else 0.0
    return {"relative": relative, "largest": difference.abs().max().item()}
