"""Layers that all parts of the model share: Linear, RMSNorm and the SwiGLU feed-forward network.

Shape letters, in every file of this package:
    B = sequences, S = tokens per sequence, T = B * S tokens, D = hidden_size, H = query heads, K = key/value heads,
    C = head_dim, E = routed experts, A = num_experts_per_tok (experts a token activates), F = FFN width, V = vocab_size
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from glm46.compat import FunctionContext


def local_weight(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight as a plain tensor, with gradient; a weight that is not a DTensor unchanged.

    The only code of the model that handles sharding: layers compute on plain tensors. Ranks with a replicated weight
    see different tokens (tensor parallelism splits the sequence where it does not split the weight), so its local
    gradient is one part of a sum.
    """
    if not isinstance(weight, DTensor):
        return weight
    gradients = [Partial() if isinstance(placement, Replicate) else placement for placement in weight.placements]
    return weight.to_local(grad_placements=gradients)


class Linear(nn.Linear):
    """`nn.Linear` on this rank's part of its weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., local inputs] to [..., local outputs]."""
        return self.product(x, local_weight(self.weight), None if self.bias is None else local_weight(self.bias))

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x @ weight.T + bias`` of plain tensors.

        The only product of `forward` with the weight. To compute it differently, set this attribute on a module.
        """
        return F.linear(x, weight, bias)


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` that saves its two inputs only and recomputes silu(gate) in backward."""

    @staticmethod
    def forward(ctx: FunctionContext, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``, same shape and dtype as both."""
    if torch.compiler.is_compiling():
        # The compiler recomputes silu by itself. For a Function that modifies its result in place, torch 2.11 compiles
        # wrong gradients, without an error.
        return F.silu(gate) * up
    product: Tensor = _SwiGLU.apply(gate, up)
    return product


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    The statistics are FP32. The result is cast to the input's dtype *before* it is multiplied by the weight, as in
    `transformers`: in BF16 the other order gives different bits.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape [..., dim]; same shape and dtype."""
        weight = local_weight(self.weight)
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return weight * F.rms_norm(x.float(), weight.shape, None, self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU without biases: ``down(silu(gate(x)) * up(x))``. Used by dense layers and as the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        y: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return y
