"""The rows and columns of each matrix that each rank of a mesh holds, derived from DTensor placements alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from glm46.compat import StridedShard, wrap_local
from glm46.distributed.local_tensor import local_tensor

Interval = tuple[int, int]
"""Start and stop of consecutive indices."""


@dataclass(frozen=True)
class Holding:
    """The part of a tensor [matrices, rows, columns] that one rank holds: consecutive indices of each dimension."""

    batch: Interval
    rows: Interval
    columns: Interval


@dataclass(frozen=True)
class TensorLayout:
    """The part of one parameter that each rank of its mesh holds.

    ``ranks`` are the ranks, ascending, that hold parts of the same matrices as this rank, replicas included. A plain
    tensor has none.
    """

    shape: tuple[int, int, int]
    mine: Holding
    holdings: dict[int, Holding]
    ranks: tuple[int, ...]


def is_sharding(placement) -> bool:
    """True if a placement shards the tensor. In torch 2.13 ``is_shard()`` of a strided shard is False."""
    return isinstance(placement, (Shard, StridedShard))


def _nesting(dim: int, placements: Sequence, mesh_shape: Sequence[int]) -> list[int]:
    """The mesh axes that shard ``dim``, the outermost first.

    FSDP over tensor parallelism is written [_StridedShard(dim, split_factor=tp), Shard(dim)]: tensor parallelism
    shards first although its axis comes later, and the split factor is the number of pieces that it makes.
    """
    axes: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not is_sharding(placement) or placement.dim != dim:
            continue
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        before = 0
        while math.prod(mesh_shape[a] for a in axes[:before]) < factor and before < len(axes):
            before += 1
        if math.prod(mesh_shape[a] for a in axes[:before]) != factor:
            raise ValueError(f"placements {tuple(placements)} on a mesh {tuple(mesh_shape)}: split_factor fits no axes")
        axes.insert(before, axis)
    return axes


def _interval(length: int, axes: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Interval:
    """The part of ``length`` indices that remains after ``torch.chunk`` along each axis in turn."""
    start, stop = 0, length
    for axis in axes:
        size = -(-(stop - start) // mesh_shape[axis])
        first = min(start + coordinate[axis] * size, stop)
        start, stop = first, min(first + size, stop)
    return start, stop


def tensor_layout(tensor: Tensor) -> TensorLayout:
    """The layout of a tensor of at least two dimensions; leading dimensions count as a batch of matrices.

    Raises:
        ValueError: fewer than two dimensions, a placement that is neither a shard nor a replica, a cut of a leading
            dimension other than the first, or a local shard whose shape differs from the one derived.
    """
    if tensor.ndim < 2:
        raise ValueError(f"Muon takes matrices and batches of matrices, not a tensor of shape {tuple(tensor.shape)}")
    shape = (math.prod(tensor.shape[:-2]), *tensor.shape[-2:])
    whole = Holding(*((0, length) for length in shape))
    if not isinstance(tensor, DTensor):
        return TensorLayout(shape, whole, {}, ())
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if not is_sharding(placement) and not isinstance(placement, Replicate):
            raise ValueError(f"Muon takes sharded and replicated parameters, not placement {placement}")
        if is_sharding(placement) and 0 < placement.dim < tensor.ndim - 2:
            raise ValueError(f"Muon takes parameters cut in the first or the last two dimensions, not {placement}")
    mesh_shape = tuple(mesh.shape)
    inner = math.prod(tensor.shape[1:-2])
    nestings = [_nesting(dim, placements, mesh_shape) for dim in (0, tensor.ndim - 2, tensor.ndim - 1)]
    if tensor.ndim == 2:
        nestings[0] = []
    lengths = (tensor.shape[0] if tensor.ndim > 2 else 1, *shape[1:])
    holdings: dict[tuple[int, ...], Holding] = {}
    for coordinate in product(*(range(size) for size in mesh_shape)):
        batch, rows, columns = (
            _interval(length, axes, mesh_shape, coordinate) for length, axes in zip(lengths, nestings, strict=True)
        )
        holdings[coordinate] = Holding((batch[0] * inner, batch[1] * inner), rows, columns)
    me = tuple(mesh.get_coordinate())
    _check_local_shape(tensor, holdings[me])
    batching = set(nestings[0])
    ranks = mesh.mesh.numpy()
    names = {coordinate: int(ranks[coordinate]) for coordinate in holdings}
    return TensorLayout(
        shape,
        holdings[me],
        {names[coordinate]: holding for coordinate, holding in holdings.items()},
        tuple(sorted(names[c] for c in holdings if all(c[a] == me[a] for a in batching))),
    )


def _check_local_shape(tensor: DTensor, holding: Holding) -> None:
    local = tensor.to_local()
    derived = tuple(stop - start for start, stop in (holding.batch, holding.rows, holding.columns))
    actual = (math.prod(local.shape[:-2]), *local.shape[-2:])
    if math.prod(derived) != local.numel() or (local.numel() and derived != actual):
        raise ValueError(f"placements {tensor.placements} give a shard {derived} but the tensor holds {actual}")


def local_matrices(tensor: Tensor) -> Tensor:
    """This rank's part as [matrices, rows, columns], sharing its memory."""
    local = local_tensor(tensor)
    if local.ndim == 2:
        return local.unsqueeze(0)
    return local if local.ndim == 3 else local.view(math.prod(local.shape[:-2]), *local.shape[-2:])


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of the gradient, placed as the parameter is; None without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_tensor(gradient)


def state_like(parameter: Tensor, dtype: torch.dtype, *, block: int = 1, on_host: bool = False) -> Tensor:
    """A state of zeros with the parameter's shape, mesh and placements.

    Args:
        block: entries of the last dimension that share one entry of the state.
        on_host: in host memory, pinned if the parameter is on a GPU, instead of on the parameter's device.
    """

    def shape_of(tensor: Tensor) -> torch.Size:
        return tensor.shape if block == 1 else torch.Size((*tensor.shape[:-1], -(-tensor.shape[-1] // block)))

    part = local_tensor(parameter)
    device = torch.device("cpu") if on_host else part.device
    zeros = torch.zeros(shape_of(part), dtype=dtype, device=device, pin_memory=on_host and part.is_cuda)
    return wrap_local(zeros, parameter, shape_of(parameter)) if isinstance(parameter, DTensor) else zeros
