"""Named tensors that share one all-reduce, or one copy to the host."""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_all_ranks(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum tensors over all ranks in one all-reduce. Collective.

    Args:
        named: tensors of one dtype on one device. Names, their order and shapes are equal on all ranks.

    Returns:
        The sums by name; views of one new tensor.
    """
    flat = _pack(named)
    dist.all_reduce(flat)
    return _unpack(flat, named)


def to_host(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors of one dtype to the CPU in one transfer; waits for the device."""
    return _unpack(_pack(named).cpu(), named)


def _pack(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in named.values()])


def _unpack(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}
