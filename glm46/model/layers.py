"""The layers that every part of the model shares: RMSNorm and the SwiGLU feed-forward network.

Shape letters, here and in every file of this room:
    B = sequences, S = tokens per sequence, T = B * S tokens, D = hidden_size, H = query heads, K = key/value heads,
    C = head_dim, E = routed experts, A = num_experts_per_tok (experts a token activates), F = FFN width, V = vocab_size
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` without biases; the dense layers and the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
