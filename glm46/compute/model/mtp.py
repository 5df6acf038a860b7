"""Multi-token prediction: each depth is a decoder layer that predicts one token further ahead than the previous one.
Depths may share a layer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from glm46.compute.model.attention_layout import AttentionLayout
from glm46.compute.model.block import LayerOutput, TransformerBlock
from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.model.layers import Linear, RMSNorm
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.sparse_attention import SparseState
from glm46.config.model import ModelShape


class MTPLayer(nn.Module):
    """Depth k: maps the hidden state at i and token i + k to the hidden state that predicts token i + k + 1.

    Embedding and head are shared with the main model. Source: arXiv 2412.19437 section 2.2; transformers `MtpLayer`.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.block = TransformerBlock(shape, is_dense=False, has_indexer=shape.is_sparse)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: AttentionLayout | None,
        is_real: Tensor | None,
        options: RoutingOptions,
        sparse: SparseState = SparseState(),  # noqa: B008 - a tuple
    ) -> LayerOutput:
        """Compute the output of this depth's layer, with the hidden state after the final norm.

        Args:
            hidden: [B, S, D], result of the previous depth after its final norm.
            embedding: [B, S, D], embeddings of the tokens k positions ahead.
            sparse: see `TransformerBlock.forward`.
        """
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        output: LayerOutput = self.block(x, rope, layout, is_real, options, None, sparse)
        return output._replace(hidden=self.norm(output.hidden))


def draft_places(mtp_labels: Tensor) -> Tensor:
    """Mark the places where a prediction depth can be compared with the main model: bool [K, B, S] from labels int64
    [B, K, S]. At such a place i, depth k has a target, and i + k is inside the row."""
    places = (mtp_labels != IGNORE).transpose(0, 1)
    for k in range(1, len(places) + 1):
        places[k - 1, :, -k:] = False
    return places


def accepted_drafts(predictions: Tensor, mtp_labels: Tensor) -> Tensor:
    """Mark the places where a prediction depth agrees with the main model.

    Args:
        predictions: int64 [1 + K, B, S], `LossSums.predictions`.
        mtp_labels: int64 [B, K, S]; may have more depths.

    Returns:
        bool [K, B, S]: the `draft_places` i where the prediction of depth k equals the main model's most likely token
        at i + k.
    """
    accepted = draft_places(mtp_labels[:, : len(predictions) - 1])
    for k in range(1, len(predictions)):
        accepted[k - 1, :, :-k] &= predictions[0, :, k:] == predictions[k, :, :-k]
    return accepted


def unbroken(places: Tensor) -> Tensor:
    """Mark the places where this depth and all previous ones are marked, [K, B, S]: drafts after a rejected one are
    lost. ``places``: bool [K, B, S]."""
    return places.cumprod(0) > 0


def acceptance_length(accepted: Sequence[float], drafts: Sequence[float]) -> float:
    """Compute the mean number of tokens of a step of speculative decoding: one token of the main model, and the drafts
    before the first rejected one.

    Args:
        accepted: for each depth, the number of `unbroken` places of `accepted_drafts`.
        drafts: the same for `draft_places`.
    """
    return 1.0 + sum(count / max(total, 1) for count, total in zip(accepted, drafts, strict=True))
