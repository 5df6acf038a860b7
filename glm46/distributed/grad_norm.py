"""One norm over all gradients, however they are sharded, and scaling by it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from glm46.distributed.local_tensor import local_tensor


@torch.no_grad()
def global_grad_norm(parameters: Iterable[nn.Parameter], pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """Euclidean norm over every element of every gradient, each counted once; FP32 scalar, the same on all ranks.

    Squares are summed locally per set of mesh axes that shard a parameter, then over just those axes: an axis that
    holds copies adds nothing. Every rank of a mesh must call it with parameters of the same shardings.

    Args:
        pipeline: the ranks that hold other parameters.
    """
    squares: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            axes = tuple(i for i, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate))
            key, gradient = (gradient.device_mesh, axes), gradient.to_local()
        else:
            key = (None, ())
        if gradient is not None:
            squares.setdefault(key, []).append(gradient)
    total = None
    for (mesh, axes), gradients in squares.items():
        square = torch.nn.utils.get_total_norm(gradients).float().square()
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        total = square if total is None else total + square
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by `factor`, a scalar on the gradients' device; no synchronisation with the host."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(factor)
