"""FP8 products of routed experts: rows and weights are rounded with one scale per row, column or part of these."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from glm46 import compat
from glm46.compat import FunctionContext
from glm46.compute.model.experts import Experts, grouped_mm, grouped_outer
from glm46.compute.model.layers import local_weight
from glm46.compute.model.transformer import Transformer
from glm46.config.float8 import Float8Config
from glm46.config.float8_layers import MX_BLOCK, keeps_rounded_experts
from glm46.run.plan import Plan

GroupedProduct = Callable[..., Tensor]
"""See `Experts.product`."""
E4M3 = torch.float8_e4m3fn


def experts_product(float8: Float8Config) -> GroupedProduct:
    """Return an `Experts.product` by a recipe: emulated on any device, or by torchao's kernels for NVIDIA GPUs. Sizes
    of groups are multiples of `EXPERTS_MULTIPLES`."""
    kernels = experts_kernels(float8)
    multiply = compat.mxfp8_grouped_mm() if kernels is None else partial(_GroupedProduct.apply, kernels)

    def product(x_NI: Tensor, weight_EOI: Tensor, offsets: Tensor, *forms: Tensor) -> Tensor:
        if float8.emulate:
            return multiply(x_NI, weight_EOI, offsets, *forms)
        if len(x_NI) == 0:  # the kernels refuse the strides of no rows, in backward
            y_NO: Tensor = grouped_mm(x_NI, weight_EOI.transpose(1, 2), offsets)
            return y_NO
        if compat.gradients_of_empty_groups_are_undefined(x_NI.device):
            weight_EOI = _NoGradientOfEmptyGroups.apply(weight_EOI, offsets)
        return multiply(x_NI, weight_EOI, offsets, *forms)

    return product


class _NoGradientOfEmptyGroups(torch.autograd.Function):
    """The weight itself; backward writes zeros to the gradients of experts without rows."""

    @staticmethod
    def forward(ctx: FunctionContext, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return weight_EOI.view_as(weight_EOI)

    @staticmethod
    def backward(ctx: FunctionContext, grad_EOI: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        return grad_EOI.masked_fill(compat.empty_groups(offsets), 0.0), None


class GroupedKernels(Protocol):
    """Products of rows and of weights that are rounded to FP8."""

    def forms(self, weight_EOI: Tensor, for_backward: bool) -> tuple[Tensor, ...]:
        """Return the weight rounded for `multiply`: along the inputs for the product of forward, along the outputs for
        the product of backward."""

    def multiply(self, x_NI: Tensor, forms: tuple[Tensor, ...], offsets: Tensor) -> Tensor:
        """Multiply each group of rows, rounded, by the forms of its weight."""

    def outer(self, grad_NO: Tensor, x_NI: Tensor, offsets: Tensor) -> Tensor:
        """Return the weight gradient [E, O, I]; both operands are rounded along the rows of a group."""


class _ProductContext(FunctionContext, Protocol):
    kernels: GroupedKernels
    has_forms: bool


class _GroupedProduct(torch.autograd.Function):
    """`Experts.product` with kernels that round. Gradients of expanded tensors are made contiguous: kernels reject
    their strides."""

    @staticmethod
    def forward(
        ctx: _ProductContext, kernels: GroupedKernels, x_NI: Tensor, weight_EOI: Tensor, offsets: Tensor, *forms: Tensor
    ) -> Tensor:
        ctx.kernels = kernels
        half = len(forms) // 2  # kept forms: those for forward, then those for backward
        ctx.save_for_backward(x_NI, offsets, *(forms[half:] or (weight_EOI,)))
        ctx.has_forms = len(forms) > 0  # bool() of a tuple is not traced by torch 2.11
        return kernels.multiply(x_NI, forms[:half] or kernels.forms(weight_EOI, for_backward=False), offsets)

    @staticmethod
    def backward(ctx: _ProductContext, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, offsets, *saved = ctx.saved_tensors  # and the forms for backward, or the weight
        kernels = ctx.kernels
        grad_NO = grad_NO.contiguous()
        forms = tuple(saved) if ctx.has_forms else kernels.forms(saved[0], for_backward=True)
        grad_weight = kernels.outer(grad_NO, x_NI, offsets) if ctx.needs_input_grad[2] else None
        unused = (None,) * (len(ctx.needs_input_grad) - 3)
        return None, kernels.multiply(grad_NO, forms, offsets), grad_weight, *unused


class Emulated:
    """The rounding of torchao's kernels before products in the dtype of the operands. These hold the rounded values
    exactly: four bits times a power of two. torchao emulates only "mxfp8", in BF16.

    Args:
        block: elements of a row or column with a scale of their own; None is one for all. Sizes of groups and the
            number of rows are multiples of it.
    """

    def __init__(self, block: int | None = None):
        self._block = block

    def forms(self, weight_EOI: Tensor, for_backward: bool) -> tuple[Tensor, ...]:
        """See `GroupedKernels.forms`."""
        summed_dim = 1 if for_backward else -1  # of the product: outputs, or inputs
        rounded = _rounded(weight_EOI, summed_dim, self._block)
        return (rounded if for_backward else rounded.transpose(1, 2),)

    def multiply(self, x_NI: Tensor, forms: tuple[Tensor, ...], offsets: Tensor) -> Tensor:
        """See `GroupedKernels.multiply`."""
        y_NO: Tensor = grouped_mm(_rounded(x_NI, -1, self._block), forms[0], offsets)
        return y_NO

    def outer(self, grad_NO: Tensor, x_NI: Tensor, offsets: Tensor) -> Tensor:
        """See `GroupedKernels.outer`."""
        columns = (_rounded_in_groups(x, offsets, self._block) for x in (grad_NO, x_NI))
        grad_EOI: Tensor = grouped_outer(*columns, offsets)
        return grad_EOI


def experts_kernels(float8: Float8Config) -> GroupedKernels | None:
    """Return the kernels of the experts' recipe; None if torchao has its product only as a whole, without forms to
    keep."""
    recipe = float8.experts_recipe_name
    assert recipe is not None, "no experts are converted"
    if float8.emulate:
        return Emulated(MX_BLOCK if recipe == "mxfp8" else None)
    return compat.RowwiseKernels() if recipe == "rowwise" else None


class RoundedExperts:
    """Keeps the experts' weights rounded to FP8 for all micro-batches of a step, on stages of a pipeline. Their layers
    stay gathered for the step; elsewhere a layer is gathered again in each pass, and rounded again."""

    def __init__(self, models: Iterable[Transformer], plan: Plan):
        self._experts: list[Experts] = []
        self._is_kept = False
        kernels = experts_kernels(plan.config.float8) if keeps_rounded_experts(plan.config) else None
        if kernels is None:
            return
        for model in models:
            for block in (*model.layers.values(), *model.mtp.values()):
                for experts in (module for module in block.modules() if isinstance(module, Experts)):
                    self._experts.append(experts)
                    # It runs after the hook of FSDP2 that gathers the weights, which is first in the list, and outside
                    # a compiled layer: alone, experts are part of the unit of their layer.
                    unit = experts if isinstance(experts, FSDPModule) else block
                    unit.register_forward_pre_hook(torch.compiler.disable(self._rounding(experts, kernels)))

    def _rounding(self, experts: Experts, kernels: GroupedKernels) -> Callable[..., None]:
        @torch.no_grad()
        def hook(_module: nn.Module, _inputs: tuple[object, ...]) -> None:
            if self._is_kept and not experts.forms:
                for name in ("gate_up", "down"):
                    weight = local_weight(getattr(experts, name))
                    forms = (kernels.forms(weight, for_backward) for for_backward in (False, True))
                    experts.forms[name] = tuple(chain.from_iterable(forms))

        return hook

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the rounded weights in this context, in which weights must not change."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            for experts in self._experts:
                experts.forms = {}


def _rounded(x: Tensor, dim: int, block: int | None) -> Tensor:
    """Round `x` to E4M3 with a scale for each slice along `dim`, or for each ``block`` elements of it."""
    if block is not None:
        dim %= x.ndim
        blocks = x.unflatten(dim, (-1, block))
        return _rounded(blocks, dim + 1, None).flatten(dim, dim + 1)
    return _round(x, scale_to_fp8(x.abs().amax(dim, keepdim=True), is_power_of_2=True))


def _rounded_in_groups(x_NI: Tensor, offsets: Tensor, block: int | None) -> Tensor:
    """Round `x` to E4M3 with a scale for each column of each group of rows, or of each ``block`` rows of a group."""
    if block is not None:
        return _rounded(x_NI, 0, block)  # groups have whole blocks
    group_N = torch.searchsorted(offsets, torch.arange(len(x_NI), device=x_NI.device), right=True)
    # The last group has the rows of no expert.
    bounds = torch.cat([offsets.new_zeros(1), offsets, offsets.new_full((1,), len(x_NI))])
    # `index_reduce_` and `scatter_reduce_` raise on a GPU under debug.deterministic, whatever they reduce by.
    amax = torch.segment_reduce(x_NI.abs(), "max", offsets=bounds, initial=0.0, unsafe=True)
    return _round(x_NI, scale_to_fp8(amax, is_power_of_2=True)[group_N])


def scale_to_fp8(amax: Tensor, *, is_power_of_2: bool = False) -> Tensor:
    """Return the factors that bring the largest magnitudes to the largest value of E4M3."""
    # Imported here: only FP8 runs need it.
    from torchao.float8.float8_utils import amax_to_scale

    scale: Tensor = amax_to_scale(amax, E4M3, round_scales_to_power_of_2=is_power_of_2)
    return scale


def _round(x: Tensor, scale: Tensor) -> Tensor:
    largest = torch.finfo(E4M3).max  # the cast of torch 2.11 does not saturate
    return ((x.float() * scale).clamp(-largest, largest).to(E4M3).float() / scale).to(x.dtype)
