"""Router of an MoE layer: the experts and weights of each token, auxiliary losses, and token counts for balancing.

Everything is FP32, whatever the dtype of the model: in BF16 scores of experts tie, and ties route differently on
different layouts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46 import compat
from glm46.compat import FunctionContext
from glm46.compute.model.layers import local_weight
from glm46.compute.model.routes import replay, route_type
from glm46.config.model import ModelShape
from glm46.run.function import is_gate


@dataclass(frozen=True)
class RoutingOptions:
    """Options that training adds to GLM's routing. The defaults are GLM's inference behaviour."""

    temperature: Tensor | None = None
    """FP32 scalar that divides the logits; a tensor, so that a schedule does not trigger recompilation. None is 1.
    `Transformer.routing` sets it."""
    capacity_factor: float | None = None
    """Maximum tokens of an expert per call, relative to an even share. None: no limit."""
    balance_loss: bool = False
    """Compute the sequence-level balance loss."""
    z_loss: bool = False
    """Compute the router z-loss."""
    index_loss: Literal["none", "dense", "sparse"] = "none"
    """Sparse attention: compute the losses of the indexers. dense: over all keys, which are then all attended to;
    sparse: over the chosen keys."""
    statistics: bool = True
    """Return `RoutingStatistics`. Decoding does not need them and skips their kernels."""
    record: bool = False
    """Return the chosen experts with the statistics."""


class RoutingStatistics(NamedTuple):
    """Statistics of one MoE layer in one call. Returned, never stored: a layer that is recomputed in backward must not
    count its tokens twice."""

    aux_losses: Tensor
    """FP32 [2], differentiable: sum over real tokens of the balance loss of their sequence, and of the z-loss."""
    tokens_per_expert: Tensor
    """int64 [E]: real tokens of each expert."""
    overflow: Tensor
    """int64 scalar: assignments dropped by the capacity."""
    routes: Tensor | None = None
    """[B, S, A] of `route_type` with `RoutingOptions.record`: the chosen experts of this rank's tokens."""

    def with_call(self, other: "RoutingStatistics") -> "RoutingStatistics":
        """Add the statistics of another call of the same layer, without routes."""
        return RoutingStatistics(
            self.aux_losses + other.aux_losses,
            self.tokens_per_expert + other.tokens_per_expert,
            self.overflow + other.overflow,
        )


class Routing(NamedTuple):
    """Experts and weights of T tokens."""

    weights: Tensor
    """FP32 [T, A], 0 for a dropped assignment."""
    experts: Tensor
    """int64 [T, A]."""
    statistics: RoutingStatistics | None
    """None without `RoutingOptions.statistics`."""


class _BF16Linear(torch.autograd.Function):
    """``x @ weight.T`` of BF16 tensors with an FP32 result, without an FP32 copy of x. Products of BF16 numbers are
    exact in FP32.

    Backward splits the FP32 gradient into two BF16 parts, whose sum differs from it by at most 2**-16 of each element.
    """

    @staticmethod
    def forward(ctx: FunctionContext, x_TD: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight)
        return compat.mm_in_fp32(x_TD, weight.t())

    @staticmethod
    def backward(ctx: FunctionContext, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight = ctx.saved_tensors
        high_TE = grad_TE.to(x_TD.dtype)
        low_TE = (grad_TE - high_TE).to(x_TD.dtype)
        grad_TX = torch.cat([high_TE, low_TE], dim=1)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # false for a frozen router
            grad_weight = compat.mm_in_fp32(grad_TX.t(), x_TD).unflatten(0, (2, -1)).sum(0).to(weight.dtype)
        return grad_TX @ torch.cat([weight, weight]), grad_weight


def fp32_linear(x_TD: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.T`` in FP32, whatever the dtype of both."""
    if x_TD.dtype == weight.dtype == torch.bfloat16:
        scores: Tensor = _BF16Linear.apply(x_TD, weight)
        return scores
    return F.linear(x_TD.float(), weight.float())


def folded(name: str, weight: Tensor, temperature: float) -> Tensor:
    """Fold the router temperature into a weight for readers without one: divide a gate by it, in FP32. Other weights
    are returned unchanged."""
    return weight.float() / temperature if is_gate(name) and temperature != 1.0 else weight


class Router(nn.Module):
    """Sigmoid router. A bias affects the selection, not the weights (arXiv 2408.15664, transformers Glm4Moe)."""

    e_score_correction_bias: Tensor

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        # Sum over the ranks that share a sequence. Context and tensor parallelism replace it.
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts, dtype=torch.float32))

    def forward(
        self, x_BSD: Tensor, is_real: Tensor | None, options: RoutingOptions, routes_BSA: Tensor | None = None
    ) -> Routing:
        """Route every token of [B, S, D].

        Args:
            is_real: boolean [B, S], or None without padding.
            routes_BSA: of `route_type`: experts to use instead of the router's choice, see `compute/model/routes.py`.
                Only the choice is replayed: weights and gradient of the router come from its current scores.
        """
        B, S, D = x_BSD.shape
        logits_TE = fp32_linear(x_BSD.reshape(B * S, D), local_weight(self.weight))
        if options.temperature is not None:
            logits_TE = logits_TE / options.temperature
        scores_TE = logits_TE.sigmoid()
        experts_TA = self.select(scores_TE.detach() + self.e_score_correction_bias)
        if routes_BSA is not None:
            experts_TA = replay(routes_BSA, experts_TA, self.shape.n_routed_experts)
        weights_TA = scores_TE.gather(1, experts_TA)
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + 1e-20) * self.shape.routed_scaling_factor
        if is_real is None and options.capacity_factor is None and not options.statistics:
            return Routing(weights_TA, experts_TA, None)

        kept_TA = torch.ones_like(experts_TA, dtype=torch.bool)
        if is_real is not None:
            kept_TA = kept_TA & is_real.reshape(B * S, 1)
        num_assigned = kept_TA.sum()
        if options.capacity_factor is not None:
            kept_TA = self._within_capacity(experts_TA, kept_TA, options.capacity_factor)
        if is_real is not None or options.capacity_factor is not None:
            weights_TA = weights_TA * kept_TA
        if not options.statistics:
            return Routing(weights_TA, experts_TA, None)
        routes = None
        if options.record:
            routes = experts_TA.view(B, S, -1).to(route_type(self.shape.n_routed_experts))
        statistics = RoutingStatistics(
            aux_losses=self._aux_losses(logits_TE, scores_TE, is_real, (B, S), options),
            tokens_per_expert=_count(experts_TA, kept_TA, self.shape.n_routed_experts),
            overflow=num_assigned - kept_TA.sum(),
            routes=routes,
        )
        return Routing(weights_TA, experts_TA, statistics)

    @torch.no_grad()
    def select(self, choice_TE: Tensor) -> Tensor:
        """Select the A best experts of each token; int64 [T, A]."""
        return choice_TE.topk(self.shape.num_experts_per_tok, dim=-1).indices

    def _within_capacity(self, experts_TA: Tensor, kept_TA: Tensor, factor: float) -> Tensor:
        """Return a mask of the kept assignments that are among the first `capacity` of their expert in token order."""
        E = self.shape.n_routed_experts
        capacity = (kept_TA.sum() * factor / E).ceil()
        # Sorted by expert, the position of an assignment within its expert is its position minus the first one of the
        # expert. A running sum over [T * A, E] would give the same, but in T * A sequential steps on a GPU.
        expert_N = experts_TA.masked_fill(~kept_TA, E).flatten()  # dropped assignments count for no expert
        sorted_N, order_N = expert_N.to(torch.int16).sort(stable=True)
        first_N = torch.searchsorted(sorted_N, sorted_N)
        is_within_N = torch.arange(len(expert_N), device=expert_N.device) - first_N < capacity
        return kept_TA & torch.empty_like(is_within_N).scatter_(0, order_N, is_within_N).view_as(kept_TA)

    def _aux_losses(
        self,
        logits_TE: Tensor,
        scores_TE: Tensor,
        is_real: Tensor | None,
        batch: tuple[int, int],
        options: RoutingOptions,
    ) -> Tensor:
        """FP32 [2]; see `RoutingStatistics.aux_losses`.

        The balance loss counts the experts that the scores alone choose, as in its source: with the selection bias,
        which already balances the counts, the loss would have no effect.

        Source: balance loss of each sequence, arXiv 2412.19437 eq. 17 to 20; z-loss, arXiv 2202.08906 eq. 5.
        """
        B, S = batch
        balance = z = logits_TE.new_zeros(())
        real_BS1 = logits_TE.new_ones(B, S, 1) if is_real is None else is_real.float().unsqueeze(-1)
        if options.balance_loss:
            E = self.shape.n_routed_experts
            by_score_TA = scores_TE.detach().topk(self.shape.num_experts_per_tok, dim=-1).indices
            chosen_TE = torch.zeros_like(scores_TE).scatter_(1, by_score_TA, 1.0)
            probability_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
            values_BSX = torch.cat([chosen_TE, probability_TE], dim=1).view(B, S, 2 * E)
            sums_BX = torch.cat([(values_BSX * real_BS1).sum(1), real_BS1.sum(1)], dim=1)
            chosen_BE, probability_BE, length_B1 = self.sum_over_ranks(sums_BX).split([E, E, 1], dim=1)
            length_B1 = length_B1.clamp(min=1.0)
            share_BE = chosen_BE * (E / self.shape.num_experts_per_tok) / length_B1
            # Times the local tokens only: the values of the ranks that share a sequence add up to its loss.
            balance = ((share_BE * probability_BE / length_B1).sum(1) * real_BS1.sum((1, 2))).sum()
        if options.z_loss:
            z = (logits_TE.logsumexp(-1).square().view(B, S, 1) * real_BS1).sum()
        return torch.stack([balance, z])


@torch.no_grad()
def _count(experts_TA: Tensor, kept_TA: Tensor, num_experts: int) -> Tensor:
    """Count the kept assignments of each expert, int64 [E]. Integer sums are exact and equal on every device."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts_TA.device)
    return counts.scatter_add_(0, experts_TA.flatten(), kept_TA.flatten().to(torch.int64))
