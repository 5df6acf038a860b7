"""All experts of a layer as two stacked matrices, applied to tokens sorted by expert."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46 import compat
from glm46.compat import FunctionContext
from glm46.compute.model.dispatch import ArrivedRows, ChunkSchedule
from glm46.compute.model.layers import local_weight
from glm46.config.model import ModelShape


@torch.library.custom_op("glm46::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix: rows [offsets[e-1], offsets[e]) of `x` times `weight[e]`.

    A custom operator: the fake kernel of torch's operator rejects FP32, which `torch.compile` on a CPU needs.

    Args:
        x: [N, I], sorted by expert. Results of rows past the last offset are undefined.
        weight: [E, I, O], any strides.
        offsets: int32 [E], running sum of the group sizes.

    Returns:
        [N, O] in the dtype of `x`.
    """
    return compat.grouped_mm(x, weight, offsets)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("glm46::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Compute ``x_group.T @ y_group`` for each group of rows: the weight gradient of `grouped_mm`.

    Args:
        x: [N, I]; y: [N, O]; offsets: int32 [E].

    Returns:
        [E, I, O]; zero for an empty group.
    """
    return compat.grouped_mm(x.t(), y, offsets)


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], y.shape[1])


def _save_for_backward(ctx: FunctionContext, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, offsets = inputs
    ctx.save_for_backward(x, weight, offsets)


def _grouped_mm_backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()  # grouped_mm rejects the strides of an expanded gradient
    grad_x = grouped_mm(grad, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    # Computed as [E, O, I], like the stored weight, so that its gradient is contiguous.
    grad_weight = grouped_outer(grad, x, offsets).transpose(1, 2) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_for_backward)


class _WeightedSwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` times the FP32 weight of each row, rounded to the dtype of `gate_up` after each product.

    Saves its inputs only and recomputes the rest in backward, which writes both gradients into one tensor.
    """

    @staticmethod
    def forward(ctx: FunctionContext, gate_up: Tensor, weights_N: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights_N)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(weights_N.unsqueeze(-1))

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights_N = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        product = (silu * up).mul_(grad)
        grad_weights = product.sum(-1, dtype=weights_N.dtype)  # fp32: a sum over the width
        grad = torch.mul(grad, weights_N.unsqueeze(-1), out=product)
        torch.mul(silu, grad, out=grad_up)
        torch.ops.aten.silu_backward(grad.mul_(up), gate, grad_input=grad_gate)
        return grad_gate_up, grad_weights


def weighted_swiglu(gate_up: Tensor, weights_N: Tensor) -> Tensor:
    """Compute ``silu(gate) * up * weight`` of rows [N, 2F], the gate first, with a weight for each row, FP32 [N].

    Returns:
        [N, F] in the dtype of `gate_up`.
    """
    if torch.compiler.is_compiling():  # see `swiglu`
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) * up * weights_N.unsqueeze(-1)).to(gate_up.dtype)
    product: Tensor = _WeightedSwiGLU.apply(gate_up, weights_N)
    return product


class Experts(nn.Module):
    """Routed experts. `gate_up` [E, 2F, D] holds the gate rows, then the up rows; `down` is [E, D, F]."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        E = shape.n_routed_experts
        D = shape.hidden_size
        width = shape.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(E, 2 * width, D))
        self.down = nn.Parameter(torch.empty(E, D, width))
        self.forms: dict[str, tuple[Tensor, ...]] = {}
        """Converted forms of each weight, by its name, which `product` reuses until the weight changes."""

    def forward(
        self, x_ND: Tensor, weights_N: Tensor, offsets: Tensor, schedule: ChunkSchedule | None = None
    ) -> Tensor | tuple[NamedTuple, ...]:
        """Apply expert e to rows [offsets[e-1], offsets[e]) and scale each row by its routing weight.

        Args:
            x_ND: N assignments sorted by expert, [N, D].
            weights_N: FP32 [N].
            offsets: int32 [E].
            schedule: computes these rows, and those still in transit. It runs inside this call, so that FSDP2 gathers
                weights once; it holds the tensors in transit, so that FSDP2 reduces gradients only after the gradients
                of all chunks are complete.

        Returns:
            [N, D], dtype of `x_ND`; or what ``schedule`` returns.
        """
        if schedule is not None:
            return schedule.compute(self, ArrivedRows(x_ND, weights_N, offsets))
        return self.second_product(self.first_product(x_ND, offsets), weights_N, offsets)

    def first_product(self, x_ND: Tensor, offsets: Tensor) -> Tensor:
        """Return the gate and up rows, [N, 2F]."""
        return self.project("gate_up", x_ND, offsets)

    def second_product(self, gate_up: Tensor, weights_N: Tensor, offsets: Tensor) -> Tensor:
        """Return the results, [N, D]. The routing weights multiply the hidden rows of width F, not the results of width
        D: F is smaller, and the exchange back to the token's rank does not carry them."""
        return self.project("down", weighted_swiglu(gate_up, weights_N), offsets)

    def project(self, name: str, x_NI: Tensor, offsets: Tensor) -> Tensor:
        """Call `product` with the weight of this name. Adapters, which differ by weight, replace this attribute."""
        return self.product(x_NI, local_weight(getattr(self, name)), offsets, *self.forms.get(name, ()))

    @staticmethod
    def product(x_NI: Tensor, weight_EOI: Tensor, offsets: Tensor, *_forms: Tensor) -> Tensor:
        """Multiply rows [offsets[e-1], offsets[e]) by the transpose of ``weight_EOI[e]``; [N, O].

        The only product of `project` with a weight. To compute it differently, set this attribute on a module.
        """
        y_NO: Tensor = grouped_mm(x_NI, weight_EOI.transpose(1, 2), offsets)
        return y_NO
