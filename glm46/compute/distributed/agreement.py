"""Numbers of all ranks, combined on the host in rounds whose count grows with the logarithm of the ranks.

gloo's all-reduce is a ring: each of its 2 (N - 1) messages waits for the one before it. That is right for large
tensors. A few numbers before each step of thousands of ranks would take longer than the optimizer that should hide
them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.run.tree import neighbours

awaited: list[int] = []
"""The rank whose message this one waits for, if any: gloo's flight recorder does not hold sends and receives."""


def combine_on_host(own: Tensor, combine: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """Combine the tensors of all ranks; the result is equal on all ranks bit for bit. Collective.

    Args:
        own: on the CPU, of equal shape and dtype on all ranks.
        combine: of the tensors of lower ranks and of higher ones.

    Raises:
        RuntimeError: a rank has ended, or does not answer within the timeout of the group of all ranks.
    """
    parent, children = neighbours(dist.get_rank(), dist.get_world_size())
    # Posted first: gloo sends at once what the other side already waits for.
    of_children = [torch.empty_like(own) for _ in children]
    arriving = [dist.irecv(part, child) for child, part in zip(children, of_children, strict=True)]
    of_all = torch.empty_like(own)
    answer = None if parent is None else dist.irecv(of_all, parent)
    total = own
    for child, part, work in zip(children, of_children, arriving, strict=True):
        _wait(work, child)
        total = combine(total, part)
    sent = []
    if parent is not None:
        sent.append((parent, dist.isend(total, parent)))
        _wait(answer, parent)
        total = of_all
    sent += [(child, dist.isend(total, child)) for child in reversed(children)]
    for peer, work in sent:
        _wait(work, peer)
    return total


def _wait(work: dist.Work | None, peer: int) -> None:
    assert work is not None, "all ranks take part"
    awaited[:] = [peer]
    work.wait()
    awaited.clear()
