"""The order in which tokens travel to experts on other ranks and back: all at once, or in two chunks, so that the rows
of one travel while the experts compute the other.

Backward runs the same in reverse, because an `Exchange` sends its gradient where it was finished.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collectives import Exchange, exchange_rows
from glm46.compute.distributed.recomputation import recalled
from glm46.compute.model.dispatch import (
    Copy,
    Sum,
    pad_groups,
    pad_weights,
    sort_assignments,
)
from glm46.compute.model.router import Routing


class Planned(NamedTuple):
    """The way of one chunk, before the sizes of others are known."""

    numbers_RX: Tensor
    """int64: X numbers for each rank."""
    way: Any


class AllToAllDispatcher:
    """A `TokenDispatcher` over the ranks of a group: expert e is on rank e // (experts per rank).

    It sends a row for each expert of a token, all tokens at once or in two chunks. Rows dropped by padding or the
    capacity are not sent. Experts see the rows of a chunk in the order (expert, rank, token), so that results do not
    depend on timing.

    The steps of one chunk are below, in their order. Tensors of what they return are in tuples, where FSDP2 finds them.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int = 1):
        self._group, self._ranks, self._chunks = group, dist.get_world_size(group), chunks
        self.multiple = 1

    @torch.compiler.disable
    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> Any:
        """See `TokenDispatcher.start`. Collective."""
        parts = zip(self._split(routing.weights), self._split(routing.experts), strict=True)
        routings = [Routing(*part, None) for part in parts]
        planned = [self._plan(part, num_experts) for part in routings]
        own = [each.numbers_RX for each in planned]
        own_RCX = torch.stack(own, 1) if len(own) > 1 else own[0].unsqueeze(1)
        numbers_RCX, sizes = recalled(lambda: self._exchange(own_RCX))
        chunks = zip(self._split(x_TD), routings, planned, numbers_RCX.unbind(1), sizes, strict=True)
        return tuple(self._send(x, part, each.way, *of_chunk) for x, part, each, *of_chunk in chunks)

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        half = len(rows) // 2
        return rows.split((len(rows) - half, half)) if self._chunks > 1 else (rows,)

    def _exchange(self, own_RCX: Tensor) -> tuple[Tensor, list]:
        one_each = [1] * self._ranks
        numbers_RCX = exchange_rows(own_RCX, one_each, one_each, self._group)
        # sync: the sizes of the buffers must be known on the host; once per layer, for all chunks, and not again in a
        # recomputation.
        return numbers_RCX, self._sizes(own_RCX, numbers_RCX)

    @torch.compiler.disable
    def arrived(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `TokenDispatcher.arrived`; of the first chunk, for the experts of this rank. Collective."""
        first, *others = pending
        x_ND, weights_N, offsets, context = self._arrive(self._pass_on(first))
        return x_ND, weights_N, offsets, (context, others, [])

    def rest(self, context: Any) -> tuple:
        """See `TokenDispatcher.rest`."""
        return (self, context) if context[1] else ()

    @torch.compiler.disable
    def halfway(self, in_flight: Any) -> Any:
        """Move rows from one link to the other, between two products of another chunk. Collective."""
        context, others, returning = in_flight
        passed = [self._pass_on(each) for each in others[:1]]
        returned = [self._pass_back(each) for each in returning[-1:]]
        return context, passed + others[1:], returning[:-1] + returned

    @torch.compiler.disable
    def proceed(self, y_ND: Tensor, in_flight: Any, experts: Callable) -> Any:
        """Send a chunk back, and let the experts compute the next one while it travels. Collective."""
        context, others, returning = in_flight
        returning = [*returning, self._send_back(y_ND, context)]
        if not others:
            return *returning[:-1], self._pass_back(returning[-1])
        *rows, context = self._arrive(others[0])
        return experts(*rows, self, (context, others[1:], returning))

    @torch.compiler.disable
    def combine(self, y: Any, context: Any) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        context, others, _ = context
        if not others:
            return self._finish(self._pass_back(self._send_back(y, context)))
        return torch.cat([self._finish(each) for each in y])

    def _plan(self, routing: Routing, num_experts: int) -> Planned:
        # Weight 0: dropped by padding or the capacity. Such assignments are sorted after all experts.
        expert_N = torch.where(routing.weights > 0, routing.experts, num_experts).flatten()
        order_N, place_N, sizes_E = sort_assignments(expert_N, num_experts + 1)
        return Planned(sizes_E[:num_experts].view(self._ranks, -1), (order_N, place_N.view_as(routing.experts)))

    def _sizes(self, own_RCX: Tensor, numbers_RCX: Tensor) -> list:
        """Sizes of the buffers of each chunk, here of rows to each rank and from each, by the numbers of this rank and
        those that others have for it. Waits for the device."""
        of_both = torch.stack([own_RCX.sum(2), numbers_RCX.sum(2)]).cpu()
        return [part.tolist() for part in of_both.unbind(2)]

    def _send(self, x_TD: Tensor, routing: Routing, way: Any, numbers_RX: Tensor, sizes: Any) -> Any:
        (order_N, place_TA), (send, receive) = way, sizes
        order_N = order_N[: sum(send)]
        token_N = order_N // place_TA.shape[1]
        exchanges = tuple(Exchange(send, receive, self._group) for _ in range(2))
        of_rows = Copy.apply(x_TD, token_N, place_TA, None), routing.weights.flatten()[order_N]
        in_flight = tuple(exchange.start(each) for exchange, each in zip(exchanges, of_rows, strict=True))
        return in_flight, exchanges, numbers_RX, (token_N, place_TA)

    def _pass_on(self, pending: Any) -> Any:
        return pending  # rows that came from another host go on to the ranks of this one

    def _arrive(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        (x, weights), (rows, of_weights), received_RE, tokens = pending
        # Rows arrive in the order (rank, expert); a stable sort by expert gives (expert, rank).
        num_experts = received_RE.shape[1]
        expert_M = torch.arange(num_experts, device=received_RE.device).repeat(self._ranks)
        expert_M = expert_M.repeat_interleave(received_RE.flatten(), output_size=sum(rows.receive))
        by_expert_M, place_M, sizes_E = sort_assignments(expert_M, num_experts)
        offsets, weights_M = sizes_E.cumsum(0).to(torch.int32), of_weights.finish(weights)[by_expert_M]
        if self.multiple > 1:
            row_P, padded_M, offsets = pad_groups(len(by_expert_M), offsets, self.multiple)
            weights_M = pad_weights(weights_M, padded_M, len(row_P))
            by_expert_M, place_M = by_expert_M[row_P], padded_M[place_M]
        context = by_expert_M, place_M, rows.send, rows.receive, tokens
        return Copy.apply(rows.finish(x), by_expert_M, place_M, None), weights_M, offsets, context

    def _send_back(self, y_ND: Tensor, context: Any) -> Any:
        by_expert_M, place_M, send, receive, tokens = context
        back = Exchange(receive, send, self._group, "back")
        return back.start(Sum.apply(y_ND, by_expert_M, place_M, None)), back, tokens

    def _pass_back(self, returning: Any) -> Any:
        return returning  # the results of this host go back to another one

    def _finish(self, returning: Any) -> Tensor:
        in_flight, back, tokens = returning
        return Sum.apply(back.finish(in_flight), *tokens, None)
