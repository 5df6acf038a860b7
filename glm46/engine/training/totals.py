"""Counts of the tokens of a step over all ranks: the denominators of its losses and metrics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm46.engine.training.task import Counts, Task
from glm46.run.flops import document_half_pairs
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


def count_step(task: Task, micro_batches: list[Batch]) -> StepTotals:
    """Count this rank's micro-batches, which are on the CPU."""
    main = next(iter(task.networks.values()))
    document_mask = task.plan.config.data.document_mask
    return StepTotals(
        real=sum(int((batch["document_ids"] >= 0).sum()) for batch in micro_batches),
        half_pairs=count_half_pairs(micro_batches, main.shape.sliding_window, document_mask=document_mask),
        objective_counts={name: objective.count(micro_batches) for name, objective in task.objectives.items()},
    )


def to_tensors(totals: StepTotals) -> dict[str, Tensor]:
    """Return the counts as int64 tensors by name."""
    named: dict[str, Any] = {"real": totals.real, "half_pairs": totals.half_pairs}
    named |= {
        f"{network}/{name}": count
        for network, counts in totals.objective_counts.items()
        for name, count in counts.items()
    }
    return {name: torch.tensor(count, dtype=torch.int64) for name, count in named.items()}


def from_tensors(named: dict[str, Tensor], like: StepTotals) -> StepTotals:
    """Invert `to_tensors`, for totals with the names of ``like``."""
    counts: dict[str, Counts] = {
        network: {name: named[f"{network}/{name}"].tolist() for name in network_counts}
        for network, network_counts in like.objective_counts.items()
    }
    return StepTotals(int(named["real"]), int(named["half_pairs"]), counts)


def count_half_pairs(micro_batches: list[Batch], window: int | None, *, document_mask: bool) -> int:
    """Compute `StepTotals.half_pairs` of this rank's micro-batches: pairs within documents, or within rows if there are
    no document masks. Padding is not counted."""
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
            document_tokens = torch.zeros(ids.shape[0], ids.shape[1] + 1, dtype=torch.int64)
            document_tokens.scatter_add_(1, ids + 1, torch.ones_like(ids))
            total += 2 * int(document_tokens.gather(1, prefixes + 1)[prefixes >= 0].sum())
    return total
