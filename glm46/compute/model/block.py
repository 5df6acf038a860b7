"""Decoder layer: attention and feed-forward network, each with a norm before it and a residual around it."""

from typing import NamedTuple

from torch import Tensor, nn

from glm46.compute.model.attention import Attention
from glm46.compute.model.attention_layout import AttentionLayout
from glm46.compute.model.latent_attention import LatentAttention
from glm46.compute.model.layers import FeedForward, RMSNorm
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions, RoutingStatistics
from glm46.compute.model.sparse_attention import Choice, SparseLatentAttention
from glm46.config.model import ModelShape


class LayerOutput(NamedTuple):
    """Result of a decoder layer."""

    hidden: Tensor
    """[B, S, D]."""
    statistics: RoutingStatistics | None
    """None for a dense layer."""
    choice: Choice | None = None
    """Keys that sparse attention chose, for the following layers that share the choice; None for a layer without an
    indexer."""
    index_losses: Tensor | None = None
    """The argument of this name, with those of this layer added."""


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
        choice: Choice | None = None,
        index_losses: Tensor | None = None,
    ) -> LayerOutput:
        """Map [B, S, D] to [B, S, D].

        Args:
            routes: [B, S, A], see `Router.forward`; only for MoE layers.
            choice: `LayerOutput.choice` of the last layer with an indexer; only for sparse attention.
            index_losses: FP32 [2], sums of `index_loss` over the layers before, to which those of this layer are added;
                None if indexers are not trained. FSDP2 frees the weights of a layer in backward when the gradient of an
                input is there: while only indexers are trained, no other input has one.
        """
        normed = self.input_layernorm(x)
        own_choice: Choice | None = None
        if isinstance(self.self_attn, SparseLatentAttention):
            attended, own_choice, own_losses = self.self_attn(
                normed, rope, layout, choice, is_real, loss=options.index_loss
            )
            if index_losses is not None:
                index_losses = index_losses + own_losses
        else:
            attended = self.self_attn(normed, rope, layout)
        x = x + attended
        normed = self.post_attention_layernorm(x)
        if self.is_dense:
            return LayerOutput(x + self.mlp(normed), None, own_choice, index_losses)
        y, statistics = self.mlp(normed, is_real, options, routes)
        return LayerOutput(x + y, statistics, own_choice, index_losses)
