"""Counts of the tokens of a step over all ranks: the denominators of its losses and metrics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm46.engine.training.task import Counts, Task
from glm46.run.flops import document_half_pairs
from glm46.storage.data.batches import Batch


class StepTotals(NamedTuple):
    """Counts of one optimizer step: of this rank, or summed over all data-parallel ranks."""

    real: int
    """Tokens that are not padding."""
    half_pairs: int
    """Twice the pairs of query and key that attention computes, see `run/flops.py`."""
    of: dict[str, Counts]
    """Counts of each objective, by the name of its network."""

    @property
    def main(self) -> Counts:
        """Counts of the main network."""
        return next(iter(self.of.values()))


def count_step(task: Task, micro_batches: list[Batch]) -> StepTotals:
    """Count this rank's micro-batches, which are on the CPU."""
    main, document_mask = next(iter(task.networks.values())), task.plan.config.data.document_mask
    return StepTotals(
        real=sum(int((batch["document_ids"] >= 0).sum()) for batch in micro_batches),
        half_pairs=count_half_pairs(micro_batches, main.shape.sliding_window, document_mask=document_mask),
        of={name: objective.count(micro_batches) for name, objective in task.objectives.items()},
    )


def to_tensors(totals: StepTotals) -> dict[str, Tensor]:
    """The counts as int64 tensors by name."""
    named: dict[str, Any] = {"real": totals.real, "half_pairs": totals.half_pairs}
    named |= {f"{of}/{name}": count for of, counts in totals.of.items() for name, count in counts.items()}
    return {name: torch.tensor(count, dtype=torch.int64) for name, count in named.items()}


def from_tensors(named: dict[str, Tensor], like: StepTotals) -> StepTotals:
    """The inverse of `to_tensors`, for totals with the names of ``like``."""
    items = like.of.items()
    counts: dict[str, Counts] = {of: {name: named[f"{of}/{name}"].tolist() for name in names} for of, names in items}
    return StepTotals(int(named["real"]), int(named["half_pairs"]), counts)


def count_half_pairs(micro_batches: list[Batch], window: int | None, *, document_mask: bool) -> int:
    """`StepTotals.half_pairs` of this rank's micro-batches: pairs within documents, or within rows without document
    masks. Padding is not counted."""
    total = 0
    for batch in micro_batches:
        ids = batch["document_ids"]
        is_real = ids >= 0
        if document_mask:
            keys = ids.long() + torch.arange(ids.shape[0]).unsqueeze(1) * (ids.shape[1] + 1)
            lengths = keys[is_real].unique_consecutive(return_counts=True)[1]
        else:
            lengths = is_real.sum(1)
        total += int(document_half_pairs(lengths, window).sum())
        if (prefixes := batch.get("prefix_ids")) is not None:
            tokens_of = torch.zeros(ids.shape[0], ids.shape[1] + 1, dtype=torch.int64)
            tokens_of.scatter_add_(1, ids + 1, torch.ones_like(ids))
            total += 2 * int(tokens_of.gather(1, prefixes + 1)[prefixes >= 0].sum())
    return total
