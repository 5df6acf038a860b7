"""Frozen weights in FP8: E4M3 values, and an FP32 scale for each row of each 128 columns.

A scale for each row holds the scales of blocks of 128 x 128 and those of whole rows, the two formats of published
folders, and is sharded as the weight is. Both are parameters of integers with the same bits, which FSDP2 gathers as
they are: it casts floating point to the compute type. Nothing but a product reads them, so no weight is kept in the
compute type.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46.compute.model.layers import local_weight
from glm46.compute.model.transformer import Transformer
from glm46.run.parameters import FP8_BLOCK, find_parameter, fp8_families, scales_name


def store_in_fp8(model: Transformer) -> list[nn.Module]:
    """Replace the frozen weights whose sizes are multiples of 128 by parameters in FP8, without values; in place.

    Returns:
        The modules with such weights. Their products must convert them.
    """
    families, modules = fp8_families(model.shape), []
    for name, weight in list(model.named_parameters()):
        if find_parameter(name).fp8_family not in families:
            continue
        owner, _, key = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        values = weight.new_empty(weight.shape, dtype=torch.uint8)
        scales = weight.new_empty((*weight.shape[:-1], weight.shape[-1] // FP8_BLOCK), dtype=torch.int32)
        module.register_parameter(key, nn.Parameter(values, requires_grad=False))
        module.register_parameter(scales_name(key), nn.Parameter(scales, requires_grad=False))
        module.compute_type = weight.dtype
        if module not in modules:
            modules.append(module)
    return modules


def local_scales(module: nn.Module, key: str) -> Tensor | None:
    """This rank's scales of the weight of this name, int32 [..., O, I / 128]; None if it is not in FP8."""
    scales = getattr(module, scales_name(key), None)
    return None if scales is None else local_weight(scales)


def in_compute_type(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A frozen weight as products take it.

    Args:
        weight: [..., O, I], uint8 if there are scales, else in its own type, in which it is returned.
        scales: int32 [..., O, I / 128].

    Returns:
        Values times scales, rounded once to `dtype`: what import makes of the folder, bit for bit.
    """
    if scales is None:
        return weight
    blocks = weight.view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (-1, FP8_BLOCK))
    return blocks.mul_(scales.view(torch.float32).unsqueeze(-1)).flatten(-2)


# Operators, because a compiled graph would keep the converted weight of forward for backward.


@torch.library.custom_op("glm46::fp8_linear", mutates_args=())
def fp8_linear(x_TI: Tensor, weight_OI: Tensor, scales: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear` with a weight in FP8, see `in_compute_type`; [T, O] in the dtype of `x_TI`, without gradient."""
    return F.linear(x_TI, in_compute_type(weight_OI, scales, x_TI.dtype), bias_O)


@fp8_linear.register_fake
def _(x_TI: Tensor, weight_OI: Tensor, scales: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])


@torch.library.custom_op("glm46::fp8_input_gradient", mutates_args=())
def fp8_input_gradient(grad_TO: Tensor, weight_OI: Tensor, scales: Tensor) -> Tensor:
    """The gradient of the input of `fp8_linear`, [T, I]."""
    return grad_TO @ in_compute_type(weight_OI, scales, grad_TO.dtype)


@fp8_input_gradient.register_fake
def _(grad_TO: Tensor, weight_OI: Tensor, scales: Tensor) -> Tensor:
    return grad_TO.new_empty(grad_TO.shape[0], weight_OI.shape[1])
