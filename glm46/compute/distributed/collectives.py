"""Collectives that autograd differentiates."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from glm46 import compat
from glm46.compat import FunctionContext
from glm46.compute.distributed.recomputation import Part, leaves_out

_Collective = Callable[[Tensor], Tensor]


class _ExchangeContext(FunctionContext, Protocol):
    exchange: "Exchange"


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ExchangeContext, rows: Tensor, exchange: "Exchange") -> Tensor:
        ctx.exchange = exchange
        if exchange.is_left_out:
            return rows.new_empty(sum(exchange.receive), *rows.shape[1:])
        in_flight, exchange.work = compat.start_exchange(
            rows.contiguous(), exchange.receive, exchange.send, exchange.group, is_kept=exchange.part == "rows"
        )
        return in_flight

    @staticmethod
    def backward(ctx: _ExchangeContext, _: Tensor) -> tuple[Tensor | None, ...]:
        arriving_grad = ctx.exchange.returning
        ctx.exchange.returning = None
        assert arriving_grad is not None, "backward of `finish` has started it"
        return compat.wait_for_exchange(*arriving_grad), None


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ExchangeContext, in_flight: Tensor, exchange: "Exchange") -> Tensor:
        ctx.exchange = exchange
        if exchange.is_left_out:
            return in_flight.view_as(in_flight)
        # Drop the reference: the work holds the sent rows, and this exchange lives longer.
        work = exchange.work
        exchange.work = None
        return compat.wait_for_exchange(in_flight, work)

    @staticmethod
    def backward(ctx: _ExchangeContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        # The rows return: what was received is sent.
        exchange.returning = compat.start_exchange(grad.contiguous(), exchange.send, exchange.receive, exchange.group)
        return grad, None  # reaches only `_StartExchange`; autograd requires the shape of the received rows


class Exchange:
    """An asynchronous all-to-all of rows: consecutive rows go to each rank, and arrive in rank order. Used once.

    Other work can run between `start` and `finish`. In backward, the gradient is sent at the position of `finish` and
    awaited at the position of `start`.

    Args:
        send: rows for each rank of the group.
        receive: rows from each rank of the group.
        part: see `Part`. Selective checkpointing keeps the result of "rows"; the others need not be kept, because a
            recomputation may skip them (`recomputation`).
    """

    def __init__(self, send: list[int], receive: list[int], group: dist.ProcessGroup, part: Part = "rows"):
        self.send = send
        self.receive = receive
        self.group = group
        self.part = part
        self.is_left_out = leaves_out(part)
        """Whether the exchange is skipped; the rows that `finish` returns are then undefined."""
        self.work: dist.Work | None = None
        self.returning: compat.Arriving | None = None
        """In backward, the gradient of the rows of `start`, in transit."""

    def start(self, rows: Tensor) -> Tensor:
        """Send [sum(send), ...], the first send[0] rows to the first rank, and so on. The result, which `finish` takes,
        must not be read. Collective."""
        in_flight: Tensor = _StartExchange.apply(rows, self)
        return in_flight

    def finish(self, in_flight: Tensor) -> Tensor:
        """Wait for the rows of all ranks: [sum(receive), ...]."""
        received: Tensor = _FinishExchange.apply(in_flight, self)
        return received


class _CollectiveContext(FunctionContext, Protocol):
    gradient_collective: _Collective


class _Differentiable(torch.autograd.Function):
    """A collective whose backward is another collective; both are functions of a tensor."""

    @staticmethod
    def forward(ctx: _CollectiveContext, x: Tensor, forward: _Collective, backward: _Collective) -> Tensor:
        ctx.gradient_collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: _CollectiveContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient_collective(grad), None, None


def _differentiable(x: Tensor, forward: _Collective, backward: _Collective) -> Tensor:
    result: Tensor = _Differentiable.apply(x, forward, backward)
    return result


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


def exchange_rows(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows like `Exchange`, but blocking, and not kept by activation checkpointing. Collective.

    Args:
        rows: [sum(send), ...].

    Returns:
        [sum(receive), ...].
    """
    return _differentiable(
        rows,
        partial(_all_to_all, send=send, receive=receive, group=group),
        partial(_all_to_all, send=receive, receive=send, group=group),
    )


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return compat.sum_in_graph(x, group)
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of `x` over a group. Backward sums too: every rank's result depends on every rank's `x`. Collective."""
    return _differentiable(x, partial(_all_reduce, group=group), partial(_all_reduce, group=group))


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    out = part.new_empty(ranks * part.shape[0], *part.shape[1:])
    compat.gather_rows(out, part.contiguous(), group)
    parts: Tensor = out.unflatten(0, (ranks, -1)).transpose(0, 1)
    return parts.flatten(1, 2)  # [ranks, B, s, ...] to [B, ranks * s, ...]


def _sum_and_scatter(sequence: Tensor, group: dist.ProcessGroup) -> Tensor:
    # [B, ranks * s, ...] to [ranks * B, s, ...]: the part of each rank is contiguous.
    parts: Tensor = sequence.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).flatten(0, 1)
    out = parts.new_empty(sequence.shape[0], *parts.shape[1:])
    compat.scatter_row_sums(out, parts, group)
    return out


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the parts of a sequence over a group; backward sums the gradients of all ranks. Collective.

    Args:
        x: [B, s, ...], of equal shape on all ranks.

    Returns:
        [B, ranks * s, ...], in rank order.
    """
    if torch.compiler.is_compiling():
        return compat.gather_in_graph(x, 1, group)
    return _differentiable(x, partial(_gather, group=group), partial(_sum_and_scatter, group=group))


def whole_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Like `gather_sequence`, for an output from which every rank computes the same loss: each rank already has the
    full gradient, and backward takes this rank's part of it. Collective."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    return _differentiable(x, partial(_gather, group=group), lambda grad: grad.chunk(ranks, dim=1)[rank])


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` over a group and return this rank's part of the sequence; transpose of `gather_sequence`. Collective.

    Args:
        x: [B, ranks * s, ...].

    Returns:
        [B, s, ...].
    """
    if torch.compiler.is_compiling():
        return compat.scatter_sum_in_graph(x, 1, group)
    return _differentiable(x, partial(_sum_and_scatter, group=group), partial(_gather, group=group))
