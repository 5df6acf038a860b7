"""Token counts of a step, and its loss from the sums of forward passes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glm46.model.cross_entropy import IGNORE
from glm46.model.transformer import LossSums
from glm46.planner.flops import document_half_pairs


class TokenCounts(NamedTuple):
    """Tokens of one optimizer step: of this rank, or summed over all data-parallel ranks."""

    targets: int
    """Labels of the next token."""
    mtp_targets: Sequence[int]
    """Labels of each prediction depth."""
    drafts: Sequence[int]
    """Labels of each depth that `accepted_drafts` compares."""
    real: int
    """Tokens that are not padding."""
    half_pairs: int = 0
    """Twice the pairs of query and key that attention computes, see `planner/flops.py`."""


class LossWeights(NamedTuple):
    """Weights of the losses besides the next-token loss."""

    mtp: float
    balance: float
    z: float


def count_tokens(micro_batches: list[dict[str, Tensor]]) -> TokenCounts:
    """Count the tokens of this rank's micro-batches, which are on the CPU."""
    targets = sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)
    mtp = sum((batch["mtp_labels"] != IGNORE).sum((0, 2)) for batch in micro_batches)
    drafts = [sum(depth) for depth in zip(*(count_drafts(batch["mtp_labels"]) for batch in micro_batches), strict=True)]
    real = sum(int((batch["document_ids"] >= 0).sum()) for batch in micro_batches)
    return TokenCounts(targets, tuple(mtp.tolist()) if micro_batches else (), tuple(drafts), real)


def count_half_pairs(micro_batches: list[dict[str, Tensor]], window: int | None, *, document_mask: bool) -> int:
    """`TokenCounts.half_pairs` of this rank's micro-batches: pairs within documents, or within rows without document
    masks. Padding is not counted."""
    total = 0
    for ids in (batch["document_ids"] for batch in micro_batches):
        is_real = ids >= 0
        if document_mask:
            keys = ids.long() + torch.arange(ids.shape[0]).unsqueeze(1) * (ids.shape[1] + 1)
            lengths = keys[is_real].unique_consecutive(return_counts=True)[1]
        else:
            lengths = is_real.sum(1)
        total += int(document_half_pairs(lengths, window).sum())
    return total


def objective(sums: LossSums, counts: TokenCounts, weights: LossWeights) -> Tensor:
    """This micro-batch's part of the loss of the whole step.

    Every sum is divided by the *global* count of the step, so that the parts of all micro-batches and ranks add up to
    the mean, however the tokens are distributed.
    """
    loss = sums.loss / max(counts.targets, 1)
    for depth_loss, targets in zip(sums.mtp_losses, counts.mtp_targets, strict=False):
        loss = loss + weights.mtp / len(counts.mtp_targets) * depth_loss / max(targets, 1)
    return loss + auxiliary_objective(sums.aux_losses, counts, weights)


def auxiliary_objective(aux_losses: Tensor, counts: TokenCounts, weights: LossWeights) -> Tensor:
    """Part of `objective` from the auxiliary losses of some layers, FP32 [2] as in `LossSums`."""
    balance, z = aux_losses / max(counts.real, 1)
    return weights.balance * balance + weights.z * z


def accepted_drafts(predictions: Tensor, mtp_labels: Tensor) -> Tensor:
    """Count the tokens where a prediction depth agrees with the main model.

    Args:
        predictions: int64 [1 + K, B, S], `LossSums.predictions`.
        mtp_labels: int64 [B, K, S].

    Returns:
        int64 [K]: predictions of depth k at i that equal the main model's most likely token at i + k, where depth k
        has a target and i + k is inside the row.
    """
    accepted = []
    for k in range(1, predictions.shape[0]):
        own, draft = predictions[0, :, k:], predictions[k, :, :-k]
        accepted.append(((own == draft) & (mtp_labels[:, k - 1, :-k] != IGNORE)).sum())
    return torch.stack(accepted) if accepted else predictions.new_zeros(0)


def count_drafts(mtp_labels: Tensor) -> list[int]:
    """Drafts of each depth that `accepted_drafts` compares, for labels int64 [B, K, S]."""
    return [int((mtp_labels[:, k, : -(k + 1)] != IGNORE).sum()) for k in range(mtp_labels.shape[1])]
