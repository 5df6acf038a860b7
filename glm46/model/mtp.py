"""Multi-token prediction: each depth is a decoder layer that predicts one token further ahead than the one before."""

import torch
from torch import Tensor, nn

from glm46.config.model import ModelShape
from glm46.model.attention_layout import AttentionLayout
from glm46.model.block import TransformerBlock
from glm46.model.layers import Linear, RMSNorm
from glm46.model.router import RoutingOptions, RoutingStatistics


class MTPLayer(nn.Module):
    """Depth k: maps the hidden state at i and token i + k to the hidden state that predicts token i + k + 1.

    Embedding and head are shared with the main model. Source: arXiv 2412.19437 section 2.2; transformers `MtpLayer`.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.block = TransformerBlock(shape, is_dense=False)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: AttentionLayout | None,
        is_real: Tensor | None,
        options: RoutingOptions,
    ) -> tuple[Tensor, RoutingStatistics]:
        """Compute the hidden state of this depth, [B, S, D], and the routing statistics of its layer.

        Args:
            hidden: [B, S, D], result of the previous depth after its final norm.
            embedding: [B, S, D], embeddings of the tokens k positions ahead.
        """
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        x, statistics = self.block(x, rope, layout, is_real, options)
        return self.norm(x), statistics
