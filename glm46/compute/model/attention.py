"""Grouped-query attention with optional QK-norm and biases. The core between the projections can be replaced."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from glm46.compute.model.attention_layout import AttentionLayout, KeyExchange
from glm46.compute.model.attention_runs import attend_in_runs
from glm46.compute.model.layers import Linear, RMSNorm
from glm46.compute.model.rope import rotate
from glm46.config.model import ModelShape

AttentionCore = Callable[[Tensor, Tensor, Tensor, AttentionLayout | None], Tensor]
"""(q [B, S, H, C], k [B, S, K, C], v [B, S, K, C], layout) -> [B, S, H, C]."""


def attend(q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, layout: AttentionLayout | None) -> Tensor:
    """Compute causal attention with scale C**-0.5, within the runs of a layout if there is one; an `AttentionCore`.

    Context parallelism passes the keys and values of the runs as [1, keys, K, C].
    """
    if layout is not None:
        q, k, v = (x.flatten(0, 1) for x in (q_BSHC, k_BSKC, v_BSKC))
        if layout.exchange is not None:
            assert isinstance(layout.exchange, KeyExchange), "a ring has a core of its own"
            # Repeat the keys of shared prefixes. Context parallelism has made its exchange before.
            k, v = (x.index_select(0, layout.exchange.keys) for x in (k, v))
        return attend_in_runs(q, k, v, layout).view(q_BSHC.shape)
    out_BHSC = F.scaled_dot_product_attention(
        q_BSHC.transpose(1, 2), k_BSKC.transpose(1, 2), v_BSKC.transpose(1, 2), is_causal=True, enable_gqa=True
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
        self.core: AttentionCore = attend

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layout: AttentionLayout | None) -> Tensor:
        """Attend over [B, S, D]; `rope` from `rotary_tables`, `layout` from `attention_layout`."""
        B, S, _ = x.shape
        q = self.q_proj(x).view(B, S, -1, self.head_dim)
        k = self.k_proj(x).view(B, S, -1, self.head_dim)
        v = self.v_proj(x).view(B, S, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        out = self.core(rotate(q, rope), rotate(k, rope), v, layout)
        y: Tensor = self.o_proj(out.reshape(B, S, -1))
        return y
