"""Routes: the chosen experts of tokens as data, so that training computes with the experts that a rollout used.

A route is [L, A]: the A experts of a token in each of the L layers that `moe_layers` counts, in any order. Prediction
layers have none. The router chooses the experts of a token without a route.
"""

import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.model import ModelShape


def moe_layers(shape: ModelShape) -> int:
    """Number of decoder layers with experts, without prediction layers."""
    return shape.num_hidden_layers - shape.first_k_dense_replace


def route_type(num_experts: int) -> torch.dtype:
    """Smallest type of torch's arithmetic that holds an expert and the mark of no route."""
    return torch.uint8 if num_experts < 256 else torch.int16


def no_routes(size: tuple[int, ...], shape: ModelShape) -> Tensor:
    """Routes [*size, L, A] of tokens that have none, of `route_type`: 255 in uint8, -1 in int16."""
    whole = *size, moe_layers(shape), shape.num_experts_per_tok
    return torch.full(whole, -1).to(route_type(shape.n_routed_experts))


def compact_routes(routes: Tensor, size: tuple[int, ...], shape: ModelShape) -> Tensor:
    """Check routes and convert them to `route_type`, unless they have it.

    Args:
        routes: integer [*size, L, A] on the CPU. -1 in all of a token's experts of a layer: no route.

    Raises:
        UserError: another shape, an expert that the model does not have, or one twice for a token.
    """
    E, dtype = shape.n_routed_experts, route_type(shape.n_routed_experts)
    wanted = (*size, moe_layers(shape), shape.num_experts_per_tok)
    if tuple(routes.shape) != wanted:
        raise UserError(
            f"routes {list(routes.shape)}: must be {list(wanted)}: tokens, then {wanted[-2]} MoE layers, without dense "
            f"and prediction layers, and {wanted[-1]} experts of a token; let the engine serve this model"
        )
    mark = 255 if routes.dtype == dtype == torch.uint8 else -1
    wide = routes if routes.dtype == dtype else routes.to(torch.int64)
    ordered = wide.sort(-1).values
    low, high = ordered[..., 0], ordered[..., -1]
    is_wrong = (low < 0) | (high >= E) | (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    is_wrong &= (low != mark) | (high != mark)
    if is_wrong.any():
        *place, layer = is_wrong.nonzero()[0].tolist()
        raise UserError(
            f"routes: experts {wide[(*place, layer)].tolist()} of token {place} in MoE layer {layer}: must differ and "
            f"be 0 to {E - 1}, or all -1 for none; let the engine serve this model"
        )
    return wide.to(dtype)


def replay(routes_BSA: Tensor, chosen_TA: Tensor, num_experts: int) -> Tensor:
    """The experts of routes of `route_type`, and where there are none those that were chosen; int64 [T, A]."""
    given_TA = routes_BSA.reshape(chosen_TA.shape).to(torch.int64)
    return given_TA.where((given_TA >= 0) & (given_TA < num_experts), chosen_TA)
