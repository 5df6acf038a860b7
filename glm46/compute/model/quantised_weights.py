"""Frozen weights in FP8, INT4 or NF4 (`BASE_FORMATS`): values, and a scale for each group of columns of each row.

Both are stored as integer parameters with the same bits, because FSDP2 gathers integers unchanged but casts floating
point to the compute type. They are sharded like the weight, since no scale belongs to two rows. Only products read
them, so no weight is kept in the compute type.

4-bit values are packed in pairs of columns, the first one in the low bits, as in `compressed-tensors`. The dtype of the
scales identifies the format:

* float8: E4M3, FP32 scales. Scales per row can represent both formats of published folders, blocks of 128 x 128 and
  whole rows.
* int4: value + 8, BF16 scales. Groups of 32 columns can represent folders with groups of any multiple of 32.
* nf4: the 16 levels of QLoRA (arXiv 2305.14314, appendix E), blocks of 64. Scales are quantised again, to 8-bit floats
  with 5 bits of exponent and 3 of mantissa. QLoRA's second level, a scale of 256 blocks and a mean of the tensor, spans
  rows, so a shard could not hold it. `encode_nf4` chooses the better of the two nearest scales, and so loses less than
  QLoRA.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46 import compat
from glm46.compute.model.layers import local_weight
from glm46.compute.model.transformer import Transformer
from glm46.config.adapter import BASE_FORMATS, BaseFormat
from glm46.run.parameters import DECODED_AT_ONCE, base_families, find_parameter, scales_name

_SCALE_TYPES = {"float8": torch.int32, "int4": torch.int16, "nf4": torch.uint8}
_FORMAT_OF_SCALE_TYPE = {dtype: name for name, dtype in _SCALE_TYPES.items()}
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Ascending; the code of a value is its index."""
_LEVELS = {"int4": tuple(float(value) for value in range(-8, 8)), "nf4": NF4_LEVELS}
CODE_SHIFT = 7
"""Shift from an 8-bit float to FP16: the 8-bit float is FP16 without its sign and its last 7 bits."""


def store_quantised(model: Transformer, base_dtype: str) -> list[nn.Module]:
    """Replace the frozen weights of `base_families` by uninitialised parameters in this format, in place.

    Returns:
        The modules with such weights. Their products must convert the weights.
    """
    families = base_families(model.shape, base_dtype)
    modules = []
    base = BASE_FORMATS[base_dtype]
    for name, weight in list(model.named_parameters()):
        if find_parameter(name).fp8_family not in families:
            continue
        owner, _, key = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        *rows, columns = weight.shape
        values = weight.new_empty((*rows, columns * base.bits // 8), dtype=torch.uint8)
        scales = weight.new_empty((*rows, columns // base.columns), dtype=_SCALE_TYPES[base_dtype])
        module.register_parameter(key, nn.Parameter(values, requires_grad=False))
        module.register_parameter(scales_name(key), nn.Parameter(scales, requires_grad=False))
        module.compute_type = weight.dtype
        if module not in modules:
            modules.append(module)
    return modules


def local_scales(module: nn.Module, key: str) -> Tensor | None:
    """Return this rank's scales of the weight of this name, [..., O, groups]; None if it is not quantised."""
    scales = getattr(module, scales_name(key), None)
    return None if scales is None else local_weight(scales)


def base_dtype_of(scales: Tensor) -> str:
    """Return the format of the weights with such scales, a key of `BASE_FORMATS`."""
    return _FORMAT_OF_SCALE_TYPE[scales.dtype]


def format_of(scales: Tensor) -> BaseFormat:
    """Return the `BaseFormat` of the weights with such scales."""
    return BASE_FORMATS[_FORMAT_OF_SCALE_TYPE[scales.dtype]]


def columns_of(weight: Tensor, scales: Tensor | None) -> int:
    """Return the number of columns of a weight [..., O, I], or of this rank's part of it."""
    return weight.shape[-1] * (1 if scales is None else 8 // format_of(scales).bits)


def in_compute_type(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Convert a frozen weight to the compute type.

    Args:
        weight: with scales, uint8 [..., O, I], or [..., O, I / 2] for 4-bit values. Without scales, it is returned
            unchanged.
        scales: [..., O, groups].

    Returns:
        Values times scales, rounded once to `dtype`; bit for bit the result of importing a folder of this format.
    """
    if scales is None:
        return weight
    base_dtype = base_dtype_of(scales)
    columns = format_of(scales).columns
    if base_dtype == "float8":
        blocks: Tensor = weight.view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (-1, columns))
        return blocks.mul_(scales.view(torch.float32).unsqueeze(-1)).flatten(-2)
    if _one_kernel is not None and weight.is_cuda:  # a CPU is faster with the table of values
        return in_one_kernel(weight, scales, dtype)
    converted_weight = weight.new_empty((*weight.shape[:-1], columns_of(weight, scales)), dtype=dtype)
    pairs = _pairs(base_dtype, weight.device)
    # Some rows at a time, because indices take 4 bytes and values are FP32.
    rows_at_once = max(1, DECODED_AT_ONCE // max(1, converted_weight.shape[-1]))
    parts = (part.flatten(0, -2).split(rows_at_once) for part in (converted_weight, weight, scales))
    for out, packed, group_scales in zip(*parts, strict=True):
        values = pairs.index_select(0, packed.flatten().int()).view(torch.float32)
        out.copy_(
            values.view(*group_scales.shape, columns).mul_(scales_in_fp32(group_scales).unsqueeze(-1)).view(out.shape)
        )
    return converted_weight


_one_kernel: Callable[..., Tensor] | None = None
"""Compiled `converted`, once `let_conversions_compile` has been called."""


def let_conversions_compile() -> None:
    """Make this process convert 4-bit weights with one compiled kernel, which reads each byte once and writes the
    compute type, with the same bits as the operators that it replaces."""
    global _one_kernel
    _one_kernel = torch.compile(converted, fullgraph=True)


def in_one_kernel(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `in_compute_type` of a 4-bit weight, after `let_conversions_compile`."""
    assert _one_kernel is not None
    packed = weight.unflatten(-1, (-1, format_of(scales).columns // 2)).flatten(0, -2)
    flat_scales = scales.flatten()
    levels = _levels(base_dtype_of(scales), weight.device)
    compat.let_size_vary(packed, 0)
    compat.let_size_vary(flat_scales, 0)
    return _one_kernel(packed, flat_scales, *levels, dtype).view(*weight.shape[:-1], columns_of(weight, scales))


def converted(packed: Tensor, scales: Tensor, levels: Tensor, shifts: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `in_compute_type` of G groups of 4-bit values, bytes [G, columns / 2]; result [G, columns / 2, 2]."""
    values = levels[((packed.unsqueeze(-1) >> shifts) & 15).int()]
    return (values * scales_in_fp32(scales)[:, None, None]).to(dtype)


@lru_cache
def _levels(base_dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the FP32 values [16], and the shifts of the two values in a byte. Cached, like `_pairs`."""
    return torch.tensor(_LEVELS[base_dtype]).to(device), torch.tensor([0, 4], dtype=torch.uint8).to(device)


@lru_cache
def _pairs(base_dtype: str, device: torch.device) -> Tensor:
    """Return the two FP32 values of each byte, as int64 [256]. Cached, because the copy to a GPU synchronises."""
    levels = torch.tensor(_LEVELS[base_dtype])
    return torch.stack([levels.repeat(16), levels.repeat_interleave(16)], 1).view(torch.int64).view(-1).to(device)


def scales_in_fp32(scales: Tensor) -> Tensor:
    """Convert the scales of 4-bit weights to FP32."""
    if scales.dtype == torch.int16:
        return scales.view(torch.bfloat16).float()
    return (scales.to(torch.int16) << CODE_SHIFT).view(torch.float16).float()


# Operators, because a compiled graph would keep the converted weight of forward for backward.


@torch.library.custom_op("glm46::quantised_linear", mutates_args=())
def quantised_linear(x_TI: Tensor, weight: Tensor, scales: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute `F.linear` with a quantised weight, see `in_compute_type`; [T, O] in the dtype of `x_TI`, without
    gradient."""
    return F.linear(x_TI, in_compute_type(weight, scales, x_TI.dtype), bias_O)


@quantised_linear.register_fake
def _(x_TI: Tensor, weight: Tensor, scales: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight.shape[0])


@torch.library.custom_op("glm46::quantised_input_gradient", mutates_args=())
def quantised_input_gradient(grad_TO: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Compute the gradient of the input of `quantised_linear`, [T, I]."""
    return grad_TO @ in_compute_type(weight, scales, grad_TO.dtype)


@quantised_input_gradient.register_fake
def _(grad_TO: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return grad_TO.new_empty(grad_TO.shape[0], columns_of(weight, scales))
