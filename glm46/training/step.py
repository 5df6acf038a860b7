"""One optimizer step, from micro-batches to moved weights."""

import math
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
from glm46.reliability.loss_spikes import NOT_FINITE, sum_and_share_norm
from glm46.training.build import Parts
from glm46.training.loss import LossWeights, TokenCounts, accepted_drafts, auxiliary_objective, objective


class StepOutcome(NamedTuple):
    """What a step did, over all ranks. Tensors stay on the device until a logging step reads them."""

    loss_sum: float
    """Summed over the step's targets; as all sums here."""
    mtp_loss_sums: Tensor
    """FP64 [K]."""
    aux_loss_sums: Tensor
    """FP64 [2]: balance loss, z-loss."""
    accepted: Tensor
    """FP64 [K]: drafts of each prediction depth that the model itself agrees with."""
    tokens_per_expert: Tensor
    """int64 [MoE layers, E]."""
    overflow: Tensor
    """int64 [MoE layers]."""
    grad_norm: Tensor
    """FP32 scalar, before clipping."""
    fault: str | None
    """Why the step was skipped, and nothing changed; None if it was made."""
    judged_at: float
    """When that was known, by `own_clock`."""


def train_step(
    parts: Parts,
    micro_batches: list[dict[str, Tensor]],
    counts: TokenCounts,
    clock: int,
    lr_factor: float,
    judge: Callable[[float, float], str | None] = lambda loss, grad_norm: None,
) -> StepOutcome:
    """Train on the micro-batches of one step; collective.

    Args:
        micro_batches: this rank's, as docs/data.md describes them.
        counts: tokens of the whole step over all ranks.
        clock: tokens of the curriculum seen before this step; every schedule is read there.
        lr_factor: learning rate relative to its peak.
        judge: says of mean loss and gradient norm why the step must be skipped. Figures that are not finite always are.
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
    sums, counters = _figures(parts, outputs, micro_batches)
    sums, grad_norm = sum_and_share_norm(sums, global_grad_norm(parameters, parts.meshes.pipeline))
    dist.all_reduce(counters)

    # sync: whether to step must be known before the weights change; the numbers are the same on every rank.
    figures = [*sums.tolist(), grad_norm.item()]
    judged_at = own_clock()
    is_finite = all(map(math.isfinite, figures))
    fault = judge(figures[0] / max(counts.targets, 1), figures[-1]) if is_finite else NOT_FINITE
    experts = parts.shape.n_routed_experts
    tokens_per_expert, overflow = counters[:, :experts], counters[:, experts]
    if fault is None:
        scale_gradients(parameters, (parts.config.training.max_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        parts.optimizer.step(lr_factor)
        parts.balance.update(tokens_per_expert, schedule_value(moe.bias_update_rate, clock))
    depths = parts.shape.num_nextn_predict_layers
    _, mtp_loss_sums, aux_loss_sums, accepted = sums.split([1, depths, 2, depths])
    return StepOutcome(
        figures[0], mtp_loss_sums, aux_loss_sums, accepted, tokens_per_expert, overflow, grad_norm, fault, judged_at
    )


def forward_backward(
    parts: Parts,
    batches: list[dict[str, Tensor]],
    arguments: dict[str, Any],
    objective: Callable[[LossSums], Tensor],
    auxiliary: Callable[[Tensor], Tensor],
) -> list[list[LossSums | StageOutput]]:
    """Gradients of the micro-batches of a step.

    Args:
        batches: arguments of the model that differ by micro-batch.
        arguments: those that do not.
        objective: what backward starts from, for the output of one micro-batch; called in their order.
        auxiliary: its part that a pipeline stage adds which has not the head, see `auxiliary_objective`.

    Returns:
        For each pipeline stage of this rank, or for the whole model, what it gave for each micro-batch.
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
    """What [moe] asks of the routers at this point of the curriculum."""
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
    """The arguments of the model out of a batch of the loader, on this rank's device."""
    names = ["input_ids", "positions", "labels"]
    if parts.config.data.document_mask:
        names.append("document_ids")
    if parts.shape.num_nextn_predict_layers:
        names += ["mtp_input_ids", "mtp_labels"]
    # Not left to the document ids: without document masks the model does not get them, and padding stays padding.
    arguments = {name: batch[name] for name in names} | {"is_real": batch["document_ids"] >= 0}
    if parts.meshes.sequence is not None:
        arguments = parts.meshes.sequence.cut(arguments, parts.shape.sliding_window)
    return {name: tensor.to(parts.process.device, non_blocking=True) for name, tensor in arguments.items()}


@torch.no_grad()
def judge_drafts(parts: Parts, result: LossSums, batch: dict[str, Tensor]) -> Tensor:
    """`accepted_drafts` over the whole rows of a batch of the loader; FP64 [K]. Every rank of the last pipeline stage
    that reads the rows counts its share of them, so that the sum over all ranks counts each once."""
    if "mtp_labels" not in batch:
        return result.mtp_losses.new_zeros(0, dtype=torch.float64)
    predictions, labels = result.predictions, batch["mtp_labels"].to(result.predictions.device)
    if parts.meshes.sequence is not None:
        document_ids = batch["document_ids"] if parts.config.data.document_mask else None
        predictions = parts.meshes.sequence.restore(predictions, document_ids, parts.shape.sliding_window)
    return accepted_drafts(predictions, labels).double() / parts.layout.ranks_per_dp_rank


@torch.no_grad()
def _figures(
    parts: Parts, outputs: list[list[LossSums | StageOutput]], micro_batches: list[dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """This rank's part of what is summed over a step: FP64 [1 + K + 2 + K] and int64 [MoE layers, E + 1]."""
    depths, experts, device = parts.shape.num_nextn_predict_layers, parts.shape.n_routed_experts, parts.process.device
    sums = torch.zeros(1 + 2 * depths + 2, dtype=torch.float64, device=device)
    loss, mtp_losses, aux_losses, accepted = sums.split([1, depths, 2, depths])
    for output in (output for of_stage in outputs for output in of_stage):
        aux_losses += output.aux_losses
    for output, batch in zip(outputs[-1], micro_batches, strict=True):
        if isinstance(output, LossSums):
            loss += output.loss
            mtp_losses += output.mtp_losses
            accepted += judge_drafts(parts, output, batch)
    here = [
        sum(torch.cat([output.tokens_per_expert, output.overflow.unsqueeze(1)], dim=1) for output in of_stage)
        for of_stage in outputs
    ]
    counters = torch.zeros(parts.balance.layers, experts + 1, dtype=torch.int64, device=device)
    counters[parts.balance.rows] = torch.cat(here)
    return sums, counters
