"""The layers that every part of the model shares: RMSNorm and the SwiGLU feed-forward network.

Shape letters, here and in every file of this room:
    B = sequences, S = tokens per sequence, T = B * S tokens, D = hidden_size, H = query heads, K = key/value heads,
    C = head_dim, E = routed experts, A = num_experts_per_tok (experts a token activates), F = FFN width, V = vocab_size
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate


def local_part(weight: Tensor) -> Tensor:
    """The part of a weight that this rank computes with: the weight itself, unless parallelism has split it.

    The one place in the model that knows of sharding. Layers compute on plain tensors, so that one code serves one
    process and many. Of a weight that several ranks hold whole, each rank sees other tokens (tensor parallelism splits
    the sequence where it does not split the weight), so its gradient is one part of a sum.
    """
    if not isinstance(weight, DTensor):
        return weight
    gradients = [Partial() if isinstance(placement, Replicate) else placement for placement in weight.placements]
    return weight.to_local(grad_placements=gradients)


class Linear(nn.Linear):
    """`nn.Linear` on the part of its weight and bias that is here."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs here] to [..., outputs here]."""
        return self.product(x, local_part(self.weight), None if self.bias is None else local_part(self.bias))

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias`` of plain tensors.

        The only product of `forward` with the weight: what computes it in another way sets this attribute of a module.
        """
        return F.linear(x, weight, bias)


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` that keeps its two inputs only; silu(gate) is computed again in backward."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, same shape and type as both."""
    return _SwiGLU.apply(gate, up)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    The statistics are FP32 and the result is cast to the input's type *before* the weight multiplies it, as
    `transformers` does: in BF16 the other order gives other bits.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape [..., dim]; same shape and type."""
        weight = local_part(self.weight)
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return weight * F.rms_norm(x.float(), weight.shape, None, self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` without biases; the dense layers and the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
