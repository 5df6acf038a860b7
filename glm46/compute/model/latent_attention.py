"""Multi-head latent attention of GLM-4.7-Flash: all keys and values of a token are computed from one short row.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; names and order of the numbers as in `transformers`.
Shape letters in addition to `layers.py`: L = kv_lora_rank, R = qk_rope_head_dim, N = qk_nope_head_dim; C = N + R.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glm46.compute.model.attention import attend
from glm46.compute.model.attention_layout import AttentionLayout
from glm46.compute.model.layers import Linear, RMSNorm, local_weight
from glm46.compute.model.rope import rotate_pairs
from glm46.config.model import ModelShape

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows [B, S, 1, L + R] -> keys and values of this rank's heads, [B, S, H, C] each."""

LatentCore = Callable[[Tensor, Tensor, Expand, AttentionLayout | None], Tensor]
"""(q [B, S, H, C], rows [B, S, 1, L + R], expand, layout) -> [B, S, H, C]. Ranks exchange, and caches store, the
rows, not keys and values."""


def attend_expanded(q_BSHC: Tensor, rows: Tensor, expand: Expand, layout: AttentionLayout | None) -> Tensor:
    """Call `attend` with the keys and values of the rows; a `LatentCore`."""
    return attend(q_BSHC, *expand(rows), layout)


class LatentAttention(nn.Module):
    """Projections of queries through one latent, of keys and values through another, around a `LatentCore`.

    The number of heads is read from the tensors, so that the module works on any share of the heads.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        assert shape.q_lora_rank and shape.kv_lora_rank and shape.qk_nope_head_dim and shape.qk_rope_head_dim
        self.head_dim = shape.head_dim
        self.key_part = shape.qk_nope_head_dim
        """Width of the part of a key that is not rotated; it comes first."""
        self.rank = shape.kv_lora_rank
        """Width of the latent of keys and values."""
        self.rotated = shape.qk_rope_head_dim
        """Width of the rotated part of a key, which all heads share."""
        width = shape.num_attention_heads * shape.head_dim
        expanded_width = shape.qk_nope_head_dim + shape.head_dim
        self.q_a_proj = Linear(shape.hidden_size, shape.q_lora_rank, bias=False)
        # transformers uses epsilon 1e-6 for both norms; servers and other trainers use the one of config.json.
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, shape.rms_norm_eps)
        self.q_b_proj = Linear(shape.q_lora_rank, width, bias=False)
        self.kv_a_proj_with_mqa = Linear(shape.hidden_size, shape.latent_width, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, shape.rms_norm_eps)
        self.kv_b_proj = Linear(shape.kv_lora_rank, shape.num_attention_heads * expanded_width, bias=False)
        self.o_proj = Linear(width, shape.hidden_size, bias=False)
        self.core: LatentCore = attend_expanded

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layout: AttentionLayout | None) -> Tensor:
        """Attend over [B, S, D]; `rope` from `rotary_tables`, `layout` from `attention_layout`."""
        B, S, _ = x.shape
        q = self.rotated_queries(self.q_a_layernorm(self.q_a_proj(x)), rope)
        out = self.core(q, self.rows(x, rope), self.expand, layout)
        y: Tensor = self.o_proj(out.reshape(B, S, -1))
        return y

    def rotated_queries(self, query_latent: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the queries of this rank's heads, [B, S, H, C], from their latent [B, S, Q] after its norm."""
        q = self.q_b_proj(query_latent).unflatten(-1, (-1, self.head_dim))
        return torch.cat([q[..., : self.key_part], rotate_pairs(q[..., self.key_part :], rope)], dim=-1)

    def rows(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the row of each token, [B, S, 1, L + R], from [B, S, D]."""
        latent, rotated_part = self.kv_a_proj_with_mqa(x).unsqueeze(2).tensor_split([self.rank], dim=-1)
        return torch.cat([self.kv_a_layernorm(latent), rotate_pairs(rotated_part, rope)], dim=-1)

    def weight_by_head(self) -> Tensor:
        """Return the weight of `kv_b_proj` by head, [H, N + C, L], adapters included: keys first, then values."""
        # An adapter or a quantised weight has replaced the product: its results for unit vectors are the weight.
        if "product" in vars(self.kv_b_proj):
            like = self.o_proj.weight
            weight = self.kv_b_proj(torch.eye(self.rank, dtype=like.dtype, device=like.device)).t()
        else:
            weight = local_weight(self.kv_b_proj.weight)
        by_head: Tensor = weight.reshape(-1, self.key_part + self.head_dim, self.rank)
        return by_head

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values of this rank's heads, an `Expand`; all heads share the rotated part of a key."""
        latent, rotated = rows.tensor_split([self.rank], dim=-1)
        expanded = self.kv_b_proj(latent.squeeze(2)).unflatten(-1, (-1, self.key_part + self.head_dim))
        unrotated, values = expanded.tensor_split([self.key_part], dim=-1)
        return torch.cat([unrotated, rotated.expand(-1, -1, expanded.shape[2], -1)], dim=-1), values.contiguous()
