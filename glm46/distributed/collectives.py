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
