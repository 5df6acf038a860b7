"""Exchange of tokens between experts in two levels: a token travels once to each host, and there once to each rank.

Its copies for several experts of a rank are made on that rank. On the way back each rank sums what its experts computed
of a token, then each host, then the token's own rank. An all-to-all sends a row for each of a token's experts instead.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collectives import Exchange
from glm46.compute.distributed.recomputation import Part
from glm46.compute.model.dispatch import Copy, Sum, pad_groups, pad_weights, sort_assignments
from glm46.compute.model.router import Routing
from glm46.compute.parallelize.exchange import AllToAllDispatcher, Planned


class Copies(NamedTuple):
    """Rows [R, ...] that are each copied to some of N places."""

    row_N: Tensor
    """int64: the row at each place."""
    place_M: Tensor
    """int64: the places of row 0, then those of row 1, and so on; without places of padding."""
    first_R: Tensor
    """int64: where the places of each row begin in `place_M`."""


class _Hop(NamedTuple):
    """One exchange of rows: copies by rank of a group, and the numbers of rows to and from each."""

    copies: Copies
    send: list[int]
    receive: list[int]
    group: dist.ProcessGroup

    def start(self, x: Tensor, weights: Tensor, experts: Tensor, part: Part) -> "_InFlight":
        """Send rows with all their weights and experts. The small ones go first: the next hop is planned by them."""
        exchanges = tuple(Exchange(self.send, self.receive, self.group, each) for each in ("rows", part, part))
        copied = (Copy.apply(each, *self.copies) for each in (experts, weights, x))
        sent = tuple(exchange.start(each) for exchange, each in zip(exchanges, copied, strict=True))
        return _InFlight(sent, exchanges)

    def start_back(self, y: Tensor) -> "_InFlight":
        """Return rows to where they came from."""
        back = Exchange(self.receive, self.send, self.group, "back")
        return _InFlight((back.start(y),), (back,))

    def finish_back(self, returning: "_InFlight") -> Tensor:
        """Sum what came back of each row."""
        return Sum.apply(returning.finish(0), *self.copies)


class _InFlight(NamedTuple):
    """Exchanges that have begun."""

    sent: tuple[Tensor, ...]
    exchanges: tuple[Exchange, ...]

    def finish(self, number: int) -> Tensor:
        """Wait for one of them."""
        return self.exchanges[number].finish(self.sent[number])


class _Sizes(NamedTuple):
    """Numbers of rows of this rank, known on the host."""

    between_hosts: tuple[list[int], list[int]]
    """To each host, and from each."""
    in_host: tuple[list[int], list[int]]
    """To each rank of this host, and from each."""
    assigned: int
    """Assignments to the experts of this rank."""


class TwoLevelDispatcher(AllToAllDispatcher):
    """Sends a row to each host of a token's experts, and there to each rank: rank r is on host r // (ranks per host).

    Experts see the rows that `AllToAllDispatcher` gives them, in the same order, so that their gradients are equal bit
    for bit. Sums of a token's experts are rounded to the compute type on each rank, on each host, and once more.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        between_hosts: dist.ProcessGroup | None,
        in_host: dist.ProcessGroup,
        chunks: int = 1,
    ):
        """``between_hosts``: the ranks with one number on their hosts; None for one host. ``in_host``: the ranks of a
        host, which follow each other in `group`."""
        super().__init__(group, chunks)
        self._in_host, self._between = in_host, between_hosts
        self._of_host = dist.get_world_size(in_host)
        self._hosts = self._ranks // self._of_host
        self._host, self._local = divmod(dist.get_rank(group), self._of_host)

    def _plan(self, routing: Routing, num_experts: int) -> Planned:
        # Weight 0: dropped by padding or the capacity. The rank of such an assignment is none of the group.
        experts_TA = torch.where(routing.weights > 0, routing.experts, num_experts)
        ranks_TA = experts_TA // (num_experts // self._ranks)
        goes_TR = _marked(ranks_TA, self._ranks)
        goes_TH = goes_TR.view(-1, self._hosts, self._of_host).any(2)
        assigned_R = torch.zeros(self._ranks + 1, dtype=torch.int64, device=experts_TA.device)
        assigned_R.scatter_add_(0, ranks_TA.flatten(), torch.ones_like(ranks_TA.flatten()))
        own = torch.cat([goes_TH.sum(0), goes_TR.sum(0), assigned_R[:-1]])
        way = experts_TA, goes_TR if self._between is None else goes_TH, num_experts // self._ranks
        return Planned(own.expand(self._ranks, -1), way)

    def _sizes(self, own_RCX: Tensor, numbers_RCX: Tensor) -> list:
        return [self._sizes_of(numbers_RX) for numbers_RX in numbers_RCX.cpu().unbind(1)]

    def _sizes_of(self, counts_RX: Tensor) -> "_Sizes":
        """``counts_RX``: the counts of `_plan`, of each rank; on the CPU."""
        parts = counts_RX.view(self._hosts, self._of_host, -1).split([self._hosts, self._ranks, self._ranks], 2)
        by_host, by_rank, assigned = parts[0], *(part.unflatten(2, (self._hosts, -1)) for part in parts[1:])
        # What ranks with the same number on their hosts send to this host goes through the one that is here.
        in_host = by_rank[:, :, self._host].sum(0)
        return _Sizes(
            (by_host[self._host, self._local].tolist(), by_host[:, self._local, self._host].tolist()),
            (in_host[self._local].tolist(), in_host[:, self._local].tolist()),
            int(assigned[:, :, self._host, self._local].sum()),
        )

    def _send(self, x_TD: Tensor, routing: Routing, way: Any, numbers_RX: Tensor, sizes: Any) -> Any:
        experts_TA, goes_TP, experts_here = way
        is_last = self._between is None or self._of_host == 1
        group, (send, receive) = self._in_host, sizes.in_host
        if self._between is not None:
            group, (send, receive) = self._between, sizes.between_hosts
        hop = _Hop(_copies(goes_TP, sum(send)), send, receive, group)
        part: Part = "rows" if is_last else "first hop"
        in_flight = hop.start(x_TD, routing.weights, experts_TA.to(torch.int32), part)
        from_rank_R = numbers_RX[:, self._hosts + self._host * self._of_host + self._local]
        return in_flight, (hop,), sizes, from_rank_R, experts_here

    def _pass_on(self, pending: Any) -> Any:
        in_flight, hops, sizes, from_rank_R, experts_here = pending
        if self._between is None or self._of_host == 1:
            return pending
        experts_MA = in_flight.finish(0)
        of_host_MA = experts_MA.long() // experts_here - self._host * self._of_host
        goes_MR = _marked(of_host_MA.masked_fill(of_host_MA < 0, self._of_host), self._of_host)
        send, receive = sizes.in_host
        hop = _Hop(_copies(goes_MR, sum(send)), send, receive, self._in_host)
        in_flight = hop.start(in_flight.finish(2), in_flight.finish(1), experts_MA, "rows")
        return in_flight, (*hops, hop), sizes, from_rank_R, experts_here

    def _arrive(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        in_flight, hops, sizes, from_rank_R, experts_here = pending
        keys = self._keys(in_flight.finish(0).long(), from_rank_R, experts_here)
        places = place_at_experts(*keys, experts_here, self._ranks, sizes.assigned)
        weights_MA, x_MD = in_flight.finish(1), in_flight.finish(2)
        x_ND, weights_N, offsets, copies = copy_to_experts(x_MD, weights_MA, *places, self.multiple)
        return x_ND, weights_N, offsets, (copies, hops)

    def _send_back(self, y_ND: Tensor, context: Any) -> Any:
        copies, hops = context
        return hops[-1].start_back(Sum.apply(y_ND, *copies)), hops

    def _pass_back(self, returning: Any) -> Any:
        in_flight, hops = returning
        if len(hops) == 1:
            return returning
        return hops[0].start_back(hops[1].finish_back(in_flight)), hops[:1]

    def _finish(self, returning: Any) -> Tensor:
        in_flight, (hop,) = returning
        return hop.finish_back(in_flight)

    def _keys(self, experts_MA: Tensor, from_rank_R: Tensor, experts_here: int) -> tuple[Tensor, Tensor]:
        """Keys of assignments, by expert of this rank, then by the rank they come from; and those that are here."""
        local_MA = experts_MA - experts_here * (self._host * self._of_host + self._local)
        is_here_MA = (local_MA >= 0) & (local_MA < experts_here)
        # Rows came by the number of their rank on its host, then by host.
        rank_R = torch.arange(self._ranks, device=experts_MA.device).view(self._hosts, self._of_host).t().flatten()
        rank_M = rank_R.repeat_interleave(from_rank_R[rank_R], output_size=len(experts_MA))
        return local_MA * self._ranks + rank_M.unsqueeze(1), is_here_MA


def place_at_experts(
    key_MA: Tensor, is_here_MA: Tensor, experts: int, parts: int, total: int
) -> tuple[Copies, Tensor, Tensor]:
    """Places of the rows on this rank at its experts.

    Args:
        key_MA: int64: expert * parts + part of each assignment, by which they are sorted.
        is_here_MA: False for assignments to other ranks, whose key is not read.
        total: assignments to this rank.

    Returns:
        Copies of the rows, the assignment at each place, and the offsets of the experts.
    """
    key_MA = torch.where(is_here_MA, key_MA, experts * parts)
    order_N, place_N, sizes = sort_assignments(key_MA.flatten(), experts * parts + 1)
    order_N, offsets = order_N[:total], sizes[:-1].view(experts, -1).sum(1).cumsum(0).to(torch.int32)
    copies = Copies(order_N // key_MA.shape[1], _kept(place_N, is_here_MA.flatten(), total), _begins(is_here_MA))
    return copies, order_N, offsets


def copy_to_experts(
    x_MD: Tensor, weights_MA: Tensor, copies: Copies, order_N: Tensor, offsets: Tensor, multiple: int
) -> tuple[Tensor, Tensor, Tensor, Copies]:
    """Rows, weights and offsets as of `TokenDispatcher.arrived`, and the copies with those of padding."""
    weights_N = weights_MA.flatten()[order_N]
    if multiple > 1:
        row_P, padded_N, offsets = pad_groups(len(order_N), offsets, multiple)
        weights_N = pad_weights(weights_N, padded_N, len(row_P))
        copies = copies._replace(row_N=copies.row_N[row_P], place_M=padded_N[copies.place_M])
    return Copy.apply(x_MD, *copies), weights_N, offsets, copies


def _marked(numbers_MA: Tensor, count: int) -> Tensor:
    """Boolean [M, count]: the numbers that each row has; ``count`` stands for none."""
    marks = torch.zeros(len(numbers_MA), count + 1, dtype=torch.bool, device=numbers_MA.device)
    return marks.scatter_(1, numbers_MA.clamp(max=count), True)[:, :count]


def _copies(goes_RP: Tensor, total: int) -> Copies:
    """Copies of rows to the places where they go: first all rows of the first place, and so on; ``total`` of them."""
    rows, places = goes_RP.shape
    goes_PR = goes_RP.t().reshape(-1)
    row_N = _kept(torch.arange(rows, device=goes_RP.device).repeat(places), goes_PR, total)
    number_RP = (goes_PR.cumsum(0) - 1).view(places, rows).t()
    return Copies(row_N, _kept(number_RP.reshape(-1), goes_RP.reshape(-1), total), _begins(goes_RP))


def _begins(goes_RP: Tensor) -> Tensor:
    """The beginning of the places of each row in a list of all."""
    count_R = goes_RP.sum(1)
    return count_R.cumsum(0) - count_R


def _kept(values: Tensor, is_kept: Tensor, total: int) -> Tensor:
    """The ``total`` values that are kept, in order, without asking the device for their number."""
    place = torch.where(is_kept, is_kept.cumsum(0) - 1, total)
    return values.new_empty(total + 1).scatter_(0, place, values)[:total]
