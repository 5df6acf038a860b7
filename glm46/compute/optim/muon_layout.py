"""Rows and columns of each matrix that each rank of a mesh holds, derived from DTensor placements only."""

import math
from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from glm46.compat import StridedShard, wrap_local
from glm46.compute.distributed.host_memory import host_tensor
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.optim.muon_plan import Cut, Holding, TensorLayout, mesh_layout


def is_sharding(placement: Placement) -> TypeGuard[Shard | StridedShard]:
    """Return whether a placement shards the tensor. In torch 2.13 ``is_shard()`` of a strided shard is False."""
    return isinstance(placement, (Shard, StridedShard))


def tensor_layout(tensor: Tensor) -> TensorLayout:
    """Derive the layout of a tensor of at least two dimensions; leading dimensions count as a batch of matrices.

    Raises:
        ValueError: fewer than two dimensions, a placement that is neither a shard nor a replica, a cut of a leading
            dimension other than the first, or a local shard whose shape differs from the derived shape.
    """
    if tensor.ndim < 2:
        raise ValueError(f"Muon takes matrices and batches of matrices, not a tensor of shape {tuple(tensor.shape)}")
    *leading, rows, columns = tensor.shape
    if not isinstance(tensor, DTensor):
        shape = math.prod(leading), rows, columns
        return TensorLayout(shape, Holding(*((0, length) for length in shape)), {}, ())
    mesh = tensor.device_mesh
    layout = mesh_layout(
        sizes=(leading[0] if leading else 1, rows, columns),
        inner=math.prod(leading[1:]),
        mesh=mesh.shape,
        ranks=mesh.mesh.flatten().tolist(),
        cuts=_cuts(tensor),
        me=dist.get_rank(),
    )
    _check_local_shape(tensor, layout.mine)
    return layout


def _cuts(tensor: DTensor) -> list[Cut]:
    """List the cuts of a tensor in the order in which they apply: from the outermost axis inwards, then strided shards,
    which divide the shards of the inner axes."""
    strided = list[Cut]()
    plain = list[Cut]()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if not is_sharding(placement):
            raise ValueError(f"Muon takes sharded and replicated parameters, not placement {placement}")
        if 0 < placement.dim < tensor.ndim - 2:
            raise ValueError(f"Muon takes parameters cut in the first or the last two dimensions, not {placement}")
        from_end = placement.dim - tensor.ndim
        cut = (axis, 3 + from_end if from_end >= -2 else 0)  # of [matrices, rows, columns]
        if not isinstance(placement, StridedShard):
            plain.append(cut)
            continue
        inner_axes = zip(tensor.device_mesh.shape[axis + 1 :], tensor.placements[axis + 1 :], strict=True)
        inner_ranks = math.prod(size for size, inner in inner_axes if is_sharding(inner) and inner.dim == placement.dim)
        if placement.split_factor != inner_ranks:
            raise ValueError(f"Muon takes strided shards of what the inner axes leave, not {placement}")
        strided.append(cut)
    return [*plain, *reversed(strided)]


def _check_local_shape(tensor: DTensor, holding: Holding) -> None:
    local = tensor.to_local()
    derived = tuple(stop - start for start, stop in (holding.batch, holding.rows, holding.columns))
    actual = (math.prod(local.shape[:-2]), *local.shape[-2:])
    if math.prod(derived) != local.numel() or (local.numel() and derived != actual):
        raise ValueError(f"placements {tensor.placements} give a shard {derived} but the tensor holds {actual}")


def local_matrices(tensor: Tensor) -> Tensor:
    """Return this rank's part as [matrices, rows, columns], sharing its memory."""
    local = local_tensor(tensor)
    if local.ndim == 2:
        return local.unsqueeze(0)
    return local if local.ndim == 3 else local.view(math.prod(local.shape[:-2]), *local.shape[-2:])


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return this rank's part of the gradient, with the placements of the parameter; None without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_tensor(gradient)


Zeros = Callable[[torch.Size, torch.dtype, Tensor], Tensor]
"""Function that creates zeros of a shape and dtype, for a state of this rank's part of a parameter."""


def zeros_on_device(shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Create zeros on the device of the parameter; a `Zeros`."""
    return torch.zeros(shape, dtype=dtype, device=like.device)


def zeros_in_host_memory(shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Create zeros in host memory, pinned if there is a GPU, where parameters in host memory are pinned too; a
    `Zeros`."""
    return host_tensor(shape, dtype, pin=like.is_cuda or like.is_pinned()).zero_()


def state_like(parameter: Tensor, dtype: torch.dtype, *, block: int = 1, zeros: Zeros = zeros_on_device) -> Tensor:
    """Create a state of zeros with the parameter's shape, mesh and placements.

    Args:
        block: entries of the last dimension that share one entry of the state.
        zeros: creates this rank's part.
    """

    def shape_of(tensor: Tensor) -> torch.Size:
        return tensor.shape if block == 1 else torch.Size((*tensor.shape[:-1], -(-tensor.shape[-1] // block)))

    part = local_tensor(parameter)
    state = zeros(shape_of(part), dtype, part)
    return wrap_local(state, parameter, shape_of(parameter)) if isinstance(parameter, DTensor) else state
