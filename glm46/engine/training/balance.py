"""Balance of experts: options and auxiliary losses of the routing, and loss-free balancing, which after each optimizer
step moves the selection bias towards experts with too few tokens."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import LossSums, StageOutput, Transformer, router_names
from glm46.config.model import ModelShape
from glm46.config.moe import MoEConfig
from glm46.config.section import values_of
from glm46.run.schedule import schedule_value


def routing_options(moe: MoEConfig) -> RoutingOptions:
    """Return the routing options that [moe] requests for training."""
    return RoutingOptions(
        capacity_factor=moe.capacity_factor,
        # On for the entire run if any weight of the schedule is above 0: these flags are constants of compiled layers.
        balance_loss=any(values_of(moe.sequence_aux_loss_weight)),
        z_loss=any(values_of(moe.z_loss_weight)),
    )


def auxiliary_loss(aux_losses: Tensor, real_tokens: int, moe: MoEConfig, clock: int) -> Tensor:
    """Compute the part of the step's loss from the auxiliary losses of some layers.

    Args:
        aux_losses: FP32 [4], see `LossSums`.
        real_tokens: real tokens of the complete step, over all ranks.
        clock: tokens of the curriculum before the step.
    """
    balance_loss, z_loss, index_loss, _ = (aux_losses / max(real_tokens, 1)).unbind()
    balance_weight = schedule_value(moe.sequence_aux_loss_weight, clock)
    # The weight of the index loss is 1: only indexers get its gradient, and AdamW's steps do not depend on its size.
    return balance_weight * balance_loss + schedule_value(moe.z_loss_weight, clock) * z_loss + index_loss


class ExpertBalance:
    """Update rule of the selection biases, and its moving averages."""

    def __init__(self, shape: ModelShape, models: list[Transformer], config: MoEConfig, device: torch.device):
        """``models`` are this rank's parts of the model."""
        self.config = config
        names = router_names(shape)
        self.routers = {names.index(name): router for model in models for name, router in model.routers().items()}
        """This rank's routers, by the index of their layer among all MoE layers of the model."""
        self._trained = {row: router for row, router in self.routers.items() if router.weight.requires_grad}
        """The routers whose biases `update` moves: those of frozen layers stay."""
        self._rows = torch.tensor(list(self.routers), dtype=torch.int64).to(device)
        """The keys of `routers`. On the device: a list would be copied there in every step, and the host would wait."""
        self._average_counts = torch.zeros(len(names), shape.n_routed_experts, dtype=torch.float32, device=device)

    @torch.no_grad()
    def count(self, outputs: Sequence[Sequence[LossSums | StageOutput]]) -> tuple[Tensor, Tensor]:
        """Count the assignments of tokens to experts in a step on this rank.

        Args:
            outputs: for each pipeline stage of this rank, the output for each micro-batch.

        Returns:
            int64 [MoE layers, E] of all MoE layers of the model, kept assignments; and int64 [MoE layers], assignments
            that the capacity dropped. Layers of other stages have zeros.
        """
        tokens_per_expert = torch.zeros_like(self._average_counts, dtype=torch.int64)
        overflow = tokens_per_expert.new_zeros(len(tokens_per_expert))
        kept = torch.cat([torch.stack([output.tokens_per_expert for output in stage]).sum(0) for stage in outputs])
        dropped = torch.cat([torch.stack([output.overflow for output in stage]).sum(0) for stage in outputs])
        rows = self._rows[: len(kept)]  # prediction layers are last, and may not have run
        tokens_per_expert.index_copy_(0, rows, kept)
        overflow.index_copy_(0, rows, dropped)
        return tokens_per_expert, overflow

    @torch.no_grad()
    def update(self, tokens_per_expert: Tensor, rate: float) -> None:
        """Update the biases once.

        Args:
            tokens_per_expert: int64 [MoE layers, E], summed over the micro-batches of the step and over all ranks, so
                that all replicas of a bias stay equal.
            rate: step size of the bias.

        Source: sign, arXiv 2408.15664 algorithm 1; proportional, docs/model.md.
        """
        if self.config.balance == "none":
            return
        counts = tokens_per_expert.float()
        if self.config.balance == "sign":
            shift = rate * (counts.mean(1, keepdim=True) - counts).sign()
        else:
            decay = self.config.bias_ema_decay
            self._average_counts.mul_(decay).add_(counts, alpha=1.0 - decay)
            mean = self._average_counts.mean(1, keepdim=True)
            shift = -rate * (self._average_counts / (mean + 1e-6) - 1.0)
        for row, router in self._trained.items():
            router.e_score_correction_bias += shift[row]
            if self.config.balance == "proportional":
                router.e_score_correction_bias.clamp_(-self.config.bias_clamp, self.config.bias_clamp)

    def largest_bias(self, pipeline: dist.ProcessGroup | None) -> float:
        """Return the largest absolute bias of the complete model. Collective over `pipeline`; waits for the device."""
        largest = torch.zeros((), device=self._average_counts.device)
        for router in self.routers.values():
            largest = torch.maximum(largest, router.e_score_correction_bias.abs().max())
        if pipeline is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=pipeline)
        return largest.item()  # sync: a row of metrics

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, without the biases, which are buffers of the model."""
        return {"average_counts": self._average_counts} if self.config.balance == "proportional" else {}


def balance_metrics(tokens_per_expert: Tensor, overflow: Tensor) -> dict[str, float]:
    """Compute metrics of the balance of experts in one step.

    Args:
        tokens_per_expert: int64 [layers, E] on the CPU, kept assignments, summed over all ranks.
        overflow: int64 [layers], assignments dropped by the capacity.

    Returns:
        Columns of metrics.jsonl; empty without MoE layers. Ratios are relative to an even share in the same layer;
        a layer without tokens counts as even.
    """
    if tokens_per_expert.numel() == 0:
        return {}
    tokens_LE = tokens_per_expert.double()
    mean_L = tokens_LE.mean(1)
    # One assignment gives a mean of 1 / E, so this changes only layers without tokens: there 0 / 0 becomes 0.
    even_share_L = mean_L.clamp(min=1.0 / tokens_LE.shape[1])
    cv_L = tokens_LE.std(1, correction=0) / even_share_L
    is_used_L = mean_L > 0
    dropped = int(overflow.sum())
    kept = tokens_LE.sum()
    values = {
        "expert_balance_cv": cv_L.mean(),
        "expert_balance_cv_max": cv_L.max(),
        "expert_load_max_ratio": torch.where(is_used_L, tokens_LE.amax(1) / even_share_L, 1.0).max(),
        "expert_load_min_ratio": torch.where(is_used_L, tokens_LE.amin(1) / even_share_L, 1.0).min(),
        "expert_overflow_ratio": dropped / (dropped + kept).clamp(min=1.0),
        "dead_experts": (tokens_LE == 0).sum().double(),
    }
    return {name: value.item() for name, value in values.items()} | {"expert_overflow_count": dropped}
