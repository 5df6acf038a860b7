"""Low-rank adapters: layers multiply by ``W + scale * B A`` instead of a frozen weight W.

DoRA scales each row of the sum to a trained magnitude: ``W'_i = m_i V_i / |V_i|`` with V = W + scale * B A, where |V_i|
is a constant in backward (arXiv 2402.09353, section 4.3). So the result is scaled, and no weight is built:
``y_i = (m_i / |V_i|) (V x)_i``. `compute/parallelize/magnitudes.py` computes the norms, once per optimizer step.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46 import compat
from glm46.compat import FunctionContext
from glm46.compute.model.experts import Experts, grouped_mm, grouped_outer
from glm46.compute.model.layers import Linear, local_weight
from glm46.compute.model.quantised_weights import (
    columns_of,
    in_compute_type,
    local_scales,
    quantised_input_gradient,
    quantised_linear,
    store_quantised,
)
from glm46.compute.model.transformer import Transformer
from glm46.config.adapter import AdapterConfig
from glm46.run.parameters import adapter_layer


def add_adapters(model: Transformer, adapter: AdapterConfig, dtype: torch.dtype = torch.float32) -> None:
    """Freeze a model, or a part of it, and add the trainable adapters of the [adapter] table, in place.

    The adapters are allocated on the device of the model, uninitialised: `fill_parameter` sets the initial values. The
    same holds for weights of a quantised base, which import reads.
    """
    model.requires_grad_(False)
    if adapter.base_dtype:
        for module in store_quantised(model, adapter.base_dtype):
            _replace_product(module, adapter.scale)
    for index, layer in model.layers.items():
        for row in adapter_layer(model.shape, adapter, int(index)):
            owner, _, key = row.name.rpartition(".")
            adapted: Any = layer.get_submodule(owner)
            device = next(adapted.parameters()).device
            adapted.register_parameter(
                key, nn.Parameter(torch.empty(row.shape(model.shape), dtype=dtype, device=device))
            )
            adapted.is_adapted = True
            _replace_product(adapted, adapter.scale)


def _replace_product(module: Any, scale: float) -> None:
    is_experts = isinstance(module, Experts)
    if is_experts:
        module.project = partial(_project, module, scale)
    else:
        module.product = partial(_linear_product, module, scale)


@contextmanager
def without_adapters(models: Iterable[Transformer]) -> Iterator[None]:
    """Context in which models, or parts of one, compute with their frozen weights alone. Not to be entered or left
    between a forward and its backward."""
    modules: list[Any] = [module for model in models for module in model.modules() if hasattr(module, "is_adapted")]
    for module in modules:
        module.is_adapted = False
    try:
        yield
    finally:
        for module in modules:
            module.is_adapted = True


def _linear_product(module: Any, scale: float, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `Linear.product`; for a module with adapters, a quantised weight, or both."""
    scales = local_scales(module, "weight")
    is_adapted = getattr(module, "is_adapted", False)
    if not is_adapted and scales is None:
        return Linear.product(x, weight, bias)
    a = b = excess = None
    if is_adapted:
        a, b = (local_weight(part).to(x.dtype) for part in (module.lora_A, module.lora_B))
        excess = _excess(module, "") if hasattr(module, "magnitude") else None
    y_TO: Tensor = _AdaptedLinear.apply(x.flatten(0, -2), weight, scales, bias, a, b, scale, excess)
    return y_TO.view(*x.shape[:-1], -1)


class _ScaledContext(FunctionContext, Protocol):
    scale: float


class _AdaptedLinear(torch.autograd.Function):
    """``x @ (weight + scale * b @ a).T + bias`` without a gradient of weight and bias. DoRA scales the product, without
    the bias, by ``1 + excess``, FP32 [O]. Without a and b, only the weight is used.

    One function, so that both terms of the result, and of the gradient of x, are added into one tensor.
    """

    @staticmethod
    def forward(
        ctx: _ScaledContext,
        x_TI: Tensor,
        weight_OI: Tensor,
        scales: Tensor | None,
        bias_O: Tensor | None,
        a_RI: Tensor | None,
        b_OR: Tensor | None,
        scale: float,
        excess_O: Tensor | None,
    ) -> Tensor:
        y_TO = (
            F.linear(x_TI, weight_OI, bias_O) if scales is None else quantised_linear(x_TI, weight_OI, scales, bias_O)
        )
        ctx.scale = scale
        low_TR = None
        unscaled_TO = None
        if a_RI is not None and b_OR is not None:
            low_TR = F.linear(x_TI, a_RI).mul_(scale)
            # In place, except in a graph: torch 2.11 compiles wrong gradients of an output that was modified in place.
            add = y_TO.addmm if torch.compiler.is_compiling() else y_TO.addmm_
            y_TO = add(low_TR, b_OR.t())
        if excess_O is not None:
            unscaled_TO = y_TO if bias_O is None else y_TO - bias_O
            y_TO = torch.addcmul(y_TO, unscaled_TO, excess_O.to(y_TO.dtype))
        kept_TI = None if a_RI is None else x_TI
        ctx.save_for_backward(kept_TI, weight_OI, scales, a_RI, b_OR, low_TR, unscaled_TO, excess_O)
        return y_TO

    @staticmethod
    def backward(ctx: _ScaledContext, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, scales, a_RI, b_OR, low_TR, unscaled_TO, excess_O = ctx.saved_tensors
        grad_x = grad_a = grad_b = grad_excess = grad_low_TR = None
        if excess_O is not None:
            grad_excess = (grad_TO * unscaled_TO).sum(0, dtype=excess_O.dtype)
            grad_TO = torch.addcmul(grad_TO, grad_TO, excess_O.to(grad_TO.dtype))
        if a_RI is not None:
            grad_low_TR = (grad_TO @ b_OR).mul_(ctx.scale)
            grad_a = grad_low_TR.t() @ x_TI
            grad_b = grad_TO.t() @ low_TR
        if ctx.needs_input_grad[0]:
            grad_x = grad_TO @ weight_OI if scales is None else quantised_input_gradient(grad_TO, weight_OI, scales)
            if a_RI is not None:
                grad_x.addmm_(grad_low_TR, a_RI)
        return grad_x, None, None, None, grad_a, grad_b, None, grad_excess


def _project(module: Experts, scale: float, name: str, x_NI: Tensor, offsets: Tensor) -> Tensor:
    """See `Experts.project`; for experts with adapters, quantised weights, or both."""
    weight = local_weight(getattr(module, name))
    scales = local_scales(module, name)
    is_adapted = getattr(module, "is_adapted", False)
    a = None
    b = None
    if not is_adapted and scales is None:
        return module.product(x_NI, weight, offsets)
    if is_adapted:
        a, b = (local_weight(getattr(module, f"{name}_{key}")).to(x_NI.dtype) for key in ("lora_A", "lora_B"))
    y_NO: Tensor = adapted_grouped_mm(x_NI, weight, scales, a, b, offsets, scale)[0]
    if is_adapted and hasattr(module, f"{name}_magnitude"):
        scaled_NO: Tensor = _add_scaled_groups(y_NO, _excess(module, f"{name}_").to(x_NI.dtype), offsets)
        return scaled_NO
    return y_NO


def _excess(module: nn.Module, prefix: str) -> Tensor:
    """Return ``m / |V| - 1`` of each row, FP32, with the gradient of m. It is zero for a new adapter, and BF16 keeps
    the bits of small values. The value comes from `magnitudes.py`, which computes it with the norms from m in FP32:
    FSDP2 gathers m rounded."""
    m = local_weight(getattr(module, f"{prefix}magnitude"))
    # The second term is zero and has the gradient of m.
    excess: Tensor = getattr(module, f"{prefix}excess")
    norm: Tensor = getattr(module, f"{prefix}norm")
    return excess + (m - m.detach()) / norm


@torch.library.custom_op("glm46::adapted_grouped_mm", mutates_args=())
def adapted_grouped_mm(
    x_NI: Tensor,
    weight_EOI: Tensor,
    scales: Tensor | None,
    a_ERI: Tensor | None,
    b_EOR: Tensor | None,
    offsets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Multiply each group of rows by the transpose of ``weight + scale * b @ a`` of its expert.

    One operator, because selective checkpointing keeps the results of grouped products: this way it keeps the sum, not
    both of its terms, and no converted quantised weight. The weight has no gradient.

    Args:
        x_NI: [N, I], sorted by expert; results of rows past the last offset are undefined.
        scales: [E, O, groups] for a quantised weight, see `in_compute_type`.
        a_ERI, b_EOR: adapters; None: only the weight is used.
        offsets: int32 [E], running sum of the group sizes.

    Returns:
        [N, O], and for backward ``scale * x @ a.T``, [N, R], or [N, 0] without adapters; dtype of `x_NI`.
    """
    y_NO = compat.grouped_mm(x_NI, in_compute_type(weight_EOI, scales, x_NI.dtype).transpose(1, 2), offsets)
    if a_ERI is None or b_EOR is None:
        return y_NO, x_NI.new_empty(x_NI.shape[0], 0)
    low_NR = compat.grouped_mm(x_NI, a_ERI.transpose(1, 2), offsets).mul_(scale)
    return y_NO.add_(compat.grouped_mm(low_NR, b_EOR.transpose(1, 2), offsets)), low_NR


@adapted_grouped_mm.register_fake
def _(
    x_NI: Tensor,
    weight_EOI: Tensor,
    scales: Tensor | None,
    a_ERI: Tensor | None,
    b_EOR: Tensor | None,
    offsets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rank = 0 if a_ERI is None else a_ERI.shape[1]
    return x_NI.new_empty(x_NI.shape[0], weight_EOI.shape[1]), x_NI.new_empty(x_NI.shape[0], rank)


@torch.library.custom_op("glm46::frozen_grouped_mm", mutates_args=())
def _frozen_grouped_mm(grad_NO: Tensor, weight_EOI: Tensor, scales: Tensor | None, offsets: Tensor) -> Tensor:
    """Compute the gradient of the rows, [N, I]. An operator that converts a quantised weight inside: a compiled graph
    would keep the converted weight of forward for backward."""
    return compat.grouped_mm(grad_NO, in_compute_type(weight_EOI, scales, grad_NO.dtype), offsets)


@_frozen_grouped_mm.register_fake
def _(grad_NO: Tensor, weight_EOI: Tensor, scales: Tensor | None, offsets: Tensor) -> Tensor:
    return grad_NO.new_empty(grad_NO.shape[0], columns_of(weight_EOI, scales))


def _save_for_product(ctx: _ScaledContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_NI, weight_EOI, scales, a_ERI, b_EOR, offsets, ctx.scale = inputs
    kept_NI = None if a_ERI is None else x_NI
    ctx.save_for_backward(kept_NI, weight_EOI, scales, a_ERI, b_EOR, offsets, output[1])


def _product_backward(ctx: _ScaledContext, grad_NO: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x_NI, weight_EOI, scales, a_ERI, b_EOR, offsets, low_NR = ctx.saved_tensors
    grad_NO = grad_NO.contiguous()  # grouped_mm rejects the strides of an expanded gradient
    grad_x = grad_a = grad_b = grad_low_NR = None
    if a_ERI is not None:
        grad_low_NR = grouped_mm(grad_NO, b_EOR, offsets).mul_(ctx.scale)
        grad_a = grouped_outer(grad_low_NR, x_NI, offsets)
        grad_b = grouped_outer(grad_NO, low_NR, offsets)
    if ctx.needs_input_grad[0]:
        grad_x = _frozen_grouped_mm(grad_NO, weight_EOI, scales, offsets)
        if a_ERI is not None:
            grad_x.add_(grouped_mm(grad_low_NR, a_ERI, offsets))
    return grad_x, None, None, grad_a, grad_b, None, None


adapted_grouped_mm.register_autograd(_product_backward, setup_context=_save_for_product)


@torch.library.custom_op("glm46::add_scaled_groups", mutates_args=())
def _add_scaled_groups(x_NO: Tensor, factor_EO: Tensor, offsets: Tensor) -> Tensor:
    """Compute ``x + x * factor`` with the factors of each row's group, [N, O]. Backward sums the rows of a group in one
    grouped product; the built-in backward of indexing adds them in varying order."""
    factor_NO = _of_rows(x_NO, factor_EO, offsets)
    return torch.addcmul(x_NO, x_NO, factor_NO, out=factor_NO)


@_add_scaled_groups.register_fake
def _(x_NO: Tensor, factor_EO: Tensor, offsets: Tensor) -> Tensor:
    return torch.empty_like(x_NO)


def _of_rows(x_NO: Tensor, factor_EO: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
    group_N = torch.searchsorted(offsets, torch.arange(x_NO.shape[0], device=x_NO.device), right=True)
    group_N.clamp_(max=factor_EO.shape[0] - 1)  # rows past the last group are not read
    return torch.index_select(factor_EO, 0, group_N, out=out)


def _save_for_scaling(ctx: FunctionContext, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _scaling_backward(ctx: FunctionContext, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
    x_NO, factor_EO, offsets = ctx.saved_tensors
    ones = x_NO.new_ones(x_NO.shape[0], 8)  # rows of 16 bytes, which grouped products need
    product_NO = grad_NO * x_NO
    grad_factor = grouped_outer(ones, product_NO, offsets)[:, 0]
    # Reuse the buffer: on a CPU, the first use of new memory costs more than the computation.
    factor_NO = _of_rows(grad_NO, factor_EO, offsets, out=product_NO)
    return torch.addcmul(grad_NO, grad_NO, factor_NO, out=factor_NO), grad_factor, None


_add_scaled_groups.register_autograd(_scaling_backward, setup_context=_save_for_scaling)


def merged_rows(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float) -> Tensor:
    """Merge an adapter into rows of a matrix: W + scale B A, or with magnitudes m (W + scale B A) / |W + scale B A|.

    Args:
        weight: FP32 [rows, I]; a: FP32 [R, I]; b: FP32 [rows, R]; magnitude: FP32 [rows] under DoRA, else None.

    Returns:
        FP32 [rows, I].
    """
    total = torch.addmm(weight, b, a, alpha=scale)
    if magnitude is not None:
        total *= (magnitude / torch.linalg.vector_norm(total, dim=1)).unsqueeze(1)
    return total
