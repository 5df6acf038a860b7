"""The part of a tensor that a rank holds, and which elements of the whole it is."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from glm46 import compat


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, detached, sharing its memory; all of it unless it is a DTensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def global_indices(tensor: Tensor) -> list[Tensor]:
    """For each dimension, the global places that the local part holds, in local order; int64 on the CPU.

    A plain tensor holds everything. Placements are applied from the outermost mesh axis inwards, with the uneven
    chunks that torch makes: the last ones are shorter, or empty.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return indices
    coordinate = tensor.device_mesh.get_coordinate()
    for axis, placement in enumerate(tensor.placements):
        ranks, rank = tensor.device_mesh.size(axis), coordinate[axis]
        if isinstance(placement, compat.StridedShard):
            # The parts of another sharding, of which each rank of this axis holds a part each.
            pieces = [_chunk(piece, ranks, rank) for piece in indices[placement.dim].chunk(placement.split_factor)]
            indices[placement.dim] = torch.cat(pieces)
        elif isinstance(placement, Shard):
            indices[placement.dim] = _chunk(indices[placement.dim], ranks, rank)
        elif not isinstance(placement, Replicate):
            raise TypeError(f"{placement} has no elements of its own")
    return indices


def _chunk(index: Tensor, ranks: int, rank: int) -> Tensor:
    chunks = index.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else index[:0]
