"""The only file that touches private parts of torch, or differences between torch 2.11 and 2.13."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
"""Placement of a dimension that FSDP2 shards below tensor parallelism. It is private, and in 2.13 no subclass of Shard:
code that only knows Shard takes the wrong rows without an error."""


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`, which torch 2.11 may only have under its private name.

    Args:
        x: [N, I] rows sorted by group, or [I, N] columns sorted by group.
        weight: [E, I, O], or [N, O] when `x` is [I, N].
        offsets: int32 [E], running sum of group sizes.
    """
    if hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weight, offs=offsets)
    return torch._grouped_mm(x, weight, offs=offsets)
