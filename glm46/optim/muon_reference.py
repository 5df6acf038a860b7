"""Muon in its plainest form, one matrix at a time on whole tensors: the reference of every fast path."""

import torch
from torch import Tensor

from glm46.optim.muon_update import update_scale
from glm46.optim.newton_schulz import step_coefficients


def reference_update(
    parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict, row_blocks: tuple[int, ...] | None = None
) -> None:
    """Update ``parameter`` and ``momentum`` in place; all three are whole tensors [..., rows, columns].

    ``group`` holds the options of ``Muon``; ``row_blocks`` are the rows of the matrices fused along the rows.
    """
    rows, columns = parameter.shape[-2:]
    momentum.lerp_(gradient, 1.0 - group["momentum"])
    direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
    blocks = row_blocks or (rows,)
    for p, u in zip(parameter.reshape(-1, rows, columns), direction.reshape(-1, rows, columns), strict=True):
        for p_block, u_block in zip(p.split(blocks), u.split(blocks), strict=True):
            x = u_block if u_block.shape[0] <= u_block.shape[1] else u_block.T
            x = x / x.norm().clamp(min=group["eps"])
            x = x.to(group["ns_dtype"])
            for a, b, c in step_coefficients(group["ns_coefficients"], group["ns_steps"]):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            x = x if u_block.shape[0] <= u_block.shape[1] else x.T
            scale = update_scale(group["adjust_lr"], *p_block.shape)
            p_block.mul_(1.0 - group["lr"] * group["weight_decay"])
            p_block.sub_(x.to(torch.promote_types(p.dtype, x.dtype)), alpha=group["lr"] * scale)
