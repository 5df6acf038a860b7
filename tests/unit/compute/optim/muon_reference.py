"""Muon in its plainest form, one matrix at a time on whole tensors: the reference of every fast path. The bytes that a
plan moves, counted from its units."""

from collections import Counter

import torch
from torch import Tensor

from glm46.compute.optim.muon_plan import Bucket, MuonPlan
from glm46.compute.optim.muon_update import update_scale
from glm46.compute.optim.newton_schulz import COEFFICIENTS


def reference_update(
    parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict, row_blocks: tuple[int, ...] | None = None
) -> None:
    """Update ``parameter`` and ``momentum`` in place; all three are whole tensors [..., rows, columns].

    ``group`` holds the options of ``Muon``; ``row_blocks`` are the rows of the matrices fused along the rows.
    """
    rows, columns = parameter.shape[-2:]
    momentum.lerp_(gradient, 1.0 - group["momentum"])
    direction = gradient.lerp(momentum, group["momentum"])
    blocks = row_blocks or (rows,)
    for p, u in zip(parameter.reshape(-1, rows, columns), direction.reshape(-1, rows, columns), strict=True):
        for p_block, u_block in zip(p.split(blocks), u.split(blocks), strict=True):
            x = u_block if u_block.shape[0] <= u_block.shape[1] else u_block.T
            x = x / x.norm().clamp(min=1e-12)
            x = x.to(group["ns_dtype"])
            a, b, c = COEFFICIENTS
            for _ in range(group["ns_steps"]):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            x = x if u_block.shape[0] <= u_block.shape[1] else x.T
            scale = update_scale(group["adjust_lr"], *p_block.shape)
            p_block.mul_(1.0 - group["lr"] * group["weight_decay"])
            p_block.sub_(x.to(torch.promote_types(p.dtype, x.dtype)), alpha=group["lr"] * scale)


def entries_received(bucket: Bucket, member: int) -> int:
    """Entries that a rank of the bucket's group receives in one step, both ways."""
    others = [other for other in range(len(bucket.ranks)) if other != member]
    gathered = [u.size(other) for u in bucket.units for other in others if u.owner == member and other in u.senders]
    returned = [u.size(member) for u in bucket.units if u.owner in others and u.receives(member)]
    return sum(gathered) + sum(returned)


def entries_per_rank(plan: MuonPlan) -> Counter[int]:
    """Entries received per step by each rank that this one exchanges matrices with, by global rank."""
    totals: Counter[int] = Counter()
    for bucket in plan.buckets:
        for member, rank in enumerate(bucket.ranks):
            totals[rank] += entries_received(bucket, member)
    return totals
