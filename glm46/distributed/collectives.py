"""Collectives that gradients flow through."""

import torch
import torch.distributed as dist
from torch import Tensor


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        out = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


def exchange_rows(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive rows to each rank of a group and concatenate what they send; backward returns the gradients.

    Args:
        rows: [sum(send), ...]; the first send[0] rows go to the first rank, and so on.
        send: rows for each rank of the group.
        receive: rows from each rank of the group.

    Returns:
        [sum(receive), ...], in the order of the ranks.
    """
    return _ExchangeRows.apply(rows, send, receive, group)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        out = grad.clone()
        dist.all_reduce(out, group=ctx.group)
        return out, None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of `x` over a group. Backward sums too: every rank's result depends on every rank's `x`."""
    return _SumOverRanks.apply(x, group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ranks = group, dist.get_world_size(group)
        x = x.contiguous()
        out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x, group=group)
        return out.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ranks = dist.get_world_size(ctx.group)
        parts = grad.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        out = parts.new_empty(grad.shape[0], *parts.shape[1:])
        dist.reduce_scatter_tensor(out, parts, group=ctx.group)
        return out, None


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the parts of a sequence that the ranks of a group hold; backward sums what all ranks used of each.

    Args:
        x: [B, s, ...], equal in size on all ranks.

    Returns:
        [B, ranks * s, ...], in the order of the ranks.
    """
    return _GatherSequence.apply(x, group)
