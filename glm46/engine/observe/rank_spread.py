"""The spread of measured values over the ranks."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.agreement import combine_on_host


def spread_over_ranks(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Compute minimum, mean and maximum over the ranks that have a value. Collective, on the CPU.

    Args:
        values: values of this rank by name; values that it cannot measure are absent.
        names: all names, in the same order on all ranks.

    Returns:
        ``name/min``, ``name/mean`` and ``name/max`` of each name that some rank has, and ``extreme_rank/name/min`` and
        ``extreme_rank/name/max``, the ranks with these two values (the last rank among equal ones).
    """
    local = torch.tensor([values.get(name, math.nan) for name in names], dtype=torch.float64)
    is_known = ~local.isnan()
    largest = torch.where(is_known, torch.stack([-local, local]), -math.inf)
    ranks = torch.where(is_known, float(dist.get_rank()), -1.0).expand(2, -1)
    total, count, *extremes = combine_on_host(
        torch.cat([torch.where(is_known, local, 0.0)[None], is_known[None].double(), largest, ranks]), _wider
    )
    columns = {"{}/min": -extremes[0], "{}/mean": total / count, "{}/max": extremes[1]}
    columns |= {"extreme_rank/{}/min": extremes[2].long(), "extreme_rank/{}/max": extremes[3].long()}
    return {
        column.format(name): spread[index].item()
        for index, name in enumerate(names)
        for column, spread in columns.items()
        if count[index]
    }


def _wider(low: Tensor, high: Tensor) -> Tensor:
    """Combine the spreads of two groups of ranks; rows are sum, count, -minimum, maximum, and the ranks with the
    extremes."""
    takes = high[2:4] >= low[2:4]
    return torch.cat([low[:2] + high[:2], torch.where(takes.repeat(2, 1), high[2:], low[2:])])
