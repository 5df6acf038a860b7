"""Routes: the chosen experts of tokens as data, so that training computes with the experts that a rollout used.

A route is [L, A]: the A experts of a token in each of the L layers that `moe_layers` counts, in any order. Prediction
layers have no routes. The router chooses the experts of a token without a route.
"""

import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.model import ModelShape


def moe_layers(shape: ModelShape) -> int:
    """Count the decoder layers with experts, without prediction layers."""
    return shape.num_hidden_layers - shape.first_k_dense_replace


def route_type(num_experts: int) -> torch.dtype:
    """Return the smallest dtype with torch arithmetic that holds an expert index and the "no route" value."""
    return torch.uint8 if num_experts < 256 else torch.int16


def no_routes(size: tuple[int, ...], shape: ModelShape) -> Tensor:
    """Create routes [*size, L, A] of `route_type` for tokens without a route: 255 in uint8, -1 in int16."""
    full_size = *size, moe_layers(shape), shape.num_experts_per_tok
    return torch.full(full_size, -1).to(route_type(shape.n_routed_experts))


def compact_routes(routes: Tensor, size: tuple[int, ...], shape: ModelShape) -> Tensor:
    """Check routes and convert them to `route_type` if necessary.

    Args:
        routes: integer [*size, L, A] on the CPU. -1 for all experts of a token in a layer means no route.

    Raises:
        UserError: wrong shape, an expert that the model does not have, or a duplicate expert for a token.
    """
    E = shape.n_routed_experts
    dtype = route_type(shape.n_routed_experts)
    expected = (*size, moe_layers(shape), shape.num_experts_per_tok)
    if tuple(routes.shape) != expected:
        raise UserError(
            f"routes {list(routes.shape)}: must be {list(expected)}: tokens, then {expected[-2]} MoE layers, without "
            f"dense and prediction layers, and {expected[-1]} experts of a token; let the engine serve this model"
        )
    no_route = 255 if routes.dtype == dtype == torch.uint8 else -1  # 255 as in `no_routes`
    wide = routes if routes.dtype == dtype else routes.to(torch.int64)
    ordered = wide.sort(-1).values
    low = ordered[..., 0]
    high = ordered[..., -1]
    is_wrong = (low < 0) | (high >= E) | (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    is_wrong &= (low != no_route) | (high != no_route)  # no route: all experts of the token have this value
    if is_wrong.any():
        *token, layer = is_wrong.nonzero()[0].tolist()
        raise UserError(
            f"routes: experts {wide[(*token, layer)].tolist()} of token {token} in MoE layer {layer}: must differ and "
            f"be 0 to {E - 1}, or all -1 for none; let the engine serve this model"
        )
    return wide.to(dtype)


def replay(routes_BSA: Tensor, chosen_TA: Tensor, num_experts: int) -> Tensor:
    """Return the experts of the routes, and the chosen experts where there is no route; int64 [T, A]."""
    experts_TA = routes_BSA.reshape(chosen_TA.shape).to(torch.int64)
    return experts_TA.where((experts_TA >= 0) & (experts_TA < num_experts), chosen_TA)
