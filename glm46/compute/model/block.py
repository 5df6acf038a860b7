"""Decoder layer: attention and feed-forward network, each with a norm before it and a residual around it."""

from torch import Tensor, nn

from glm46.compute.model.attention import Attention
from glm46.compute.model.attention_layout import AttentionLayout
from glm46.compute.model.latent_attention import LatentAttention
from glm46.compute.model.layers import FeedForward, RMSNorm
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions, RoutingStatistics
from glm46.config.model import ModelShape


class TransformerBlock(nn.Module):
    """A decoder layer, dense or MoE."""

    def __init__(self, shape: ModelShape, *, is_dense: bool):
        super().__init__()
        self.is_dense = is_dense
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = LatentAttention(shape) if shape.is_latent else Attention(shape)
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
    ) -> tuple[Tensor, RoutingStatistics | None]:
        """Map [B, S, D] to [B, S, D]. Also return the routing statistics, None for a dense layer. Only MoE layers take
        routes [B, S, A], see `Router.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rope, layout)
        normed = self.post_attention_layernorm(x)
        if self.is_dense:
            return x + self.mlp(normed), None
        y, statistics = self.mlp(normed, is_real, options, routes)
        return x + y, statistics
