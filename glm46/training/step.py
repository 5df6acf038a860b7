"""One optimizer step, from micro-batches to updated weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compat import own_clock
from glm46.distributed.grad_norm import global_grad_norm, scale_gradients
from glm46.model.router import RoutingOptions
from glm46.model.transformer import LossSums, StageOutput, detached
from glm46.planner.schedule import schedule_value
from glm46.reliability.loss_spikes import NOT_FINITE
from glm46.training.build import Parts
from glm46.training.loss import LossWeights, TokenCounts, accepted_drafts, auxiliary_objective, objective
from glm46.training.named_sums import sum_over_all_ranks, to_host


class StepOutcome(NamedTuple):
    """Result of a step, over all ranks."""

    loss_sum: float
    """Sum over the targets of the step, as the next three."""
    mtp_loss_sums: Tensor
    """FP64 [K] on the CPU."""
    aux_loss_sums: Tensor
    """FP64 [2] on the CPU: balance loss, z-loss."""
    accepted: Tensor
    """FP64 [K] on the CPU: accepted drafts of each prediction depth, see `accepted_drafts`."""
    tokens_per_expert: Tensor
    """int64 [MoE layers, E] on the device."""
    overflow: Tensor
    """int64 [MoE layers] on the device."""
    grad_norm: float
    """Before clipping."""
    fault: str | None
    """Reason why the step was skipped and nothing changed; None if it was made."""
    ready_at: float
    """Time at which the gradients were known, by `own_clock`."""


def train_step(
    parts: Parts,
    micro_batches: list[dict[str, Tensor]],
    counts: TokenCounts,
    clock: int,
    lr_factor: float,
    find_fault: Callable[[float, float], str | None] = lambda loss, grad_norm: None,
) -> StepOutcome:
    """Train on the micro-batches of one step. Collective.

    Args:
        micro_batches: of this rank, see docs/data.md.
        counts: tokens of the whole step over all ranks.
        clock: tokens of the curriculum before this step; the argument of all schedules.
        lr_factor: learning rate relative to its peak.
        find_fault: returns the reason to skip the step from its mean loss and gradient norm, or None. Non-finite values
            always skip the step.
    """
    moe = parts.config.moe
    weights = LossWeights(
        schedule_value(parts.config.mtp.loss_weight, clock), moe.sequence_aux_loss_weight, moe.z_loss_weight
    )
    parameters = parts.parameters.values()

    parts.optimizer.zero_grad()
    outputs = forward_backward(
        parts,
        [to_device(batch, parts) for batch in micro_batches],
        {"options": routing_options(parts, clock)},
        objective=lambda sums: objective(sums, counts, weights),
        auxiliary=lambda aux_losses: auxiliary_objective(aux_losses, counts, weights),
    )
    local_norm = global_grad_norm(parameters, parts.meshes.pipeline).double()
    sums = sum_over_all_ranks(_local_sums(parts, outputs, micro_batches) | {"grad_norm": local_norm})
    # The mean of the ranks' norms: replicas may differ in the last bits, but all ranks must clip and decide alike.
    sums["grad_norm"] /= dist.get_world_size()
    grad_norm = sums["grad_norm"].float()
    counters = sum_over_all_ranks(_local_counters(parts, outputs))

    # sync: the decision must be known before the weights change. The values are equal on all ranks.
    host = to_host(sums)
    ready_at = own_clock()
    is_finite = all(bool(value.isfinite().all()) for value in host.values())
    loss_sum, norm = host["loss"].item(), host["grad_norm"].float().item()
    fault = find_fault(loss_sum / max(counts.targets, 1), norm) if is_finite else NOT_FINITE
    if fault is None:
        scale_gradients(parameters, (parts.config.training.max_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        parts.optimizer.step(lr_factor)
        parts.balance.update(counters["tokens_per_expert"], schedule_value(moe.bias_update_rate, clock))
    return StepOutcome(
        loss_sum=loss_sum,
        mtp_loss_sums=host["mtp_losses"],
        aux_loss_sums=host["aux_losses"],
        accepted=host["accepted"],
        tokens_per_expert=counters["tokens_per_expert"],
        overflow=counters["overflow"],
        grad_norm=norm,
        fault=fault,
        ready_at=ready_at,
    )


def forward_backward(
    parts: Parts,
    batches: list[dict[str, Tensor]],
    arguments: dict[str, Any],
    objective: Callable[[LossSums], Tensor],
    auxiliary: Callable[[Tensor], Tensor],
) -> list[list[LossSums | StageOutput]]:
    """Compute the gradients of the micro-batches of a step. Collective.

    Args:
        batches: arguments of the model that differ by micro-batch.
        arguments: arguments of the model that all micro-batches share.
        objective: the loss to differentiate for the output of one micro-batch; called in their order.
        auxiliary: the loss to differentiate on pipeline stages without the head, see `auxiliary_objective`.

    Returns:
        For each pipeline stage of this rank, or for the whole model, the detached output for each micro-batch.
    """
    if parts.pipeline is not None:
        return parts.pipeline.train(batches, arguments, objective, auxiliary)
    outputs = []
    for batch in batches:
        sums: LossSums = parts.models[0](**batch, **arguments)
        objective(sums).backward()
        outputs.append(detached(sums))
    return [outputs]


def routing_options(parts: Parts, clock: int) -> RoutingOptions:
    """Routing options of [moe] at this point of the curriculum."""
    moe = parts.config.moe
    temperature = None
    if moe.router_temperature != 1.0:
        temperature = torch.tensor(schedule_value(moe.router_temperature, clock), device=parts.process.device)
    return RoutingOptions(
        temperature=temperature,
        capacity_factor=moe.capacity_factor,
        balance_loss=moe.sequence_aux_loss_weight > 0.0,
        z_loss=moe.z_loss_weight > 0.0,
    )


def to_device(batch: dict[str, Tensor], parts: Parts) -> dict[str, Tensor]:
    """Arguments of the model from a batch of the loader: this rank's part of the sequences, on its device."""
    names = ["input_ids", "positions", "labels"]
    if parts.config.data.document_mask:
        names.append("document_ids")
    if parts.shape.num_nextn_predict_layers:
        names += ["mtp_input_ids", "mtp_labels"]
    # Passed explicitly: without document masks the model gets no document ids, but padding stays padding.
    arguments = {name: batch[name] for name in names} | {"is_real": batch["document_ids"] >= 0}
    if parts.meshes.sequence is not None:
        arguments = parts.meshes.sequence.cut(arguments, parts.shape.sliding_window)
    return {name: tensor.to(parts.process.device, non_blocking=True) for name, tensor in arguments.items()}


@torch.no_grad()
def count_accepted_drafts(parts: Parts, result: LossSums, batch: dict[str, Tensor]) -> Tensor:
    """`accepted_drafts` over whole rows of a batch of the loader, FP64 [K], divided by the ranks that count the same
    rows, so that the sum over all ranks counts each draft once. Collective under context parallelism."""
    if "mtp_labels" not in batch:
        return result.mtp_losses.new_zeros(0, dtype=torch.float64)
    predictions, labels = result.predictions, batch["mtp_labels"].to(result.predictions.device)
    if parts.meshes.sequence is not None:
        document_ids = batch["document_ids"] if parts.config.data.document_mask else None
        predictions = parts.meshes.sequence.restore(predictions, document_ids, parts.shape.sliding_window)
    return accepted_drafts(predictions, labels).double() / parts.layout.ranks_per_dp_rank


@torch.no_grad()
def _local_sums(
    parts: Parts, outputs: list[list[LossSums | StageOutput]], micro_batches: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """This rank's part of the sums over a step, FP64: loss [], mtp_losses [K], aux_losses [2], accepted [K]."""
    depths = parts.shape.num_nextn_predict_layers
    shapes = {"loss": (), "mtp_losses": (depths,), "aux_losses": (2,), "accepted": (depths,)}
    sums = {
        name: torch.zeros(shape, dtype=torch.float64, device=parts.process.device) for name, shape in shapes.items()
    }
    for output in (output for of_stage in outputs for output in of_stage):
        sums["aux_losses"] += output.aux_losses
    for output, batch in zip(outputs[-1], micro_batches, strict=True):
        if isinstance(output, LossSums):
            sums["loss"] += output.loss
            sums["mtp_losses"] += output.mtp_losses
            sums["accepted"] += count_accepted_drafts(parts, output, batch)
    return sums


@torch.no_grad()
def _local_counters(parts: Parts, outputs: list[list[LossSums | StageOutput]]) -> dict[str, Tensor]:
    """This rank's part of the counts over a step, int64: tokens_per_expert [MoE layers, E], overflow [MoE layers]."""
    layers, device = parts.balance.layers, parts.process.device
    tokens = torch.zeros(layers, parts.shape.n_routed_experts, dtype=torch.int64, device=device)
    overflow = torch.zeros(layers, dtype=torch.int64, device=device)
    tokens[parts.balance.rows] = torch.cat([sum(output.tokens_per_expert for output in stage) for stage in outputs])
    overflow[parts.balance.rows] = torch.cat([sum(output.overflow for output in stage) for stage in outputs])
    return {"tokens_per_expert": tokens, "overflow": overflow}
