"""Decoder layer: attention and feed-forward network, each with a norm before it and a residual around it."""

from typing import NamedTuple

from torch import Tensor, nn

from glm46.compute.model.attention import Attention
from glm46.compute.model.attention_layout import AttentionLayout
from glm46.compute.model.latent_attention import LatentAttention
from glm46.compute.model.layers import FeedForward, RMSNorm
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions, RoutingStatistics
from glm46.compute.model.sparse_attention import SparseLatentAttention, SparseState
from glm46.config.model import ModelShape


class LayerOutput(NamedTuple):
    """Result of a decoder layer."""

    hidden: Tensor
    """[B, S, D]."""
    statistics: RoutingStatistics | None
    """None for a dense layer."""
    sparse: SparseState | None = None
    """Addition of sparse attention to the state, see `SparseState.followed_by`; None for other attention."""


def _attention(shape: ModelShape, has_indexer: bool) -> Attention | LatentAttention:
    if shape.is_sparse:
        return SparseLatentAttention(shape, has_indexer=has_indexer)
    return LatentAttention(shape) if shape.is_latent else Attention(shape)


class TransformerBlock(nn.Module):
    """A decoder layer, dense or MoE."""

    def __init__(self, shape: ModelShape, *, is_dense: bool, has_indexer: bool = False):
        super().__init__()
        self.is_dense = is_dense
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _attention(shape, has_indexer)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape.hidden_size, shape.intermediate_size) if is_dense else MoE(shape)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: AttentionLayout | None,
        is_real: Tensor | None,
        options: RoutingOptions,
        routes: Tensor | None = None,
        sparse: SparseState = SparseState(),  # noqa: B008 - a tuple
    ) -> LayerOutput:
        """Map [B, S, D] to [B, S, D].

        Args:
            routes: [B, S, A], see `Router.forward`; only for MoE layers.
            sparse: state after the layer before; only for sparse attention.
        """
        normed = self.input_layernorm(x)
        added: SparseState | None = None
        if isinstance(self.self_attn, SparseLatentAttention):
            attended, added = self.self_attn(normed, rope, layout, sparse, is_real, loss=options.index_loss)
        else:
            attended = self.self_attn(normed, rope, layout)
        x = x + attended
        normed = self.post_attention_layernorm(x)
        if self.is_dense:
            return LayerOutput(x + self.mlp(normed), None, added)
        y, statistics = self.mlp(normed, is_real, options, routes)
        return LayerOutput(x + y, statistics, added)
