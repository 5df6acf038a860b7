"""Counts of the tokens of a step over all ranks: the denominators of its losses and metrics."""

from typing import NamedTuple

import torch

from glm46.compat import map_tree
from glm46.config.model import ModelShape
from glm46.engine.training.objective import Counts
from glm46.engine.training.task import Task
from glm46.run.flops import attended_half_pairs
from glm46.storage.data.batches import Batch


class StepTotals(NamedTuple):
    """Counts of one optimizer step, for this rank or summed over all data-parallel ranks."""

    real: int
    """Tokens that are not padding."""
    half_pairs: int
    """Twice the number of query-key pairs that attention computes, see `run/flops.py`."""
    objective_counts: dict[str, Counts]
    """Counts of each objective, by the name of its network."""

    @property
    def main(self) -> Counts:
        """Counts of the main network."""
        return next(iter(self.objective_counts.values()))

    def divided_by(self, readers: int) -> "StepTotals":
        """Return the sums over all ranks as counts of distinct rows, each of which this many ranks have counted."""
        totals: StepTotals = map_tree(lambda count: count // readers, self)
        return totals


def count_step(task: Task, micro_batches: list[Batch]) -> StepTotals:
    """Count this rank's micro-batches, which are on the CPU."""
    main = next(iter(task.networks.values()))
    document_mask = task.plan.config.data.document_mask
    return StepTotals(
        real=sum(int((batch["document_ids"] >= 0).sum()) for batch in micro_batches),
        half_pairs=count_half_pairs(micro_batches, main.shape, document_mask=document_mask),
        objective_counts={name: objective.count(micro_batches) for name, objective in task.objectives.items()},
    )


def count_half_pairs(micro_batches: list[Batch], shape: ModelShape, *, document_mask: bool) -> int:
    """Compute `StepTotals.half_pairs` of this rank's micro-batches: pairs within documents, or within rows if there are
    no document masks. Padding is not counted."""
    total = 0
    for batch in micro_batches:
        ids = batch["document_ids"]
        is_real = ids >= 0
        if document_mask:
            first_of_row = torch.arange(ids.shape[0]).unsqueeze(1) * (ids.shape[1] + 1)
            unique_ids = ids.long() + first_of_row  # over all rows
            _, lengths = unique_ids[is_real].unique_consecutive(return_counts=True)
        else:
            lengths = is_real.sum(1)
        total += int(attended_half_pairs(lengths, shape).sum())
        if (prefixes := batch.get("prefix_ids")) is not None:
            # Each of these tokens attends to all tokens of its prefix. Column 0 counts padding, whose id is -1.
            tokens_of_document = torch.zeros(ids.shape[0], ids.shape[1] + 1, dtype=torch.int64)
            tokens_of_document.scatter_add_(1, ids + 1, torch.ones_like(ids))
            total += 2 * int(tokens_of_document.gather(1, prefixes + 1)[prefixes >= 0].sum())
    return total
