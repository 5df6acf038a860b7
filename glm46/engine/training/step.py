"""One optimizer step, from micro-batches to updated weights."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from glm46.compat import multiply_in_place, norms_in_fp32, own_clock
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.transformer import LossSums
from glm46.compute.parallelize.pipeline import Fields
from glm46.engine.reliability.loss_spikes import NOT_FINITE
from glm46.engine.training.balance import auxiliary_loss, routing_options
from glm46.engine.training.named_sums import sum_over_all_ranks, to_host
from glm46.engine.training.network import Network, StageResults, TrainedNetwork
from glm46.engine.training.task import Counts, Objective, Task, trained_networks
from glm46.engine.training.totals import StepTotals
from glm46.run.schedule import schedule_value
from glm46.storage.data.batches import Batch

NO_TARGETS = "no rank has a token to learn from"
"""Fault of a step whose samples were all skipped, as filters of reinforcement learning may do. Its values are not bad:
it does not count towards [training] max_skipped_steps."""


class NetworkOutcome(NamedTuple):
    """Result of a step for one network, over all ranks."""

    sums: dict[str, Tensor]
    """Sums of the objective, and aux_losses [2] (balance loss and z-loss); FP64 on the CPU."""
    tokens_per_expert: Tensor
    """int64 [MoE layers, E] on the device."""
    overflow: Tensor
    """int64 [MoE layers] on the device."""
    grad_norm: float
    """Gradient norm before clipping."""


class StepOutcome(NamedTuple):
    """Result of a step."""

    network_outcomes: dict[str, NetworkOutcome]
    """Outcome of each network by name, the main one first."""
    fault: str | None
    """Reason why the step was skipped and nothing changed; None if it was not skipped."""
    ready_at: float
    """Time at which the gradients were available, by `own_clock`."""
    gradient_seconds: float = 0.0
    """Seconds of forward and backward, device synchronisation included."""

    @property
    def is_bad(self) -> bool:
        """True if the step was skipped because of its values; too many such steps in a row end a run."""
        return self.fault not in (None, NO_TARGETS)

    @property
    def main(self) -> NetworkOutcome:
        return next(iter(self.network_outcomes.values()))


def train_step(
    task: Task,
    micro_batches: list[Batch],
    totals: StepTotals,
    clock: int,
    lr_factor: float,
    find_fault: Callable[[float, float], str | None] = lambda loss, grad_norm: None,
) -> StepOutcome:
    """Train all networks of a task that have an objective on the micro-batches of one step. Collective.

    Args:
        micro_batches: micro-batches of this rank, see `StepBatches`.
        totals: counts of the whole step over all ranks.
        clock: tokens of the curriculum before this step; the argument of all schedules.
        lr_factor: learning rate relative to its peak.
        find_fault: returns the reason to skip the step from the mean loss and the gradient norm of the main network, or
            None. Values that are not finite always skip the step, for all networks, and so does `NO_TARGETS`.
    """
    moe = task.plan.config.moe
    sums = dict[str, Tensor]()
    counters = dict[str, Tensor]()
    gradient_seconds = 0.0
    networks = trained_networks(task)
    for name, objective in task.objectives.items():
        network = networks[name]
        began = time.perf_counter()
        outputs = compute_gradients(network, objective, micro_batches, totals, totals.objective_counts[name], clock)
        gradient_seconds += time.perf_counter() - began
        local_sums = _local_sums(network, objective, outputs, micro_batches)
        device = task.cluster.device
        pipeline = task.cluster.meshes.pipeline
        local_sums["grad_norm"] = global_grad_norm(network.parameters.values(), device, pipeline).double()
        sums |= {f"{name}/{key}": value for key, value in local_sums.items()}
        counters |= {f"{name}/{key}": value for key, value in _local_counters(network, outputs).items()}
    sums = sum_over_all_ranks(sums)
    counters = sum_over_all_ranks(counters)
    for name in task.objectives:
        # The mean of the ranks' norms: replicas may differ in the last bits, but all ranks must clip and decide
        # equally.
        sums[f"{name}/grad_norm"] /= dist.get_world_size()

    # sync: the decision is needed before the weights change. The values are equal on all ranks.
    began = time.perf_counter()
    host_sums = to_host(sums)
    gradient_seconds += time.perf_counter() - began
    ready_at = own_clock()
    outcomes = {
        name: NetworkOutcome(
            sums=(network_sums := _of(name, host_sums)),
            tokens_per_expert=counters[f"{name}/tokens_per_expert"],
            overflow=counters[f"{name}/overflow"],
            grad_norm=network_sums.pop("grad_norm").float().item(),
        )
        for name in task.objectives
    }
    outcome = StepOutcome(outcomes, None, ready_at, gradient_seconds)
    mean_loss = outcome.main.sums["loss"].item() / max(totals.main["targets"], 1)
    is_finite = all(bool(value.isfinite().all()) for value in host_sums.values())
    fault = None if is_finite else NOT_FINITE
    if is_finite and not totals.main["targets"]:
        fault = NO_TARGETS  # zero gradients would still apply momentum and weight decay
    elif is_finite:
        fault = find_fault(mean_loss, outcome.main.grad_norm)
    if fault is not None:
        return outcome._replace(fault=fault)
    for name, network_outcome in outcomes.items():
        network = networks[name]
        grad_norm = torch.tensor(network_outcome.grad_norm)
        max_norm = task.plan.config.training.max_norm
        scale_gradients(network.parameters.values(), (max_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        # The clock differs between steps, and is the same on every layout and after a resume.
        network.update(lr_factor, number=clock)
        network.balance.update(network_outcome.tokens_per_expert, schedule_value(moe.bias_update_rate, clock))
    return outcome


def compute_gradients(
    network: TrainedNetwork,
    objective: Objective,
    micro_batches: list[Batch],
    totals: StepTotals,
    counts: Counts,
    clock: int,
) -> StageResults:
    """Compute the gradients of the objective and of the auxiliary losses of the experts. Collective."""
    moe = network.plan.config.moe

    def auxiliary(aux_losses: Tensor) -> Tensor:
        return auxiliary_loss(aux_losses, totals.real, moe, clock)

    def whole(output: LossSums, batch: Fields) -> Tensor:
        return objective.loss(output, batch, counts, clock) + auxiliary(output.aux_losses)

    network.optimizer.zero_grad()
    network.route_at(schedule_value(moe.router_temperature, clock))
    batches = [network.to_device(batch, objective.fields) for batch in micro_batches]
    arguments = {"options": routing_options(moe), "form": objective.form}
    loss_fields = [name for name in objective.fields if name != "routes"]  # the model takes the routes
    return network.forward_backward(batches, arguments, whole, auxiliary, loss_fields)


@torch.no_grad()
def _local_sums(
    network: Network, objective: Objective, outputs: StageResults, micro_batches: list[Batch]
) -> dict[str, Tensor]:
    """Return this rank's part of the sums over a step: sums of the objective, and aux_losses [2]. FP64, on the
    device."""
    sums = objective.empty_sums() | {"aux_losses": torch.zeros(2, dtype=torch.float64)}
    # Created on the device: a copy from the host would be work between backward and the all-reduce.
    sums = {name: torch.zeros_like(value, device=network.cluster.device) for name, value in sums.items()}
    for output in (output for stage_outputs in outputs for output in stage_outputs):
        sums["aux_losses"] += output.aux_losses
    for output, batch in zip(outputs[-1], micro_batches, strict=True):
        if isinstance(output, LossSums):
            for name, value in objective.sums(output, batch).items():
                sums[name] += value
    return sums


@torch.no_grad()
def _local_counters(network: TrainedNetwork, outputs: StageResults) -> dict[str, Tensor]:
    """Return this rank's part of the counts over a step: tokens_per_expert [MoE layers, E], overflow [MoE layers];
    int64."""
    balance = network.balance
    tokens = torch.zeros(
        balance.layers, network.plan.shape.n_routed_experts, dtype=torch.int64, device=network.cluster.device
    )
    overflow = tokens.new_zeros(balance.layers)
    counted = torch.cat([torch.stack([output.tokens_per_expert for output in stage]).sum(0) for stage in outputs])
    dropped = torch.cat([torch.stack([output.overflow for output in stage]).sum(0) for stage in outputs])
    rows = balance.rows[: len(counted)]  # prediction layers are last, and may not have run
    tokens.index_copy_(0, rows, counted)
    overflow.index_copy_(0, rows, dropped)
    return {"tokens_per_expert": tokens, "overflow": overflow}


def _of(network: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{network}/"
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """Compute the Euclidean norm of all gradients, each element counted once. Collective.

    Squares are summed locally for each set of mesh axes that shard a parameter, then over just these axes; replicas add
    nothing. Every rank of a mesh must pass parameters of the same shardings.

    Args:
        device: device of this rank; gradients may be in host memory instead.
        pipeline: ranks that hold other parameters.

    Returns:
        FP32 scalar, equal on all ranks of a mesh; replicas may differ in the last bits.
    """
    squares: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        key: tuple = (None, ())  # not sharded
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            placements = gradient.placements
            axes = tuple(i for i, kind in enumerate(placements) if not isinstance(kind, Replicate) and mesh.size(i) > 1)
            # Parameters on a single rank are summed like ones without FSDP2: in the same order, to the same bits.
            key = (mesh, axes) if axes else key
            gradient = gradient.to_local()
        if gradient is not None:
            squares.setdefault(key, []).append(gradient)
    total = torch.zeros((), device=device)  # a pipeline stage may have no trained parameters
    for (mesh, axes), gradients in squares.items():
        square = torch.linalg.vector_norm(torch.stack(norms_in_fp32(gradients))).square().to(device)
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        total += square
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by `factor`, a scalar on the CPU, wherever the gradients are."""
    multiply_in_place([local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None], factor)
