"""Mixture-of-experts layer: routed experts plus a shared expert that every token uses."""

from typing import Any

from torch import Tensor, nn

from glm46.compute.model.dispatch import LocalDispatcher, TokenDispatcher
from glm46.compute.model.experts import Experts
from glm46.compute.model.layers import FeedForward
from glm46.compute.model.router import Router, RoutingOptions, RoutingStatistics
from glm46.config.model import ModelShape


class MoE(nn.Module):
    """Router, routed experts and shared expert. The dispatcher between them can be replaced."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.num_experts = shape.n_routed_experts
        self.router = Router(shape)
        self.experts = Experts(shape)
        shared_width = shape.moe_intermediate_size * shape.n_shared_experts
        self.shared_experts = FeedForward(shape.hidden_size, shared_width) if shape.n_shared_experts else None
        self.dispatcher: TokenDispatcher[Any, Any, Any] = LocalDispatcher()

    def forward(
        self, x: Tensor, is_real: Tensor | None, options: RoutingOptions, routes: Tensor | None = None
    ) -> tuple[Tensor, RoutingStatistics | None]:
        """Map [B, S, D] to [B, S, D]; further arguments as in `Router.forward`. Also return the routing statistics,
        None if `options` turns them off."""
        routing = self.router(x, is_real, options, routes)
        x_TD = x.reshape(-1, x.shape[-1])
        sent = self.dispatcher.start(x_TD, routing, self.num_experts)
        # Computed during the exchange, in backward too. It must come before the experts: a recomputation of this layer
        # stops at the last tensor that backward needs, and must not reach the exchange after the experts.
        shared = None if self.shared_experts is None else self.shared_experts(x)
        rows, way, schedule = self.dispatcher.arrived(sent)
        results = self.experts(*rows, schedule)
        y = self.dispatcher.combine(results, way).view_as(x)
        return (y if shared is None else y + shared), routing.statistics
