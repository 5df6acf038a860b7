"""Process groups with the timeout of the group of all ranks; torch alone would give a new group its own default."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from glm46 import compat


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create the group of these ranks, with the timeout of the group of all ranks. Collective over all ranks."""
    assert dist.group.WORLD is not None
    # On ranks outside the group it is a number, which they do not use.
    created: Any = dist.new_group(list(ranks), timeout=compat.group_timeout(dist.group.WORLD))
    group: dist.ProcessGroup = created
    return group


def group_of_partition(parts: Tensor) -> dist.ProcessGroup:
    """Divide all ranks into groups of equal size and return this rank's group. Collective over all ranks.

    A single part is the group of all ranks. NCCL splits all parts off its communicator in one call.

    Args:
        parts: integers [groups, size].
    """
    assert dist.group.WORLD is not None
    if len(parts) == 1:
        return dist.group.WORLD
    timeout = compat.group_timeout(dist.group.WORLD)
    rank = dist.get_rank()
    if dist.group.WORLD.bound_device_id is None:  # on the CPU: gloo cannot split, so all ranks create every group
        groups: list[Any] = [dist.new_group(ranks, timeout=timeout) for ranks in parts.tolist()]
        group_of_rank: dist.ProcessGroup = groups[int((parts == rank).any(1).nonzero())]
        return group_of_rank
    split: Any = dist.split_group(split_ranks=parts.tolist(), timeout=timeout)
    group: dist.ProcessGroup = split
    if timeout is not None:
        compat.set_group_timeout(timeout, group)  # torch 2.11 sets the timeout only for the NCCL backend of the group
    return group
