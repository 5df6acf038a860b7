"""The local part of a tensor, its position in the whole tensor, and copies to the device of this rank."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from glm46 import compat

_Value = TypeVar("_Value")
"""A tensor, or what copies those that it holds."""


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or a plain tensor itself; detached, shares its memory."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return getattr(local, "_tensor", local)  # torchao wraps weights that FSDP2 gathers in FP8


def copy_to_device(value: _Value, device: torch.device) -> _Value:
    """Copy from the CPU; the host does not wait for a GPU, as a copy from pageable memory does."""
    # A tensor whose elements share memory, as those of `expand` do, cannot be pinned.
    whole: Any = value.contiguous() if device.type == "cuda" and isinstance(value, Tensor) else value
    if device.type != "cuda":
        return whole.to(device, non_blocking=True)
    return whole.pin_memory().to(device, non_blocking=True)


def global_indices(tensor: Tensor, coordinate: Sequence[int] | None = None) -> list[Tensor]:
    """For each dimension, the global indices of the local part, in local order; int64 on the CPU.

    For a plain tensor these are all indices. Placements apply from the outermost mesh axis inwards, in torch's uneven
    chunks: the last ones are shorter, or empty.

    Args:
        coordinate: of a rank in the tensor's mesh; default: of this rank.

    Raises:
        TypeError: a placement is neither a shard nor a replica.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return indices
    coordinate = tensor.device_mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None, "this rank is outside of the mesh"
    for axis, placement in enumerate(tensor.placements):
        ranks, rank = tensor.device_mesh.size(axis), coordinate[axis]
        if isinstance(placement, compat.StridedShard):
            # Each rank of this axis holds a chunk of every piece of the other sharding.
            pieces = [_chunk(piece, ranks, rank) for piece in indices[placement.dim].chunk(int(placement.split_factor))]
            indices[placement.dim] = torch.cat(pieces)
        elif isinstance(placement, Shard):
            indices[placement.dim] = _chunk(indices[placement.dim], ranks, rank)
        elif not isinstance(placement, Replicate):
            raise TypeError(f"{placement}: expected Shard or Replicate")
    return indices


def _chunk(index: Tensor, ranks: int, rank: int) -> Tensor:
    chunks = index.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else index[:0]
