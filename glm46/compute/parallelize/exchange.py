"""Sends tokens to experts on other ranks and back: all at once, or in two chunks, so that the rows of one travel while
the experts compute the other. The mixture-of-experts layer calls it as its `TokenDispatcher`.

Backward runs the same in reverse, because the backward of `Exchange.finish` starts sending the gradient.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compat import uncompiled
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
    """Rows that travel."""

    exchange: Exchange
    unread: Tensor
    """Result of `Exchange.start`."""

    def finish(self) -> Tensor:
        """Wait for the rows of the other ranks."""
        return self.exchange.finish(self.unread)


def start_exchange(exchange: Exchange, rows: Tensor) -> InFlight:
    """Send rows. Collective."""
    return InFlight(exchange, exchange.start(rows))


class Hop(NamedTuple):
    """One exchange of rows between the ranks of a group."""

    copies: Copies
    """Copies of this rank's rows, in the order of the ranks that get them."""
    sizes: HopSizes
    group: dist.ProcessGroup

    def start_back(self, y: Tensor) -> InFlight:
        """Return rows to the ranks that they came from. Collective."""
        return start_exchange(Exchange(self.sizes.receive, self.sizes.send, self.group, "back"), y)

    def finish_back(self, in_flight: InFlight) -> Tensor:
        """Sum the returned copies of each row."""
        return self.copies.sum_rows(in_flight.finish())


class ReturnPath(NamedTuple):
    """The way back for the results of a chunk whose rows have arrived at their experts."""

    copies: Copies
    """Copies of the received rows for the experts."""
    hops: tuple[Hop, ...]
    """The exchanges that brought the rows, the last one at the end."""


class ReturningChunk(NamedTuple):
    """A chunk on its way back."""

    in_flight: InFlight
    hops: tuple[Hop, ...]
    """The exchanges that remain, the one in flight at the end."""


class _HasCounts(Protocol):
    @property
    def counts_RX(self) -> Tensor:
        """int64 [R, X]: X counts for each rank of the group, from which it computes its `Sizes`: the rows for each of
        its experts, or what two levels need."""


Planned = TypeVar("Planned", bound=_HasCounts)
"""Routing of a chunk, before the ranks know each other's sizes."""
Sizes = TypeVar("Sizes")
"""Numbers of rows of a chunk, known on the host."""
SentChunk = TypeVar("SentChunk", bound=tuple[object, ...])
"""A chunk on its way to the experts: a named tuple."""


class ExchangeDispatcher(ABC, Generic[Planned, Sizes, SentChunk]):
    """A `TokenDispatcher` over the ranks of a group: expert e is on rank e // (experts per rank).

    A chunk passes the stages `send`, `pass_on`, `arrive`, then the experts, then `send_back`, `pass_back`, `finish`.
    Rows dropped by padding or the capacity are not sent. Experts see the rows of a chunk in the order (expert, rank,
    token), so that results do not depend on timing.

    Tensors end in their dimensions: T tokens of a chunk, D hidden size, A experts of a token, R ranks of the group, C
    chunks, X counts, L experts of this rank, M rows that arrive at this rank, N rows at its experts.

    Args:
        chunks: 1, or 2 to overlap the exchange of one half of the tokens with the experts of the other half.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int = 1):
        self._group = group
        self._ranks = dist.get_world_size(group)
        self.chunks = chunks
        self.multiple = 1  # of rows of an expert; `float8` sets it

    # Not compiled, like all that exchanges: sizes are read on the host, and an `Exchange` keeps what is in transit.
    @uncompiled
    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> tuple[SentChunk, ...]:
        """See `TokenDispatcher.start`. Collective."""
        halves = zip(self._split(routing.weights), self._split(routing.experts), strict=True)
        routings = [Routing(weights, experts, None) for weights, experts in halves]
        plans = [self.plan(part, num_experts) for part in routings]
        counts = [plan.counts_RX for plan in plans]
        counts_RCX = torch.stack(counts, 1) if len(counts) > 1 else counts[0].unsqueeze(1)
        # A recomputation reuses the sizes of the forward.
        received_RCX, sizes = recalled(lambda: self._exchange_counts(counts_RCX))
        chunks = zip(self._split(x_TD), routings, plans, received_RCX.unbind(1), sizes, strict=True)
        return tuple(self.send(*chunk) for chunk in chunks)

    @uncompiled
    def arrived(self, sent: tuple[SentChunk, ...]) -> tuple[ArrivedRows, ReturnPath, "TwoChunks | None"]:
        """See `TokenDispatcher.arrived`. Collective.

        Returns:
            The rows of the first chunk, their way back, and the schedule of a second chunk, which still travels.
        """
        rows, first = self.arrive(self.pass_on(sent[0]))
        return rows, first, TwoChunks(self, first, sent[1]) if len(sent) > 1 else None

    @uncompiled
    def combine(self, results: Tensor | tuple[ReturningChunk, ...], way: ReturnPath) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        if isinstance(results, Tensor):
            return self.finish(self.pass_back(self.send_back(results, way)))
        return torch.cat([self.finish(returning) for returning in results])

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        if self.chunks == 1:
            return (rows,)
        half = len(rows) // 2
        halves: tuple[Tensor, ...] = rows.split((len(rows) - half, half))  # the first is longer by a row if odd
        return halves

    def _exchange_counts(self, counts_RCX: Tensor) -> tuple[Tensor, list[Sizes]]:
        one_row_each = [1] * self._ranks
        received_RCX = exchange_rows(counts_RCX, one_row_each, one_row_each, self._group)
        # sync: the sizes of the buffers must be known on the host; once per layer, for all chunks, and not again in a
        # recomputation.
        return received_RCX, self.sizes(counts_RCX, received_RCX)

    @abstractmethod
    def plan(self, routing: Routing, num_experts: int) -> Planned:
        """Sort the assignments of a chunk, and count what other ranks must know."""

    @abstractmethod
    def sizes(self, counts_RCX: Tensor, received_RCX: Tensor) -> list[Sizes]:
        """Return the numbers of rows of each chunk, from the counts of this rank for the others, and of the others for
        this rank. Waits for the device."""

    @abstractmethod
    def send(self, x_TD: Tensor, routing: Routing, plan: Planned, received_RX: Tensor, sizes: Sizes) -> SentChunk:
        """Start the first exchange. Collective.

        Args:
            received_RX: counts of the others for this rank.
        """

    @abstractmethod
    def pass_on(self, sent: SentChunk) -> SentChunk:
        """Send rows that came from another host on to the ranks of this one. Collective."""

    @abstractmethod
    def arrive(self, sent: SentChunk) -> tuple[ArrivedRows, ReturnPath]:
        """Wait for the last exchange and sort the rows by expert."""

    def send_back(self, y_ND: Tensor, path: ReturnPath) -> ReturningChunk:
        """Start to return results. Collective."""
        # For each row that arrived, one returns: the sum of its copies at the experts of this rank.
        result_MD = path.copies.sum_rows(y_ND)
        return ReturningChunk(path.hops[-1].start_back(result_MD), path.hops)

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
    first_path: ReturnPath
    second_sent: tuple[object, ...]

    def compute(self, experts: ExpertProducts, rows: ArrivedRows) -> tuple[ReturningChunk, ReturningChunk]:
        """See `ChunkSchedule.compute`. Collective.

        While one chunk is between its two products, the other is forwarded from the network between hosts to the links
        inside a host, or back.
        """
        dispatcher = self.dispatcher
        gate_up = experts.first_product(rows.x_ND, rows.offsets)
        sent = dispatcher.pass_on(self.second_sent)
        y_ND = experts.second_product(gate_up, rows.weights_N, rows.offsets)
        first = dispatcher.send_back(y_ND, self.first_path)

        rows, second_path = dispatcher.arrive(sent)
        gate_up = experts.first_product(rows.x_ND, rows.offsets)
        first = dispatcher.pass_back(first)
        y_ND = experts.second_product(gate_up, rows.weights_N, rows.offsets)
        second = dispatcher.pass_back(dispatcher.send_back(y_ND, second_path))
        return first, second


class _PlannedRows(NamedTuple):
    """See `Planned`."""

    counts_RX: Tensor
    """int64 [R, L]: rows for each expert of each rank."""
    order: Tensor
    """int64 [T * A]: assignments sorted by expert, dropped ones last."""
    place_TA: Tensor
    """int64: place of each assignment in this order."""


class _SentRows(NamedTuple):
    """See `SentChunk`."""

    rows: InFlight
    weights: InFlight
    hop: Hop
    received_RL: Tensor
    """int64: rows from each rank for each expert of this rank."""


class AllToAllDispatcher(ExchangeDispatcher[_PlannedRows, HopSizes, _SentRows]):
    """Sends a row for each expert of a token, in one exchange."""

    def plan(self, routing: Routing, num_experts: int) -> _PlannedRows:
        """See `ExchangeDispatcher.plan`."""
        # Weight 0: dropped by padding or the capacity. Such assignments are sorted after all experts.
        expert_TA = torch.where(routing.weights > 0, routing.experts, num_experts)
        order, place, sizes = sort_assignments(expert_TA.flatten(), num_experts + 1)
        counts_RX = sizes[:num_experts].view(self._ranks, -1)
        return _PlannedRows(counts_RX, order, place.view_as(routing.experts))

    def sizes(self, counts_RCX: Tensor, received_RCX: Tensor) -> list[HopSizes]:
        """See `ExchangeDispatcher.sizes`."""
        sent_and_received_2RC = torch.stack([counts_RCX.sum(2), received_RCX.sum(2)]).cpu()
        return [HopSizes(*sent_and_received_2R.tolist()) for sent_and_received_2R in sent_and_received_2RC.unbind(2)]

    def send(
        self, x_TD: Tensor, routing: Routing, plan: _PlannedRows, received_RX: Tensor, sizes: HopSizes
    ) -> _SentRows:
        """See `ExchangeDispatcher.send`. Collective."""
        # S: rows that this rank sends. Dropped assignments are last, and stay here.
        assignment_S = plan.order[: sum(sizes.send)]
        chosen_experts = plan.place_TA.shape[1]
        token_S = assignment_S // chosen_experts
        copies = Copies(token_S, plan.place_TA)
        x_SD = copies.copy_rows(x_TD)
        weights_S = routing.weights.flatten()[assignment_S]
        return _SentRows(
            rows=start_exchange(Exchange(sizes.send, sizes.receive, self._group), x_SD),
            weights=start_exchange(Exchange(sizes.send, sizes.receive, self._group), weights_S),
            hop=Hop(copies, sizes, self._group),
            received_RL=received_RX,
        )

    def pass_on(self, sent: _SentRows) -> _SentRows:
        """See `ExchangeDispatcher.pass_on`; there is nothing to pass on."""
        return sent

    def arrive(self, sent: _SentRows) -> tuple[ArrivedRows, ReturnPath]:
        """See `ExchangeDispatcher.arrive`."""
        received_RL = sent.received_RL
        local_experts = received_RL.shape[1]
        # Rows arrive in the order (rank, expert); a stable sort by expert gives (expert, rank).
        expert_of_count = torch.arange(local_experts, device=received_RL.device).repeat(self._ranks)
        expert_M = expert_of_count.repeat_interleave(received_RL.flatten(), output_size=sum(sent.hop.sizes.receive))
        row_N, place_M, sizes_L = sort_assignments(expert_M, local_experts)
        offsets = sizes_L.cumsum(0).to(torch.int32)
        weights_N = sent.weights.finish()[row_N]
        if self.multiple > 1:
            # Without padding N is M; P is N with padding.
            sorted_P, padded_N, offsets = pad_groups(len(row_N), offsets, self.multiple)
            weights_N = pad_weights(weights_N, padded_N, len(sorted_P))
            row_N = row_N[sorted_P]
            place_M = padded_N[place_M]
        copies = Copies(row_N, place_M)
        rows = ArrivedRows(copies.copy_rows(sent.rows.finish()), weights_N, offsets)
        return rows, ReturnPath(copies, (sent.hop,))
