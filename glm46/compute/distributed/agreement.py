"""Combine numbers of all ranks on the host, in a number of rounds that grows with the logarithm of the ranks.

gloo's all-reduce is a ring: each of its 2 (N - 1) messages waits for the previous one. That is right for large tensors.
For a few numbers before each step of thousands of ranks, it would take longer than the optimizer update that the GPUs
still compute, and they would wait.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.run.tree import neighbours

awaited: list[int] = []
"""Rank whose message this one waits for, if any: gloo's flight recorder does not record sends and receives."""


def combine_on_host(local: Tensor, combine: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """Combine the tensors of all ranks; the result is equal on all ranks bit for bit. Collective.

    Args:
        local: this rank's tensor, on the CPU, of equal shape and dtype on all ranks.
        combine: function of the results of lower and of higher ranks.

    Raises:
        RuntimeError: a rank has ended, or does not answer within the timeout of the group of all ranks.
    """
    parent, children = neighbours(dist.get_rank(), dist.get_world_size())
    # Post receives first: gloo sends immediately if the receiver is already waiting.
    child_parts = [torch.empty_like(local) for _ in children]
    receives = [dist.irecv(part, child) for child, part in zip(children, child_parts, strict=True)]
    combined = torch.empty_like(local)
    receive_combined = None if parent is None else dist.irecv(combined, parent)
    total = local
    for child, part, work in zip(children, child_parts, receives, strict=True):
        _wait(work, child)
        total = combine(total, part)
    sends = []
    if parent is not None:
        sends.append((parent, dist.isend(total, parent)))
        _wait(receive_combined, parent)
        total = combined
    sends += [(child, dist.isend(total, child)) for child in reversed(children)]
    for peer, work in sends:
        _wait(work, peer)
    return total


def _wait(work: dist.Work | None, peer: int) -> None:
    assert work is not None, "all ranks take part"
    awaited[:] = [peer]
    work.wait()
    awaited.clear()
