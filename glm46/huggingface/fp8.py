"""FP8 weights of a Hugging Face folder: an E4M3 tensor and a tensor of scales beside it.

Export writes two formats, both as `compressed-tensors`, which vLLM and SGLang read: "block", one scale per 128 x 128
weights (`X.weight_scale` [O / 128, I / 128]), and "channel", one per row ([O, 1]), as in GLM-4.5-FP8. Import reads both
and the older `quant_method = "fp8"` with `X.weight_scale_inv`, which is "block" under another name.
Sources: vLLM `compressed_tensors.py`, `utils.py` and `fp8_utils.py`; compressed-tensors `quant_scheme.py` (FP8_BLOCK,
FP8_DYNAMIC). The layers that stay in BF16: config.json of GLM-4.5-FP8 and GLM-4.5-Air-FP8, and llm-compressor
`examples/model_free_ptq/glm_4.6_fp8_block.py`.

Scales are powers of two. A dequantised weight is then exact in BF16 and FP32, and quantising it again gives the same
bytes. This costs no precision: E4M3 has the same relative step in every binade of its normal range.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.files.tensor_file import Box
from glm46.huggingface.names import HFEntry, HFNames, HFPart

CONFIG_KEY = "quantization_config"
ERRORS_FILE = "quantization_errors.json"

_BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_ROUNDS_TO_LARGEST = 464.0
"""Largest number that rounds to 448: half a step above it. If the largest number of a block lies between half of this
and this, its rounded value does too, so quantising again finds the same scale."""
_SCALE_TYPES = (torch.float32, torch.bfloat16)
_IGNORED = ["lm_head", "re:.*embed_tokens$", "re:.*mlp[.]gate$", "re:.*eh_proj$", "re:.*shared_head.*"]


@dataclass(frozen=True)
class Scheme:
    """Granularity of the scales of a weight [O, I]."""

    block: tuple[int, int] | None = (_BLOCK, _BLOCK)
    """Rows and columns with one scale; None: one scale per row."""
    suffix: str = "_scale"
    """Appended to a weight's name, gives the name of its scales."""

    def grid(self, columns: int) -> tuple[int, int]:
        """Rows and columns that share a scale, in a weight with this number of columns."""
        return (1, columns) if self.block is None else self.block

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a weight."""
        return tuple(-(-size // step) for size, step in zip(shape, self.grid(shape[1]), strict=True))


SCHEMES = {"fp8-block": Scheme(), "fp8-channel": Scheme(block=None)}
"""Schemes of an export, by `--dtype`."""


def quantised_names(names: HFNames, scheme: Scheme | None) -> frozenset[str]:
    """Hugging Face names of the tensors that an export stores in FP8: the projections of attention, dense layers and
    experts, except families with a size that is not a multiple of the block."""
    if scheme is None:
        return frozenset()
    without = {None, *_unfit_families(names, scheme)}
    return frozenset(name for name, (entry, _) in names.places.items() if entry.row.fp8_family not in without)


def _unfit_families(names: HFNames, scheme: Scheme) -> list[str]:
    """Families with a size that is not a multiple of the block, such as the dense layer of GLM-4.5-Air with 10,944
    rows. vLLM and SGLang refuse to fuse such matrices (`validate_fp8_block_shape`), so they stay in BF16."""
    if scheme.block is None:
        return []
    unfit = set()
    for entry, part in names.places.values():
        family = entry.row.fp8_family
        if family is not None and any(size % step for size, step in zip(part.hf_shape, scheme.block, strict=True)):
            unfit.add(family)
    return sorted(unfit)


def config_of_scheme(scheme: Scheme, names: HFNames) -> dict[str, Any]:
    """The `quantization_config` of an export. Activations are quantised dynamically, so no calibration is needed.

    Raises:
        UserError: no projection of this model fits the scheme.
    """
    unfit = _unfit_families(names, scheme)
    if not quantised_names(names, scheme):
        raise UserError(
            f"--dtype fp8-block: no projection of this model has sizes that are multiples of {_BLOCK}; use fp8-channel"
        )
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    if scheme.block is None:
        weights, inputs = {"strategy": "channel"}, {"strategy": "token"}
    else:
        weights = {"strategy": "block", "block_structure": list(scheme.block)}
        inputs = {"strategy": "group", "group_size": scheme.block[1]}
    group = {
        "targets": ["Linear"],
        "weights": common | {"dynamic": False} | weights,
        "input_activations": common | {"dynamic": True} | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _IGNORED + [f"re:.*{family}$" for family in unfit],
        "kv_cache_scheme": None,
    }


def scheme_of(raw: Mapping[str, Any], file: str) -> Scheme | None:
    """The scheme of a folder's weights; None if they are not quantised.

    Args:
        raw: content of its config.json.
        file: named in the message.

    Raises:
        UserError: the quantisation is not supported.
    """
    config = raw.get(CONFIG_KEY)
    if config is None:
        return None
    try:
        if config["quant_method"] == "fp8":
            rows, columns = config["weight_block_size"]
            return Scheme((int(rows), int(columns)), "_scale_inv")
        if config["quant_method"] == "compressed-tensors" and config["format"] == "float-quantized":
            (group,) = config["config_groups"].values()
            weights = group["weights"]
            if weights["num_bits"] == 8 and weights["symmetric"] and weights["strategy"] == "channel":
                return Scheme(None)
            if weights["num_bits"] == 8 and weights["symmetric"] and weights["strategy"] == "block":
                rows, columns = weights["block_structure"]
                return Scheme((int(rows), int(columns)))
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise UserError(
        f"{file}: {CONFIG_KEY} is not supported; use the BF16 model, or FP8 weights quantised as compressed-tensors "
        "with one scale per block or row, or as fp8 with weight_block_size"
    )


def scale_faults(scheme: Scheme, records: Mapping[str, Any], names: HFNames) -> tuple[set[str], list[str]]:
    """Names of the tensors that are scales, and the faults of scales and FP8 weights. Tensors that are not part of the
    model are not judged here.

    Args:
        records: Hugging Face name -> record with `dtype` and `shape`.
    """
    scales, faults = set(), []
    for name, record in records.items():
        if record.dtype != torch.float8_e4m3fn:
            continue
        scale = records.get(name + scheme.suffix)
        is_refused = name in names.places and not _may_be_fp8(*names.places[name])
        if is_refused or len(record.shape) != 2:
            faults.append(f"tensor {name} is FP8; only projections and shared_head.head may be")
        elif scale is None:
            faults.append(f"tensor {name} is FP8, but {name}{scheme.suffix} is missing")
        elif scale.shape != scheme.scale_shape(record.shape) or scale.dtype not in _SCALE_TYPES:
            faults.append(
                f"tensor {name}{scheme.suffix} is {list(scale.shape)} {scale.dtype}, it must be "
                f"{list(scheme.scale_shape(record.shape))} in FP32 or BF16"
            )
        scales.add(name + scheme.suffix)
    return scales, faults


def _may_be_fp8(entry: HFEntry, part: HFPart) -> bool:
    """GLM-4.5-FP8 and GLM-4.5-Air-FP8 store the repeat of the head in FP8, but the head itself in BF16."""
    return entry.row.fp8_family is not None or (part.is_repeat and entry.name == "lm_head.weight")


def quantise(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Quantise a weight.

    Args:
        weight: FP32 [O, I], finite.

    Returns:
        Values, E4M3 [O, I], and scales, FP32 of shape `Scheme.scale_shape`. Weight = value * scale up to rounding.
    """
    rows, columns = scheme.grid(weight.shape[1])
    grid = scheme.scale_shape(tuple(weight.shape))
    padded = weight.new_zeros(grid[0] * rows, grid[1] * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(grid[0], rows, grid[1], columns)
    largest = blocks.abs().amax((1, 3))
    # frexp: largest / 464 = m * 2**e with m in [0.5, 1): the next power of two is 2**e, or itself for 0.5.
    mantissa, exponent = torch.frexp(largest / _ROUNDS_TO_LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scales = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), torch.ones_like(largest))
    values = (blocks / scales.view(grid[0], 1, grid[1], 1)).clamp(-_LARGEST, _LARGEST)
    values = values.view_as(padded)[: weight.shape[0], : weight.shape[1]]
    return values.to(torch.float8_e4m3fn).contiguous(), scales


def scales_of_box(scheme: Scheme, columns: int, box: Box) -> Box:
    """The box of the scales for a box of a weight with this number of columns."""
    return tuple(
        (start // step, -(-(start + length) // step) - start // step)
        for (start, length), step in zip(box, scheme.grid(columns), strict=True)
    )


def dequantise(values: Tensor, scales: Tensor, scheme: Scheme, columns: int, box: Box) -> Tensor:
    """FP32 weights of a box, from its FP8 values and the scales of the box `scales_of_box`."""
    scales = scales.float()
    for dim, ((start, length), step) in enumerate(zip(box, scheme.grid(columns), strict=True)):
        places = torch.arange(start, start + length) // step - start // step
        scales = scales.index_select(dim, places)
    return values.float().mul_(scales)


def matches(weight: Tensor, values: Tensor, scales: Tensor, scheme: Scheme, columns: int, box: Box) -> bool:
    """Whether FP8 values of a box equal the weights up to one step of E4M3: other tools round differently."""
    step = dequantise(torch.ones_like(values), scales, scheme, columns, box).mul_(2.0**-9)
    difference = dequantise(values, scales, scheme, columns, box).sub_(weight)
    return bool((difference.abs_() <= weight.abs() / 8 + step).all())


def error_of(weight: Tensor, values: Tensor, scales: Tensor, scheme: Scheme) -> dict[str, float]:
    """Quantisation error: its norm relative to the weight's norm, and the largest absolute error of one element."""
    box = tuple((0, size) for size in weight.shape)
    difference = dequantise(values, scales, scheme, weight.shape[1], box).sub_(weight)
    norm = weight.norm().item()
    relative = difference.norm().item() / norm if norm > 0 else 0.0
    return {"relative": relative, "largest": difference.abs().max().item()}
