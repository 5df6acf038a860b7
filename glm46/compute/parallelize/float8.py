"""FP8 products: operands are rounded to 8-bit floating point with one scale per tensor, row, column or part of these.

Each product of a converted layer, forward and backward, rounds what it multiplies; results, weights, gradients and
optimizer states keep their types. A rank scales what it holds: under tensor parallelism its part of a weight, under
data parallelism its own tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from glm46 import compat
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.experts import grouped_mm, grouped_outer
from glm46.compute.model.moe import MoE
from glm46.compute.model.transformer import Transformer
from glm46.config.float8 import Float8Config
from glm46.config.float8_layers import EXPERTS_MULTIPLES, MX_BLOCK, linear_layers
from glm46.run.plan import Plan

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear

LinearProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""See `Linear.product`."""
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""See `Experts.product`."""

E4M3 = torch.float8_e4m3fn


def apply(model: Transformer, plan: Plan) -> None:
    """Replace the products that [float8] names; in place."""
    float8 = plan.config.float8
    layers = linear_layers(plan.shape, float8, plan.layout.tp)
    converted = {layer.name for layer in layers if layer.excluded_by is None}
    product, recipe = linear_product(float8), _recipe(float8)
    for name, module in model.named_modules():
        if name in converted:
            module.product = product
            if float8.enable_fsdp_float8_all_gather:
                module.weight = nn.Parameter(_gathered_in_fp8(module.weight, recipe))
        elif isinstance(module, MoE) and float8.experts_recipe_name is not None:
            experts: Any = module.experts
            experts.product = experts_product(float8)
            module.dispatcher.multiple = EXPERTS_MULTIPLES[float8.experts_recipe_name]


def _recipe(float8: Float8Config) -> "Float8Linear":
    """A layer of torchao that holds its configuration of a recipe."""
    # Imported here: only FP8 runs need it.
    compat.quiet_libraries()
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name(float8.recipe_name), emulate=float8.emulate)
    return Float8Linear(1, 1, bias=False, config=config, device="meta")


def _gathered_in_fp8(weight: Tensor, recipe: "Float8Linear") -> Tensor:
    """A weight that FSDP2 gathers in FP8, with one scale for all shards. `local_tensor` gives the shard as it is."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    if not isinstance(weight, DTensor):
        return WeightWithDynamicFloat8CastTensor(weight, recipe.linear_mm_config, E4M3)
    local = WeightWithDynamicFloat8CastTensor(weight.to_local(), recipe.linear_mm_config, E4M3)
    return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)


class GatheredScales:
    """The scales of the weights that FSDP2 gathers in FP8. torchao computes one in each gather, with a collective;
    between two steps of the optimizer they stay the same, and one collective is enough for all."""

    def __init__(self, parameters: Iterable[Tensor], dense: DeviceMesh):
        """``dense``: see `Meshes.dense`. The parameters are taken now: during a forward they are gathered weights."""
        shards = map(compat.shard_gathered_in_fp8, parameters)
        self._weights = [shard for shard in shards if shard is not None]
        self._group = dense.get_group("shard")

    @contextmanager
    def given(self) -> Iterator[None]:
        """Gathers in this context use the scales of the weights as they are now, which must not change in it.
        Collective."""
        if not self._weights:
            yield
            return
        from torchao.float8.float8_utils import amax_to_scale

        amax = torch.stack([torch.linalg.vector_norm(local_tensor(weight), math.inf) for weight in self._weights])
        dist.all_reduce(amax, dist.ReduceOp.MAX, self._group)
        self._set(amax_to_scale(amax, E4M3).unbind())
        try:
            yield
        finally:
            self._set([None] * len(self._weights))

    def _set(self, scales: Sequence[Tensor | None]) -> None:
        for weight, scale in zip(self._weights, scales, strict=True):
            compat.give_fp8_scale(weight, scale)


def linear_product(float8: Float8Config) -> LinearProduct:
    """`Linear.product` by a recipe of torchao, whose autograd function takes plain tensors."""
    layer = _recipe(float8)
    products, config = layer.linear_mm_config, layer.config
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)
        return y if bias is None else y + bias

    return product


def experts_product(float8: Float8Config) -> GroupedProduct:
    """`Experts.product` by a recipe: emulated on any device, or by torchao's kernels for NVIDIA GPUs. Sizes of groups
    are multiples of `EXPERTS_MULTIPLES`."""
    recipe = float8.experts_recipe_name
    if float8.emulate:
        return partial(emulated_grouped_product, block=MX_BLOCK if recipe == "mxfp8" else None)
    assert recipe is not None, "no experts are converted"
    multiply = compat.float8_grouped_mm(recipe)

    def product(x_NI: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
        if len(x_NI) == 0:  # the kernels refuse the strides of no rows, in backward
            return grouped_mm(x_NI, weight_EOI.transpose(1, 2), offsets)
        if compat.gradients_of_empty_groups_are_undefined(x_NI.device):
            weight_EOI = _NoGradientOfEmptyGroups.apply(weight_EOI, offsets)
        return multiply(x_NI, weight_EOI.transpose(1, 2), offsets)

    return product


class _NoGradientOfEmptyGroups(torch.autograd.Function):
    """The weight itself; backward writes zeros to the gradients of experts without rows."""

    @staticmethod
    def forward(ctx, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return weight_EOI.view_as(weight_EOI)

    @staticmethod
    def backward(ctx, grad_EOI: Tensor):
        (offsets,) = ctx.saved_tensors
        return grad_EOI.masked_fill(compat.empty_groups(offsets), 0.0), None


class _EmulatedGroupedProduct(torch.autograd.Function):
    """The rounding of `compat.float8_grouped_mm` before products in the dtype of the operands. These hold the rounded
    values exactly: four bits times a power of two. torchao emulates only "mxfp8", in BF16."""

    @staticmethod
    def forward(ctx, x_NI: Tensor, weight_EOI: Tensor, offsets: Tensor, block: int | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_EOI, offsets)
        ctx.block = block
        return grouped_mm(_rounded(x_NI, -1, block), _rounded(weight_EOI, -1, block).transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx, grad_NO: Tensor):
        (x_NI, weight_EOI, offsets), block = ctx.saved_tensors, ctx.block
        grad_NO = grad_NO.contiguous()  # grouped_mm rejects the strides of an expanded gradient
        grad_x = grouped_mm(_rounded(grad_NO, -1, block), _rounded(weight_EOI, 1, block), offsets)
        columns = (_rounded_in_groups(x, offsets, block) for x in (grad_NO, x_NI))
        return grad_x, grouped_outer(*columns, offsets), None, None


def emulated_grouped_product(x_NI: Tensor, weight_EOI: Tensor, offsets: Tensor, block: int | None = None) -> Tensor:
    """`Experts.product` in the numerics of FP8, on any device, with a scale per ``block`` elements of a row or column,
    or one for all. Sizes of groups and ``len(x_NI)`` are multiples of ``block``."""
    return _EmulatedGroupedProduct.apply(x_NI, weight_EOI, offsets, block)


def _rounded(x: Tensor, dim: int, block: int | None) -> Tensor:
    """`x` rounded to E4M3 with a scale for each slice along `dim`, or for each ``block`` elements of it."""
    if block is not None:
        dim %= x.ndim
        blocks = x.unflatten(dim, (-1, block))
        return _rounded(blocks, dim + 1, None).flatten(dim, dim + 1)
    return _round(x, _scale(x.abs().amax(dim, keepdim=True)))


def _rounded_in_groups(x_NI: Tensor, offsets: Tensor, block: int | None) -> Tensor:
    """`x` rounded to E4M3 with a scale for each column of each group of rows, or of each ``block`` rows of a group."""
    if block is not None:
        return _rounded(x_NI, 0, block)  # groups have whole blocks
    group_N = torch.searchsorted(offsets, torch.arange(len(x_NI), device=x_NI.device), right=True)
    # The last group has the rows of no expert.
    bounds = torch.cat([offsets.new_zeros(1), offsets, offsets.new_full((1,), len(x_NI))])
    # `index_reduce_` and `scatter_reduce_` raise on a GPU under debug.deterministic, whatever they reduce by.
    amax = torch.segment_reduce(x_NI.abs(), "max", offsets=bounds, initial=0.0, unsafe=True)
    return _round(x_NI, _scale(amax)[group_N])


def _scale(amax: Tensor) -> Tensor:
    from torchao.float8.float8_utils import amax_to_scale

    return amax_to_scale(amax, E4M3, round_scales_to_power_of_2=True)


def _round(x: Tensor, scale: Tensor) -> Tensor:
    from torchao.float8.float8_utils import to_fp8_saturated

    return (to_fp8_saturated(x.float() * scale, E4M3).float() / scale).to(x.dtype)
