"""One optimizer step, from micro-batches to updated weights."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from glm46.engine.reliability.loss_spikes import NOT_FINITE
from glm46.engine.training.gradients import scale_gradients
from glm46.engine.training.network import StepSums
from glm46.engine.training.rank_sums import sum_over_all_ranks, to_host
from glm46.engine.training.task import Task, trained_networks
from glm46.engine.training.totals import StepTotals
from glm46.run.schedule import schedule_value
from glm46.storage.data.batches import Batch

NO_TARGETS = "no rank has a token to learn from"
"""Fault of a step whose samples were all skipped, as filters of reinforcement learning may do. Its values are not bad:
it does not count towards [training] max_skipped_steps."""

FindFault = Callable[[float, float], str | None]
"""Function of the mean loss and the gradient norm of the main network that returns the reason to skip a step, or
None."""


class StepOutcome(NamedTuple):
    """Result of a step."""

    sums: dict[str, StepSums]
    """Sums over all ranks of each network by name, the main one first. Losses are on the CPU, counts on the device; the
    gradient norm is a mean over the ranks, FP32."""
    fault: str | None
    """Reason why the step was skipped and nothing changed; None if it was not skipped."""
    gradient_seconds: float
    """Seconds from the first forward until the gradients were available."""

    @property
    def is_bad(self) -> bool:
        """True if the step was skipped because of its values; too many such steps in a row end a run."""
        return self.fault not in (None, NO_TARGETS)

    @property
    def main(self) -> StepSums:
        """Sums of the main network."""
        return next(iter(self.sums.values()))


def train_step(
    task: Task,
    micro_batches: list[Batch],
    totals: StepTotals,
    clock: int,
    lr_factor: float,
    find_fault: FindFault = lambda loss, grad_norm: None,
) -> StepOutcome:
    """Train all networks of a task that have an objective on the micro-batches of one step. Collective.

    Args:
        micro_batches: micro-batches of this rank, see `StepBatches`.
        totals: counts of the whole step over all ranks.
        clock: tokens of the curriculum before this step; the argument of all schedules.
        lr_factor: learning rate relative to its peak.
        find_fault: finds a reason to skip the step. Values that are not finite always skip it, for all networks, and so
            does `NO_TARGETS`.
    """
    config = task.plan.config
    networks = trained_networks(task)
    began = time.perf_counter()
    local_sums = {
        name: networks[name].compute(objective, micro_batches, totals.objective_counts[name], totals.real, clock)
        for name, objective in task.objectives.items()
    }
    sums = _losses_to_host(sum_over_all_ranks(local_sums))
    gradient_seconds = time.perf_counter() - began
    outcome = StepOutcome(sums, None, gradient_seconds)
    fault = _fault(outcome, totals, find_fault)
    if fault is not None:
        return outcome._replace(fault=fault)
    for name, network_sums in sums.items():
        network = networks[name]
        # Apart: the gradients of indexers come from another loss, and must not shrink those of the model.
        for parameters, norm in (
            (network.parts.others, network_sums.grad_norm),
            (network.parts.indexers, network_sums.index_grad_norm),
        ):
            scale_gradients(parameters, (config.training.max_norm / (norm + 1e-6)).clamp(max=1.0))
        # Seeds stochastic rounding: differs between steps, and is the same on every layout and after a resume.
        network.update(lr_factor, number=clock)
        if not network.parts.trains_only_indexers:
            network.balance.update(network_sums.tokens_per_expert, schedule_value(config.moe.bias_update_rate, clock))
    return outcome


def _losses_to_host(sums: dict[str, StepSums]) -> dict[str, StepSums]:
    # sync: the decision is needed before the weights change. The values are equal on all ranks.
    losses = to_host(
        {name: (part.objective, part.aux_losses, part.grad_norm, part.index_grad_norm) for name, part in sums.items()}
    )
    # Replicas may differ in the last bits of the norm, but all ranks must clip and decide equally.
    ranks = dist.get_world_size()
    return {
        name: sums[name]._replace(
            objective=objective,
            aux_losses=aux_losses,
            grad_norm=(norm_sum / ranks).float(),
            index_grad_norm=(index_norm_sum / ranks).float(),
        )
        for name, (objective, aux_losses, norm_sum, index_norm_sum) in losses.items()
    }


def _fault(outcome: StepOutcome, totals: StepTotals, find_fault: FindFault) -> str | None:
    for sums in outcome.sums.values():
        losses = (*sums.objective.values(), sums.aux_losses, sums.grad_norm, sums.index_grad_norm)
        if not all(loss.isfinite().all() for loss in losses):
            return NOT_FINITE
    targets = totals.main["targets"]
    if not targets:
        return NO_TARGETS  # zero gradients would still apply momentum and weight decay
    return find_fault(outcome.main.objective["loss"].item() / targets, outcome.main.grad_norm.item())
