"""Exchange of tokens between experts in two levels: a token travels once to each host, and there once to each rank.

Its copies for several experts of a rank are made on that rank. On the way back each rank sums what its experts computed
of a token, then each host, then the token's own rank. An all-to-all sends a row for each of a token's experts instead.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collectives import Exchange
from glm46.compute.distributed.recomputation import Part
from glm46.compute.model.dispatch import ArrivedRows, Copies, pad_groups, pad_weights, sort_assignments
from glm46.compute.model.router import Routing
from glm46.compute.parallelize.exchange import ExchangeDispatcher, Hop, HopSizes, InFlight, ReturnPath, start_exchange


class _Sizes(NamedTuple):
    """See `Sizes`."""

    between_hosts: HopSizes
    in_host: HopSizes
    assigned: int
    """Assignments to the experts of this rank."""


class _PlannedRows(NamedTuple):
    """See `Planned`."""

    counts_RX: Tensor
    """int64: rows of this rank to each host, to each rank, and assignments to each rank; equal for all R."""
    experts_TA: Tensor
    """int64; the number of experts where an assignment is dropped."""
    goes_TP: Tensor
    """Boolean: the hosts, or on one host the ranks, that get each token."""
    experts_per_rank: int


class _RowsInFlight(NamedTuple):
    """Rows with all their weights and experts, on their way to a host or a rank."""

    experts: InFlight
    weights: InFlight
    rows: InFlight


class _SentRows(NamedTuple):
    """See `SentChunk`."""

    in_flight: _RowsInFlight
    hops: tuple[Hop, ...]
    """Exchanges so far, the one in flight at the end."""
    sizes: _Sizes
    from_rank_R: Tensor
    """int64: rows from each rank for this one."""
    experts_per_rank: int


def _start_hop(hop: Hop, x: Tensor, weights: Tensor, experts: Tensor, part: Part) -> _RowsInFlight:
    """Send rows with all their weights and experts."""

    def start(rows: Tensor, part: Part) -> InFlight:
        return start_exchange(Exchange(*hop.sizes, hop.group, part), hop.copies.copy_rows(rows))

    # Experts go first: the next hop is planned by them. They are "rows" in every hop, because a recomputation that
    # skips the first hop must plan the second.
    return _RowsInFlight(start(experts, "rows"), start(weights, part), start(x, part))


class TwoLevelDispatcher(ExchangeDispatcher[_PlannedRows, _Sizes, _SentRows]):
    """Sends a row to each host of a token's experts, and there to each rank: rank r is on host r // (ranks per host).

    Experts see the rows that `AllToAllDispatcher` gives them, in the same order, so that their gradients are equal bit
    for bit. Sums of a token's experts are rounded to the compute type on each rank, on each host, and once more.

    Args:
        between_hosts: the ranks with one number on their hosts; None for one host.
        in_host: the ranks of a host, which follow each other in `group`.
        chunks: see `ExchangeDispatcher`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        between_hosts: dist.ProcessGroup | None,
        in_host: dist.ProcessGroup,
        chunks: int = 1,
    ):
        super().__init__(group, chunks)
        self._in_host = in_host
        self._between_hosts = between_hosts
        self._host_ranks = dist.get_world_size(in_host)
        self._hosts = self._ranks // self._host_ranks
        self._host, self._local = divmod(dist.get_rank(group), self._host_ranks)
        self._has_one_hop = between_hosts is None or self._host_ranks == 1

    def plan(self, routing: Routing, num_experts: int) -> _PlannedRows:
        """See `ExchangeDispatcher.plan`."""
        # Weight 0: dropped by padding or the capacity. Such an assignment gets a rank outside the group.
        experts_TA = torch.where(routing.weights > 0, routing.experts, num_experts)
        ranks_TA = experts_TA // (num_experts // self._ranks)
        goes_TR = _marked(ranks_TA, self._ranks)
        goes_TH = goes_TR.view(-1, self._hosts, self._host_ranks).any(2)
        assigned_R = torch.zeros(self._ranks + 1, dtype=torch.int64, device=experts_TA.device)
        assigned_R.scatter_add_(0, ranks_TA.flatten(), torch.ones_like(ranks_TA.flatten()))
        counts_X = torch.cat([goes_TH.sum(0), goes_TR.sum(0), assigned_R[:-1]])
        goes_TP = goes_TR if self._between_hosts is None else goes_TH
        return _PlannedRows(counts_X.expand(self._ranks, -1), experts_TA, goes_TP, num_experts // self._ranks)

    def sizes(self, counts_RCX: Tensor, received_RCX: Tensor) -> list[_Sizes]:
        """See `ExchangeDispatcher.sizes`."""
        return [self._chunk_sizes(received_RX) for received_RX in received_RCX.cpu().unbind(1)]

    def _chunk_sizes(self, received_RX: Tensor) -> _Sizes:
        """Return what this rank sends and receives. ``received_RX``: `_PlannedRows.counts_RX` of each rank, on the
        CPU."""
        # First the sender, as its host and its number there. Then the receiver: a host, or a rank, in the same form.
        received = received_RX.view(self._hosts, self._host_ranks, -1)
        to_host, to_rank, assigned = received.split([self._hosts, self._ranks, self._ranks], dim=2)
        to_rank = to_rank.unflatten(2, (self._hosts, self._host_ranks))
        assigned = assigned.unflatten(2, (self._hosts, self._host_ranks))
        between_hosts = HopSizes(
            send=to_host[self._host, self._local].tolist(), receive=to_host[:, self._local, self._host].tolist()
        )
        # Rows from all ranks with one number reach this host at its rank with that number, which passes them on.
        passed_on = to_rank[:, :, self._host].sum(0)
        in_host = HopSizes(send=passed_on[self._local].tolist(), receive=passed_on[:, self._local].tolist())
        return _Sizes(between_hosts, in_host, int(assigned[:, :, self._host, self._local].sum()))

    def send(self, x_TD: Tensor, routing: Routing, plan: _PlannedRows, received_RX: Tensor, sizes: _Sizes) -> _SentRows:
        """See `ExchangeDispatcher.send`. Collective."""
        group = self._in_host
        hop_sizes = sizes.in_host
        if self._between_hosts is not None:
            group = self._between_hosts
            hop_sizes = sizes.between_hosts
        hop = Hop(_copies(plan.goes_TP, sum(hop_sizes.send)), hop_sizes, group)
        part: Part = "rows" if self._has_one_hop else "first hop"
        in_flight = _start_hop(hop, x_TD, routing.weights, plan.experts_TA.to(torch.int32), part)
        from_rank_R = received_RX[:, self._hosts + self._host * self._host_ranks + self._local]
        return _SentRows(in_flight, (hop,), sizes, from_rank_R, plan.experts_per_rank)

    def pass_on(self, sent: _SentRows) -> _SentRows:
        """See `ExchangeDispatcher.pass_on`. Collective."""
        if self._has_one_hop:
            return sent
        experts_MA = sent.in_flight.experts.finish()
        local_rank_MA = experts_MA.long() // sent.experts_per_rank - self._host * self._host_ranks
        is_before_MA = local_rank_MA < 0  # on an earlier host; `_marked` ignores the larger numbers of later hosts
        goes_MR = _marked(local_rank_MA.masked_fill(is_before_MA, self._host_ranks), self._host_ranks)
        sizes = sent.sizes.in_host
        hop = Hop(_copies(goes_MR, sum(sizes.send)), sizes, self._in_host)
        weights_MA = sent.in_flight.weights.finish()
        in_flight = _start_hop(hop, sent.in_flight.rows.finish(), weights_MA, experts_MA, "rows")
        return sent._replace(in_flight=in_flight, hops=(*sent.hops, hop))

    def arrive(self, sent: _SentRows) -> tuple[ArrivedRows, ReturnPath]:
        """See `ExchangeDispatcher.arrive`."""
        key_MA, is_here_MA = self._keys(sent.in_flight.experts.finish().long(), sent.from_rank_R, sent.experts_per_rank)
        copies, order_N, offsets = place_at_experts(
            key_MA, is_here_MA, sent.experts_per_rank, self._ranks, sent.sizes.assigned
        )
        weights_MA = sent.in_flight.weights.finish()
        x_MD = sent.in_flight.rows.finish()
        rows, copies = copy_to_experts(x_MD, weights_MA, copies, order_N, offsets, self.multiple)
        return rows, ReturnPath(copies, sent.hops)

    def _keys(self, experts_MA: Tensor, from_rank_R: Tensor, experts_per_rank: int) -> tuple[Tensor, Tensor]:
        """Return sort keys of assignments, by expert of this rank, then by the rank that sent them; and which of them
        are for this rank."""
        first_expert = experts_per_rank * (self._host * self._host_ranks + self._local)
        local_MA = experts_MA - first_expert
        is_here_MA = (local_MA >= 0) & (local_MA < experts_per_rank)
        # Rows came by the number of their rank on its host, then by host.
        rank_R = torch.arange(self._ranks, device=experts_MA.device).view(self._hosts, self._host_ranks).t().flatten()
        rank_M = rank_R.repeat_interleave(from_rank_R[rank_R], output_size=len(experts_MA))
        return local_MA * self._ranks + rank_M.unsqueeze(1), is_here_MA


def place_at_experts(
    key_MA: Tensor, is_here_MA: Tensor, experts: int, parts: int, total: int
) -> tuple[Copies, Tensor, Tensor]:
    """Place the rows of this rank at its experts.

    Args:
        key_MA: int64: expert * parts + part of each assignment; assignments are sorted by it.
        is_here_MA: False for assignments to other ranks, whose key is not read.
        total: assignments to this rank.

    Returns:
        Copies of the rows, the assignment at each place, and the offsets of the experts.
    """
    key_MA = torch.where(is_here_MA, key_MA, experts * parts)
    order_N, place_N, sizes = sort_assignments(key_MA.flatten(), experts * parts + 1)
    order_N = order_N[:total]
    offsets = sizes[:-1].view(experts, -1).sum(1).cumsum(0).to(torch.int32)
    copies = Copies(order_N // key_MA.shape[1], _kept(place_N, is_here_MA.flatten(), total), _begins(is_here_MA))
    return copies, order_N, offsets


def copy_to_experts(
    x_MD: Tensor, weights_MA: Tensor, copies: Copies, order_N: Tensor, offsets: Tensor, multiple: int
) -> tuple[ArrivedRows, Copies]:
    """Copy rows to the experts; further arguments as `place_at_experts` returns them.

    Returns:
        The rows, and their copies with padding.
    """
    weights_N = weights_MA.flatten()[order_N]
    if multiple > 1:
        row_P, padded_N, offsets = pad_groups(len(order_N), offsets, multiple)
        weights_N = pad_weights(weights_N, padded_N, len(row_P))
        copies = copies._replace(row_N=copies.row_N[row_P], place=padded_N[copies.place])
    return ArrivedRows(copies.copy_rows(x_MD), weights_N, offsets), copies


def _marked(numbers_MA: Tensor, count: int) -> Tensor:
    """Return a boolean [M, count]: the numbers that each row has. Numbers of ``count`` or more are ignored."""
    marks = torch.zeros(len(numbers_MA), count + 1, dtype=torch.bool, device=numbers_MA.device)
    return marks.scatter_(1, numbers_MA.clamp(max=count), True)[:, :count]


def _copies(goes_RP: Tensor, total: int) -> Copies:
    """Return copies of rows for the places that they go to: first all rows of the first place, and so on.

    Args:
        goes_RP: boolean: the places of each row.
        total: number of copies.
    """
    rows, places = goes_RP.shape
    goes_PR = goes_RP.t().reshape(-1)
    row_N = _kept(torch.arange(rows, device=goes_RP.device).repeat(places), goes_PR, total)
    number_RP = (goes_PR.cumsum(0) - 1).view(places, rows).t()
    return Copies(row_N, _kept(number_RP.reshape(-1), goes_RP.reshape(-1), total), _begins(goes_RP))


def _begins(goes_RP: Tensor) -> Tensor:
    """Return where the places of each row begin in a list of all."""
    count_R = goes_RP.sum(1)
    return count_R.cumsum(0) - count_R


def _kept(values: Tensor, is_kept: Tensor, total: int) -> Tensor:
    """Return the ``total`` kept values in order, without asking the device for their number."""
    place = torch.where(is_kept, is_kept.cumsum(0) - 1, total)
    return values.new_empty(total + 1).scatter_(0, place, values)[:total]
