"""Grouped-query attention with optional QK-norm and biases. The core between the projections can be replaced."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46.config.model import ModelShape
from glm46.model.layers import Linear, RMSNorm
from glm46.model.rope import rotate

AttentionCore = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""(q [B, S, H, C], k [B, S, K, C], v [B, S, K, C], mask) -> [B, S, H, C]."""

MaskBuilder = Callable[["Tensor | None", Tensor, "int | None"], "Tensor | None"]
"""Signature of `attention_mask`. Replace it together with the core: the mask describes the core's keys."""


def attention_mask(document_ids: Tensor | None, positions: Tensor, sliding_window: int | None) -> Tensor | None:
    """Attention mask: causal, per document, within the window.

    Args:
        document_ids: integer [B, S], or None to attend across documents.
        positions: integer [B, S]; with document_ids = None only its shape and device are read.
        sliding_window: most tokens that a token attends to, itself included; None for all.

    Returns:
        Boolean [B or 1, 1, S, S], true = attend; None for plain causal attention, which has a faster kernel.
    """
    if document_ids is None and sliding_window is None:
        return None
    # Booleans only, in place: a row of 128K tokens has 16 Gi pairs, and int64 distances take 8 bytes each.
    order = torch.arange(positions.shape[1], device=positions.device)
    mask = order.unsqueeze(1) >= order.unsqueeze(0)
    if sliding_window is not None:
        mask &= order.unsqueeze(1) - sliding_window < order.unsqueeze(0)
    if document_ids is None:
        return mask[None, None]
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return same.logical_and_(mask).unsqueeze(1)


def sdpa_core(q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Tensor | None) -> Tensor:
    """`scaled_dot_product_attention` with scale C**-0.5; an `AttentionCore`."""
    out_BHSC = F.scaled_dot_product_attention(
        q_BSHC.transpose(1, 2),
        k_BSKC.transpose(1, 2),
        v_BSKC.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return out_BHSC.transpose(1, 2)


class Attention(nn.Module):
    """Query, key, value and output projections around an `AttentionCore`.

    The number of heads is read from the tensors, so that the module works on any share of the heads.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.head_dim = shape.head_dim
        query_width = shape.num_attention_heads * shape.head_dim
        key_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, query_width, bias=shape.attention_bias)
        self.k_proj = Linear(shape.hidden_size, key_width, bias=shape.attention_bias)
        self.v_proj = Linear(shape.hidden_size, key_width, bias=shape.attention_bias)
        self.o_proj = Linear(query_width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.use_qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.use_qk_norm else None
        self.core: AttentionCore = sdpa_core

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Attend over [B, S, D]; `rope` from `rotary_tables`, `mask` from `attention_mask`."""
        B, S, _ = x.shape
        q = self.q_proj(x).view(B, S, -1, self.head_dim)
        k = self.k_proj(x).view(B, S, -1, self.head_dim)
        v = self.v_proj(x).view(B, S, -1, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.core(rotate(q, rope), rotate(k, rope), v, mask)
        return self.o_proj(out.reshape(B, S, -1))
