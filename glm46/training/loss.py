"""From the sums of one forward pass to the number that backward starts from."""

from typing import NamedTuple

import torch
from torch import Tensor

from glm46.model.cross_entropy import IGNORE
from glm46.model.transformer import LossSums
from glm46.planner.flops import document_half_pairs


class TokenCounts(NamedTuple):
    """Tokens of one optimizer step; global once they are summed over all ranks that read other samples."""

    targets: int
    """Labels of the next token."""
    mtp_targets: tuple[int, ...]
    """Labels of each prediction depth."""
    drafts: tuple[int, ...]
    """Of these, the ones whose guess the model itself reaches inside the row, see `accepted_drafts`."""
    real: int
    """Tokens that are not padding."""
    half_pairs: int = 0
    """Twice the pairs of query and key that attention needs, see `planner/flops.py`."""


class LossWeights(NamedTuple):
    """Weights of everything beside the next-token loss."""

    mtp: float
    balance: float
    z: float


def count_tokens(micro_batches: list[dict[str, Tensor]]) -> TokenCounts:
    """Tokens in this rank's micro-batches of a step; they are still on the CPU, so this waits for no device."""
    targets = sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)
    mtp = sum((batch["mtp_labels"] != IGNORE).sum((0, 2)) for batch in micro_batches)
    drafts = [sum(depth) for depth in zip(*(count_drafts(batch["mtp_labels"]) for batch in micro_batches), strict=True)]
    real = sum(int((batch["document_ids"] >= 0).sum()) for batch in micro_batches)
    return TokenCounts(targets, tuple(mtp.tolist()) if micro_batches else (), tuple(drafts), real)


def count_half_pairs(micro_batches: list[dict[str, Tensor]], window: int | None, *, document_mask: bool) -> int:
    """`TokenCounts.half_pairs` of this rank's micro-batches: of their documents, or of their rows if those are not
    masked; padding is in neither."""
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

    Every sum is divided by the *global* count of the whole step, so adding the parts of all micro-batches and ranks
    gives the mean, however the tokens were spread.
    """
    loss = sums.loss / max(counts.targets, 1)
    for depth_loss, targets in zip(sums.mtp_losses, counts.mtp_targets, strict=False):
        loss = loss + weights.mtp / len(counts.mtp_targets) * depth_loss / max(targets, 1)
    return loss + auxiliary_objective(sums.aux_losses, counts, weights)


def auxiliary_objective(aux_losses: Tensor, counts: TokenCounts, weights: LossWeights) -> Tensor:
    """The part of `objective` that the auxiliary losses of some layers make, FP32 [2] as in `LossSums`."""
    balance, z = aux_losses / max(counts.real, 1)
    return weights.balance * balance + weights.z * z


def accepted_drafts(predictions: Tensor, mtp_labels: Tensor) -> Tensor:
    """How often a prediction depth guesses what the model itself says once it gets there.

    Args:
        predictions: int64 [1 + K, B, S], `LossSums.predictions`.
        mtp_labels: int64 [B, K, S].

    Returns:
        int64 [K]: guesses of depth k at i that equal the model's own most likely token at i + k, where that depth has
        a target inside the row.
    """
    accepted = []
    for k in range(1, predictions.shape[0]):
        own, guess = predictions[0, :, k:], predictions[k, :, :-k]
        accepted.append(((own == guess) & (mtp_labels[:, k - 1, :-k] != IGNORE)).sum())
    return torch.stack(accepted) if accepted else predictions.new_zeros(0)


def count_drafts(mtp_labels: Tensor) -> list[int]:
    """Drafts of each depth that `accepted_drafts` judges, for int64 [B, K, S]."""
    return [int((mtp_labels[:, k, : -(k + 1)] != IGNORE).sum()) for k in range(mtp_labels.shape[1])]
