"""Norm and scale of the gradients of a network."""

from collections.abc import Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from glm46.compat import multiply_in_place, norms_in_fp32
from glm46.compute.distributed.local_tensor import local_tensor

_ShardingAxes: TypeAlias = tuple[DeviceMesh | None, tuple[int, ...]]
"""A mesh and its axes that shard a tensor; (None, ()) if none does."""


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """Compute the Euclidean norm of all gradients, each element counted once. Collective.

    Parameters are grouped by the mesh axes that shard them. The squares of a group are summed locally, then over these
    axes only, so that replicas are counted once. Every rank of a mesh must pass parameters of the same shardings.

    Args:
        device: device of this rank; gradients may be in host memory instead.
        pipeline: ranks that hold other parameters.

    Returns:
        FP32 scalar, equal on all ranks of a mesh; replicas may differ in the last bits.
    """
    gradients_by_axes: dict[_ShardingAxes, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local_gradient, axes = _part_and_axes(parameter.grad)
            gradients_by_axes.setdefault(axes, []).append(local_gradient)
    total = torch.zeros((), device=device)  # a pipeline stage may have no trained parameters
    for (mesh, sharded_axes), gradients in gradients_by_axes.items():
        sum_of_squares = torch.linalg.vector_norm(torch.stack(norms_in_fp32(gradients))).square().to(device)
        for axis in sharded_axes:
            assert mesh is not None, "axes are those of a mesh"
            dist.all_reduce(sum_of_squares, group=mesh.get_group(axis))
        total += sum_of_squares
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def _part_and_axes(gradient: Tensor) -> tuple[Tensor, _ShardingAxes]:
    """Return this rank's part, and `_ShardingAxes` of the gradient."""
    if not isinstance(gradient, DTensor):
        return gradient, (None, ())
    mesh = gradient.device_mesh
    placements = gradient.placements
    axes = tuple(i for i, kind in enumerate(placements) if not isinstance(kind, Replicate) and mesh.size(i) > 1)
    # Parameters on a single rank are summed like ones without FSDP2: in the same order, to the same bits.
    return gradient.to_local(), (mesh, axes) if axes else (None, ())


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by `factor`, a scalar on the CPU, wherever the gradients are."""
    multiply_in_place([local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None], factor)
