"""The objective of pre-training: the loss of the next token, and losses of multi-token prediction."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.local_tensor import copy_to_device
from glm46.compute.model.cross_entropy import IGNORE, HeadForm, summed_loss
from glm46.compute.model.mtp import acceptance_length, accepted_drafts, draft_places, unbroken
from glm46.compute.model.transformer import LossSums
from glm46.compute.parallelize.pipeline import Fields
from glm46.engine.training.network import Network
from glm46.run.schedule import schedule_value
from glm46.storage.data.batches import Batch

_LARGEST_EXPONENT = 700.0
"""Larger exponents overflow FP64."""


class NextToken:
    """The objective of pre-training. Its totals are ``targets``, the labels of the next token; and for each prediction
    depth ``mtp_targets``, its labels, ``drafts``, the labels that `accepted_drafts` compares, and ``draft_runs``, those
    of them with drafts of all previous depths."""

    form: HeadForm = staticmethod(summed_loss)
    fields: tuple[str, ...] = ()

    def __init__(self, network: Network):
        self._network = network
        self._mtp = network.plan.config.mtp
        self._depths = network.plan.mtp_depths

    def count(self, micro_batches: list[Batch]) -> dict[str, Any]:
        """See `Objective.count`."""
        return count_targets(micro_batches, self._depths)

    def loss(self, output: LossSums, batch: Fields, totals: Mapping[str, Any], clock: int) -> Tensor:
        """See `Objective.loss`."""
        return next_token_loss(output, totals, schedule_value(self._mtp.loss_weight, clock))

    def empty_sums(self) -> dict[str, Tensor]:
        """See `Objective.empty_sums`. FP64 loss [], mtp_losses [K], and the counts [K] of `count_accepted`."""
        by_depth = ("mtp_losses", "accepted", "accepted_runs")
        shapes = {"loss": ()} | dict.fromkeys(by_depth, (self._depths,))
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def sums(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.sums`. Collective under context parallelism."""
        assert output.loss is not None, "the form is `summed_loss`"
        sums = {"loss": output.loss, "mtp_losses": output.mtp_losses}
        if "mtp_labels" in batch:
            sums |= self.count_accepted(output, batch)
        return sums

    def count_accepted(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """Count ``accepted``, the `accepted_drafts` over whole rows of a batch of the loader, and ``accepted_runs``,
        those after accepted drafts of all previous depths; FP64 [K].

        Counts are divided by the number of ranks that count the same rows, so that the sum over all ranks counts each
        draft once. Collective under context parallelism.
        """
        predictions = self._network.whole_rows(output.predictions, batch)
        accepted = accepted_drafts(predictions, copy_to_device(batch["mtp_labels"], predictions.device))
        ranks = self._network.cluster.layout.ranks_per_dp_rank
        counted = {"accepted": accepted, "accepted_runs": unbroken(accepted)}
        return {name: places.sum((1, 2)).double() / ranks for name, places in counted.items()}

    def metrics(self, sums: dict[str, Tensor], totals: Mapping[str, Any], clock: int) -> dict[str, float]:
        """See `Objective.metrics`."""
        loss = sums["loss"].item() / max(totals["targets"], 1)
        row = {"loss": loss, "perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}
        if not self._depths:
            return row
        weight = schedule_value(self._mtp.loss_weight, clock)
        return row | _mtp_columns(sums, totals) | {"mtp_loss_weight": weight}


def _mtp_columns(sums: dict[str, Tensor], totals: Mapping[str, Any]) -> dict[str, float]:
    drafts = totals["drafts"]
    accepted = sums["accepted"].tolist()
    losses = [loss / max(n, 1) for loss, n in zip(sums["mtp_losses"].tolist(), totals["mtp_targets"], strict=True)]
    columns = {
        "mtp_loss": sum(losses) / len(losses),
        "mtp_acceptance": sum(accepted) / max(sum(drafts), 1),
        "mtp_acceptance_length": acceptance_length(sums["accepted_runs"].tolist(), totals["draft_runs"]),
    }
    if len(losses) > 1:
        for depth, loss in enumerate(losses, start=1):
            columns[f"mtp_loss/{depth}"] = loss
            columns[f"mtp_acceptance/{depth}"] = accepted[depth - 1] / max(drafts[depth - 1], 1)
    return columns


def count_targets(micro_batches: list[Batch], depths: int) -> dict[str, Any]:
    """Compute the totals of `NextToken` for this rank's micro-batches, on the CPU, with or without ``mtp_labels``."""
    zeros = [0] * depths
    mtp_labels = [batch["mtp_labels"] for batch in micro_batches if depths and "mtp_labels" in batch]
    target_counts = [(labels != IGNORE).sum((0, 2)).tolist() for labels in mtp_labels]
    draft_counts = [count_drafts(labels) for labels in mtp_labels]
    run_counts = [count_draft_runs(labels) for labels in mtp_labels]
    return {
        "targets": sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches),
        "mtp_targets": [sum(depth) for depth in zip(zeros, *target_counts, strict=True)],
        "drafts": [sum(depth) for depth in zip(zeros, *draft_counts, strict=True)],
        "draft_runs": [sum(depth) for depth in zip(zeros, *run_counts, strict=True)],
    }


def next_token_loss(sums: LossSums, totals: Mapping[str, Any], mtp_weight: float) -> Tensor:
    """Compute one micro-batch's part of the loss of the step.

    Each sum is divided by the *global* count of the step, so that the parts of all micro-batches and ranks add up to
    the mean for any distribution of the tokens.
    """
    loss: Tensor = sums.loss / max(totals["targets"], 1)
    mtp_targets = totals["mtp_targets"]
    for depth_loss, targets in zip(sums.mtp_losses, mtp_targets, strict=False):
        loss = loss + mtp_weight / len(mtp_targets) * depth_loss / max(targets, 1)
    return loss


def count_drafts(mtp_labels: Tensor) -> list[int]:
    """Count the drafts of each depth that `accepted_drafts` compares, for labels int64 [B, K, S]."""
    return draft_places(mtp_labels).sum((1, 2)).tolist()


def count_draft_runs(mtp_labels: Tensor) -> list[int]:
    """Count the drafts of each depth after drafts of all previous depths, for labels int64 [B, K, S]."""
    return unbroken(draft_places(mtp_labels)).sum((1, 2)).tolist()
