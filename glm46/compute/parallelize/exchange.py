"""Sends tokens to experts on other ranks and back: all at once, or in two chunks, so that the rows of one travel while
the experts compute the other.

Backward runs the same in reverse, because an `Exchange` sends its gradient where it was finished.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collectives import Exchange, exchange_rows
from glm46.compute.distributed.recomputation import recalled
from glm46.compute.model.dispatch import (
    ArrivedRows,
    Copies,
    ExpertProducts,
    pad_groups,
    pad_weights,
    sort_assignments,
)
from glm46.compute.model.router import Routing

# Records that cross the call of the experts are named tuples: FSDP2 finds tensors in tuples, not in other objects.


class HopSizes(NamedTuple):
    """Numbers of rows of one exchange, known on the host."""

    send: list[int]
    """Rows to each rank of the group."""
    receive: list[int]
    """Rows from each rank of the group."""


class InFlight(NamedTuple):
    """Exchanges that have started."""

    sent: tuple[Tensor, ...]
    exchanges: tuple[Exchange, ...]

    def finish(self, number: int) -> Tensor:
        """Wait for one of the exchanges."""
        return self.exchanges[number].finish(self.sent[number])


class Hop(NamedTuple):
    """One exchange of rows between the ranks of a group."""

    copies: Copies
    """Copies of this rank's rows, in the order of the ranks that get them."""
    sizes: HopSizes
    group: dist.ProcessGroup

    def start_back(self, y: Tensor) -> InFlight:
        """Return rows to the ranks that they came from. Collective."""
        back = Exchange(self.sizes.receive, self.sizes.send, self.group, "back")
        return InFlight((back.start(y),), (back,))

    def finish_back(self, in_flight: InFlight) -> Tensor:
        """Sum the returned copies of each row."""
        return self.copies.sum_rows(in_flight.finish(0))


class ArrivedChunk(NamedTuple):
    """The way back of a chunk that has arrived at its experts."""

    copies: Copies
    """Copies of the received rows for the experts."""
    hops: tuple[Hop, ...]
    """The exchanges that brought the rows, the last one at the end."""


class ReturningChunk(NamedTuple):
    """A chunk on its way back."""

    in_flight: InFlight
    hops: tuple[Hop, ...]
    """The exchanges that remain, the one in flight at the end."""


class _HasNumbers(Protocol):
    @property
    def numbers_RX(self) -> Tensor:
        """int64 [R, X]: X numbers for each rank of the group."""


Planned = TypeVar("Planned", bound=_HasNumbers)
"""Routing of a chunk, before the ranks know each other's sizes."""
Sizes = TypeVar("Sizes")
"""Numbers of rows of a chunk, known on the host."""
SentChunk = TypeVar("SentChunk", bound=tuple)
"""A chunk on its way to the experts: a named tuple."""


class ExchangeDispatcher(ABC, Generic[Planned, Sizes, SentChunk]):
    """A `TokenDispatcher` over the ranks of a group: expert e is on rank e // (experts per rank).

    A chunk passes the stages `send`, `pass_on`, `arrive`, then the experts, then `send_back`, `pass_back`, `finish`.
    Rows dropped by padding or the capacity are not sent. Experts see the rows of a chunk in the order (expert, rank,
    token), so that results do not depend on timing.

    Args:
        chunks: 1, or 2 to overlap the exchange of one half of the tokens with the experts of the other half.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int = 1):
        self._group = group
        self._ranks = dist.get_world_size(group)
        self.chunks = chunks
        self.multiple = 1

    @torch.compiler.disable
    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> tuple[SentChunk, ...]:
        """See `TokenDispatcher.start`. Collective."""
        halves = zip(self._split(routing.weights), self._split(routing.experts), strict=True)
        routings = [Routing(weights, experts, None) for weights, experts in halves]
        plans = [self.plan(part, num_experts) for part in routings]
        numbers = [plan.numbers_RX for plan in plans]
        local_RCX = torch.stack(numbers, 1) if len(numbers) > 1 else numbers[0].unsqueeze(1)
        numbers_RCX, sizes = recalled(lambda: self._exchange_numbers(local_RCX))
        chunks = zip(self._split(x_TD), routings, plans, numbers_RCX.unbind(1), sizes, strict=True)
        return tuple(self.send(*chunk) for chunk in chunks)

    @torch.compiler.disable
    def arrived(self, sent: tuple[SentChunk, ...]) -> tuple[ArrivedRows, ArrivedChunk, "TwoChunks | None"]:
        """See `TokenDispatcher.arrived`; the rows are those of the first chunk. Collective."""
        rows, first = self.arrive(self.pass_on(sent[0]))
        return rows, first, TwoChunks(self, first, sent[1]) if len(sent) > 1 else None

    @torch.compiler.disable
    def combine(self, results: Tensor | tuple[ReturningChunk, ...], way: ArrivedChunk) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        if isinstance(results, Tensor):
            return self.finish(self.pass_back(self.send_back(results, way)))
        return torch.cat([self.finish(returning) for returning in results])

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        half = len(rows) // 2
        return rows.split((len(rows) - half, half)) if self.chunks > 1 else (rows,)

    def _exchange_numbers(self, local_RCX: Tensor) -> tuple[Tensor, list[Sizes]]:
        one_row_each = [1] * self._ranks
        numbers_RCX = exchange_rows(local_RCX, one_row_each, one_row_each, self._group)
        # sync: the sizes of the buffers must be known on the host; once per layer, for all chunks, and not again in a
        # recomputation.
        return numbers_RCX, self.sizes(local_RCX, numbers_RCX)

    @abstractmethod
    def plan(self, routing: Routing, num_experts: int) -> Planned:
        """Sort the assignments of a chunk, and count what other ranks must know."""

    @abstractmethod
    def sizes(self, local_RCX: Tensor, numbers_RCX: Tensor) -> list[Sizes]:
        """Return the numbers of rows of each of C chunks, from the numbers of this rank and those that the others sent
        to it. Waits for the device."""

    @abstractmethod
    def send(self, x_TD: Tensor, routing: Routing, plan: Planned, numbers_RX: Tensor, sizes: Sizes) -> SentChunk:
        """Start the first exchange. Collective."""

    @abstractmethod
    def pass_on(self, sent: SentChunk) -> SentChunk:
        """Send rows that came from another host on to the ranks of this one. Collective."""

    @abstractmethod
    def arrive(self, sent: SentChunk) -> tuple[ArrivedRows, ArrivedChunk]:
        """Wait for the last exchange and sort the rows by expert."""

    def send_back(self, y_ND: Tensor, chunk: ArrivedChunk) -> ReturningChunk:
        """Start to return results. Collective."""
        in_flight = chunk.hops[-1].start_back(chunk.copies.sum_rows(y_ND))
        return ReturningChunk(in_flight, chunk.hops)

    def pass_back(self, returning: ReturningChunk) -> ReturningChunk:
        """Send the results of this host back to the one that its rows came from. Collective."""
        if len(returning.hops) == 1:
            return returning
        first, last = returning.hops
        return ReturningChunk(first.start_back(last.finish_back(returning.in_flight)), (first,))

    def finish(self, returning: ReturningChunk) -> Tensor:
        """Wait for the results and sum those of each token."""
        (hop,) = returning.hops
        return hop.finish_back(returning.in_flight)


class TwoChunks(NamedTuple):
    """A `ChunkSchedule` of two chunks: the first has arrived, the second is on its way."""

    dispatcher: ExchangeDispatcher[Any, Any, Any]
    first: ArrivedChunk
    second: tuple

    def compute(self, experts: ExpertProducts, rows: ArrivedRows) -> tuple[ReturningChunk, ReturningChunk]:
        """See `ChunkSchedule.compute`. Collective.

        A chunk changes from the links between hosts to those inside a host, or back, between the two products of the
        other chunk.
        """
        dispatcher = self.dispatcher
        gate_up = experts.first_product(rows.x_ND, rows.offsets)
        sent = dispatcher.pass_on(self.second)
        y_ND = experts.second_product(gate_up, rows.weights_N, rows.offsets)
        first = dispatcher.send_back(y_ND, self.first)

        rows, arrived = dispatcher.arrive(sent)
        gate_up = experts.first_product(rows.x_ND, rows.offsets)
        first = dispatcher.pass_back(first)
        y_ND = experts.second_product(gate_up, rows.weights_N, rows.offsets)
        second = dispatcher.pass_back(dispatcher.send_back(y_ND, arrived))
        return first, second


class _PlannedRows(NamedTuple):
    """See `Planned`."""

    numbers_RX: Tensor
    """int64 [R, E / R]: rows for each expert."""
    order_N: Tensor
    """int64 [T * A]: assignments sorted by expert, dropped ones last."""
    place_TA: Tensor
    """int64: place of each assignment in this order."""


class _SentRows(NamedTuple):
    """See `SentChunk`."""

    in_flight: InFlight
    """Rows, and their weights."""
    hop: Hop
    received_RE: Tensor
    """int64: rows from each rank for each expert of this rank."""


class AllToAllDispatcher(ExchangeDispatcher[_PlannedRows, HopSizes, _SentRows]):
    """Sends a row for each expert of a token, in one exchange."""

    def plan(self, routing: Routing, num_experts: int) -> _PlannedRows:
        """See `ExchangeDispatcher.plan`."""
        # Weight 0: dropped by padding or the capacity. Such assignments are sorted after all experts.
        expert_N = torch.where(routing.weights > 0, routing.experts, num_experts).flatten()
        order_N, place_N, sizes_E = sort_assignments(expert_N, num_experts + 1)
        numbers_RX = sizes_E[:num_experts].view(self._ranks, -1)
        return _PlannedRows(numbers_RX, order_N, place_N.view_as(routing.experts))

    def sizes(self, local_RCX: Tensor, numbers_RCX: Tensor) -> list[HopSizes]:
        """See `ExchangeDispatcher.sizes`."""
        both_RC = torch.stack([local_RCX.sum(2), numbers_RCX.sum(2)]).cpu()
        return [HopSizes(*both_R.tolist()) for both_R in both_RC.unbind(2)]

    def send(
        self, x_TD: Tensor, routing: Routing, plan: _PlannedRows, numbers_RX: Tensor, sizes: HopSizes
    ) -> _SentRows:
        """See `ExchangeDispatcher.send`. Collective."""
        order_N = plan.order_N[: sum(sizes.send)]
        copies = Copies(order_N // plan.place_TA.shape[1], plan.place_TA)
        exchanges = tuple(Exchange(sizes.send, sizes.receive, self._group) for _ in range(2))
        rows_N = copies.copy_rows(x_TD)
        weights_N = routing.weights.flatten()[order_N]
        sent = exchanges[0].start(rows_N), exchanges[1].start(weights_N)
        return _SentRows(InFlight(sent, exchanges), Hop(copies, sizes, self._group), numbers_RX)

    def pass_on(self, sent: _SentRows) -> _SentRows:
        """See `ExchangeDispatcher.pass_on`; there is nothing to pass on."""
        return sent

    def arrive(self, sent: _SentRows) -> tuple[ArrivedRows, ArrivedChunk]:
        """See `ExchangeDispatcher.arrive`."""
        received_RE = sent.received_RE
        # Rows arrive in the order (rank, expert); a stable sort by expert gives (expert, rank).
        num_experts = received_RE.shape[1]
        expert_M = torch.arange(num_experts, device=received_RE.device).repeat(self._ranks)
        expert_M = expert_M.repeat_interleave(received_RE.flatten(), output_size=sum(sent.hop.sizes.receive))
        order_M, place_M, sizes_E = sort_assignments(expert_M, num_experts)
        offsets = sizes_E.cumsum(0).to(torch.int32)
        weights_M = sent.in_flight.finish(1)[order_M]
        if self.multiple > 1:
            row_P, padded_M, offsets = pad_groups(len(order_M), offsets, self.multiple)
            weights_M = pad_weights(weights_M, padded_M, len(row_P))
            order_M = order_M[row_P]
            place_M = padded_M[place_M]
        copies = Copies(order_M, place_M)
        rows = ArrivedRows(copies.copy_rows(sent.in_flight.finish(0)), weights_M, offsets)
        return rows, ArrivedChunk(copies, (sent.hop,))
