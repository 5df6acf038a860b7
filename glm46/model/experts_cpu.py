"""Routed experts on a CPU: one expert after the other, so that its rows stay in the cache between the products.

Equal to the grouped products in `glm46/model/experts.py`, which is its reference in the tests. It also keeps less for
backward: the gate and up products alone; what follows from them is computed again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("glm46::experts_loop", mutates_args=())
def experts_loop(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Apply expert e to rows [offsets[e-1], offsets[e]) and scale its inner activation by the row's weight.

    A custom operator, because `torch.compile` cannot look into a loop over data.

    Args:
        x: [N, D], sorted by expert; weights: FP32 [N]; gate_up: [E, 2F, D]; down: [E, D, F]; offsets: int32 [E].
            Rows past the last offset give undefined results.

    Returns:
        Result [N, D], and gate and up before the activation [N, 2F], both in the type of `x`.
    """
    width = down.shape[2]
    result, hidden = torch.empty_like(x), x.new_empty(x.shape[0], 2 * width)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if start < end:
            rows = slice(start, end)
            torch.mm(x[rows], gate_up[expert].t(), out=hidden[rows])
            gate, up = hidden[rows].chunk(2, dim=-1)
            active = F.silu(gate).mul_(up).mul_(weights[rows].unsqueeze(1))
            torch.mm(active, down[expert].t(), out=result[rows])
        start = end
    return result, hidden


@experts_loop.register_fake
def _(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], gate_up.shape[1])


@torch.library.custom_op("glm46::experts_loop_backward", mutates_args=())
def experts_loop_backward(
    grad: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `experts_loop` to `x`, `weights`, `gate_up` and `down`; zero for experts without rows."""
    grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
    grad_gate_up, grad_down = torch.empty_like(gate_up), torch.empty_like(down)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if start < end:
            rows = slice(start, end)
            _backward_of_expert(
                (grad[rows], x[rows], weights[rows].unsqueeze(1), hidden[rows]),
                (gate_up[expert], down[expert]),
                (grad_x[rows], grad_weights[rows], grad_gate_up[expert], grad_down[expert]),
            )
        else:
            grad_gate_up[expert].zero_()
            grad_down[expert].zero_()
        start = end
    return grad_x, grad_weights, grad_gate_up, grad_down


def _backward_of_expert(rows: tuple[Tensor, ...], matrices: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> None:
    grad, x, weight, hidden = rows
    gate_up, down = matrices
    out_x, out_weight, out_gate_up, out_down = out
    gate, up = hidden.chunk(2, dim=-1)
    grad_active = grad @ down
    silu = F.silu(gate)
    product = silu * up
    # fp32: the router's gradient is a sum over the width.
    out_weight.copy_((grad_active.float() * product).sum(-1))
    torch.mm(grad.t(), product.mul_(weight), out=out_down)
    grad_active.mul_(weight)
    grad_hidden = torch.empty_like(hidden)
    grad_gate, grad_up = grad_hidden.chunk(2, dim=-1)
    torch.mul(grad_active, silu, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_active.mul_(up), gate, grad_input=grad_gate)
    torch.mm(grad_hidden.t(), x, out=out_gate_up)
    torch.mm(grad_hidden, gate_up, out=out_x)


@experts_loop_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weights), torch.empty_like(gate_up), torch.empty_like(down)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    return *experts_loop_backward(grad.contiguous(), *ctx.saved_tensors), None


experts_loop.register_autograd(_backward, setup_context=_save_for_backward)
