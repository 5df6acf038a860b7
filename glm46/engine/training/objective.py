"""Interface of the objective that a network trains on."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from glm46.compute.model.cross_entropy import HeadForm
from glm46.compute.model.transformer import LossSums
from glm46.compute.parallelize.pipeline import Fields
from glm46.storage.data.batches import Batch

Counts = Mapping[str, Any]
"""Integers, or lists of integers, by name."""


class Objective(Protocol):
    """The objective that a network minimises."""

    form: HeadForm
    """Form of the head; see `LossSums` for the fields of the output that it fills in."""
    fields: tuple[str, ...]
    """Fields of the batch that `loss` and `sums` read, [B, S] or [B, K, S]. With ``routes`` among them, see
    `compute/model/routes.py`, the network computes with the experts of this field."""

    def count(self, micro_batches: list[Batch]) -> Counts:
        """Count this rank's micro-batches. The engine sums the counts over all ranks by name. The reported mean loss is
        the sum ``loss`` divided by the count ``targets``. Without micro-batches all counts are 0."""

    def loss(self, output: LossSums, batch: Fields, totals: Counts, clock: int) -> Tensor:
        """Compute the part of the step's loss from one micro-batch.

        Args:
            batch: `fields` of this micro-batch, this rank's part of the sequences, on its device.
            totals: `count` of the whole step over all ranks. A sum that is divided by a total adds up to the mean,
                however the tokens are distributed.
            clock: tokens of the curriculum before the step: the argument of all schedules.
        """

    def empty_sums(self) -> dict[str, Tensor]:
        """Return the result of `sums` without any token; ``loss`` is one of its names."""

    def sums(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """Return values to sum over the micro-batches and ranks of a step for its metrics, without gradient, in any
        number type. Ranks of tensor parallelism hold equal log-probabilities and values: each returns its share of
        their sums.

        Args:
            batch: batch of the loader, on the CPU, with full rows.
        """

    def metrics(self, sums: dict[str, Tensor], totals: Counts, clock: int) -> dict[str, float]:
        """Compute columns of metrics.jsonl from the sums over all ranks (FP64 on the CPU)."""
