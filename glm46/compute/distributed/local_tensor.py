"""The local part of a tensor, its position in the whole tensor, and copies to the device of this rank."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from glm46 import compat

_Value = TypeVar("_Value")
"""A tensor, or an object with `to` and `pin_memory` that copies its tensors."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor; detached, with shared memory."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return getattr(local, "_tensor", local)  # torchao wraps weights that FSDP2 gathers in FP8


def copy_to_device(value: _Value, device: torch.device) -> _Value:
    """Copy from the CPU without waiting for the GPU, unlike a copy from pageable memory."""
    source: Any = value
    if device.type == "cuda":
        # A tensor whose elements share memory, for example after `expand`, cannot be pinned.
        source = source.contiguous() if isinstance(source, Tensor) else source
        source = source.pin_memory()
    copied: _Value = source.to(device, non_blocking=True)
    return copied


def global_indices(tensor: Tensor, coordinate: Sequence[int] | None = None) -> list[Tensor]:
    """Return the global indices of the local part for each dimension, in local order; int64 on the CPU.

    For a plain tensor these are all indices. Placements apply from the outermost mesh axis inwards, in torch's uneven
    chunks: the last chunks are shorter, or empty.

    Args:
        coordinate: coordinate of a rank in the tensor's mesh; default: this rank.

    Raises:
        TypeError: a placement is neither a shard nor a replica.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return indices
    coordinate = tensor.device_mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None, "this rank is outside of the mesh"
    for axis, placement in enumerate(tensor.placements):
        ranks = tensor.device_mesh.size(axis)
        rank = coordinate[axis]
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
