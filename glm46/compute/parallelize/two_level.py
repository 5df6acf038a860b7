"""Exchange of tokens between experts in two levels: a token travels once to each host, and there once to each rank.

Its copies for several experts of a rank are made on that rank. On the way back each rank sums what its experts computed
of a token, then each host, then the token's own rank. An all-to-all sends a row for each of a token's experts instead.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.distributed.collectives import Exchange, exchange_rows
from glm46.compute.model.dispatch import pad_groups, pad_weights, sort_assignments
from glm46.compute.model.router import Routing


class _Copies(NamedTuple):
    """Rows [R, ...] that are each copied to some of N places."""

    row_N: Tensor
    """int64: the row at each place."""
    place_M: Tensor
    """int64: the places of row 0, then those of row 1, and so on; without places of padding."""
    first_R: Tensor
    """int64: where the places of each row begin in `place_M`."""


class _Hop(NamedTuple):
    """One exchange of rows: copies by rank of a group, and the numbers of rows to and from each."""

    copies: _Copies
    send: list[int]
    receive: list[int]
    group: dist.ProcessGroup

    def start(self, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Exchange, ...]:
        """Send rows with all their weights and experts. The small ones go first: the next hop is planned by them."""
        return tuple(
            Exchange(_Copy.apply(each, *self.copies), self.send, self.receive, self.group)
            for each in (experts, weights, x)
        )

    def back(self, y: Tensor) -> Tensor:
        """Return rows to where they came from, and sum those of one row."""
        return _Sum.apply(exchange_rows(y, self.receive, self.send, self.group), *self.copies)


class _Sizes(NamedTuple):
    """Numbers of rows of this rank, known on the host."""

    between_hosts: tuple[list[int], list[int]]
    """To each host, and from each."""
    in_host: tuple[list[int], list[int]]
    """To each rank of this host, and from each."""
    assigned: int
    """Assignments to the experts of this rank."""


class _Copy(torch.autograd.Function):
    """The rows at their places. Backward sums the copies of a row in a fixed order, in FP32, and rounds once."""

    @staticmethod
    def forward(ctx, x: Tensor, row_N: Tensor, place_M: Tensor, first_R: Tensor) -> Tensor:
        ctx.save_for_backward(place_M, first_R)
        return x.index_select(0, row_N)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sum_copies(grad, *ctx.saved_tensors), None, None, None


class _Sum(torch.autograd.Function):
    """Transpose of `_Copy`. Its index is no saved tensor, for the reason given in `_Combine` of
    `compute/model/dispatch.py`."""

    @staticmethod
    def forward(ctx, y: Tensor, row_N: Tensor, place_M: Tensor, first_R: Tensor) -> Tensor:
        ctx.row_N = row_N
        return _sum_copies(y, place_M, first_R)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.row_N), None, None, None


def _sum_copies(y: Tensor, place_M: Tensor, first_R: Tensor) -> Tensor:
    if not len(place_M):
        return y.new_zeros(len(first_R), *y.shape[1:])
    return F.embedding_bag(place_M, y, first_R, mode="sum")  # FP32 inside


class TwoLevelDispatcher:
    """A `TokenDispatcher` over the ranks of a group: expert e is on rank e // (experts per rank), rank r on host
    r // (ranks per host).

    Rows dropped by padding or the capacity are not sent. Experts see the rows that `AllToAllDispatcher` gives them, in
    the same order (expert, rank, token), so that their gradients are equal bit for bit. Sums of a token's experts are
    rounded to the compute type on each rank, on each host, and once more.
    """

    def __init__(self, group: dist.ProcessGroup, between_hosts: dist.ProcessGroup | None, in_host: dist.ProcessGroup):
        """``between_hosts``: the ranks with one number on their hosts; None for one host. ``in_host``: the ranks of a
        host, which follow each other in `group`."""
        self._group, self._in_host, self._between = group, in_host, between_hosts
        self._ranks, self._of_host = dist.get_world_size(group), dist.get_world_size(in_host)
        self._hosts = self._ranks // self._of_host
        self._host, self._local = divmod(dist.get_rank(group), self._of_host)
        self.multiple = 1

    @torch.compiler.disable
    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> Any:
        """See `TokenDispatcher.start`. Collective."""
        # Weight 0: dropped by padding or the capacity. The rank of such an assignment is none of the group.
        experts_TA = torch.where(routing.weights > 0, routing.experts, num_experts)
        ranks_TA = experts_TA // (num_experts // self._ranks)
        goes_TR = _marked(ranks_TA, self._ranks)
        goes_TH = goes_TR.view(-1, self._hosts, self._of_host).any(2)
        assigned_R = torch.zeros(self._ranks + 1, dtype=torch.int64, device=x_TD.device)
        assigned_R.scatter_add_(0, ranks_TA.flatten(), torch.ones_like(ranks_TA.flatten()))
        own = torch.cat([goes_TH.sum(0), goes_TR.sum(0), assigned_R[:-1]])
        one_each = [1] * self._ranks
        counts_RX = Exchange(own.repeat(self._ranks, 1), one_each, one_each, self._group).finish()
        # sync: the sizes of all buffers must be known on the host; once per layer, for both levels and directions.
        sizes = self._sizes(counts_RX.cpu())
        from_rank_R = counts_RX[:, self._hosts + self._host * self._of_host + self._local]
        if self._between is not None:
            send, receive = sizes.between_hosts
            hop = _Hop(_copies(goes_TH, sum(send)), send, receive, self._between)
        else:
            send, receive = sizes.in_host
            hop = _Hop(_copies(goes_TR, sum(send)), send, receive, self._in_host)
        in_flight = hop.start(x_TD, routing.weights, experts_TA.to(torch.int32))
        return in_flight, hop, sizes, from_rank_R, num_experts // self._ranks

    def _sizes(self, counts_RX: Tensor) -> "_Sizes":
        """``counts_RX``: of each rank, its rows by host, its rows by rank and its assignments by rank; on the CPU."""
        parts = counts_RX.view(self._hosts, self._of_host, -1).split([self._hosts, self._ranks, self._ranks], 2)
        by_host, by_rank, assigned = parts[0], *(part.unflatten(2, (self._hosts, -1)) for part in parts[1:])
        # What ranks with the same number on their hosts send to this host goes through the one that is here.
        in_host = by_rank[:, :, self._host].sum(0)
        return _Sizes(
            (by_host[self._host, self._local].tolist(), by_host[:, self._local, self._host].tolist()),
            (in_host[self._local].tolist(), in_host[:, self._local].tolist()),
            int(assigned[:, :, self._host, self._local].sum()),
        )

    @torch.compiler.disable
    def arrived(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `TokenDispatcher.arrived`; offsets cover the experts of this rank. Collective."""
        in_flight, hop, sizes, from_rank_R, experts_here = pending
        hops = [hop]
        if self._between is not None and self._of_host > 1:
            experts, weights, x = in_flight
            experts_MA = experts.finish()
            of_host_MA = experts_MA.long() // experts_here - self._host * self._of_host
            goes_MR = _marked(of_host_MA.masked_fill(of_host_MA < 0, self._of_host), self._of_host)
            send, receive = sizes.in_host
            hops.append(_Hop(_copies(goes_MR, sum(send)), send, receive, self._in_host))
            in_flight = hops[-1].start(x.finish(), weights.finish(), experts_MA)
        experts, weights, x = in_flight
        copies, order_N, offsets = self._of_experts(experts.finish().long(), from_rank_R, sizes.assigned, experts_here)
        weights_N = weights.finish().flatten()[order_N]
        if self.multiple > 1:
            row_P, padded_N, offsets = pad_groups(len(order_N), offsets, self.multiple)
            weights_N = pad_weights(weights_N, padded_N, len(row_P))
            copies = copies._replace(row_N=copies.row_N[row_P], place_M=padded_N[copies.place_M])
        return _Copy.apply(x.finish(), *copies), weights_N, offsets, (copies, hops)

    def _of_experts(
        self, experts_MA: Tensor, from_rank_R: Tensor, total: int, experts_here: int
    ) -> tuple[_Copies, Tensor, Tensor]:
        """Copies of the rows on this rank by its experts, the assignment of each, and the offsets of the experts."""
        M, A = experts_MA.shape
        local_MA = experts_MA - experts_here * (self._host * self._of_host + self._local)
        is_here_MA = (local_MA >= 0) & (local_MA < experts_here)
        # Rows came by the number of their rank on its host, then by host.
        rank_R = torch.arange(self._ranks, device=experts_MA.device).view(self._hosts, self._of_host).t().flatten()
        rank_M = rank_R.repeat_interleave(from_rank_R[rank_R], output_size=M)
        keys = experts_here * self._ranks
        key_MA = torch.where(is_here_MA, local_MA * self._ranks + rank_M.unsqueeze(1), keys)
        order_N, place_N, sizes = sort_assignments(key_MA.flatten(), keys + 1)
        order_N, offsets = order_N[:total], sizes[:-1].view(experts_here, -1).sum(1).cumsum(0).to(torch.int32)
        return _Copies(order_N // A, _kept(place_N, is_here_MA.flatten(), total), _begins(is_here_MA)), order_N, offsets

    @torch.compiler.disable
    def combine(self, y_ND: Tensor, context: Any) -> Tensor:
        """See `TokenDispatcher.combine`. Collective."""
        copies, hops = context
        y = _Sum.apply(y_ND, *copies)
        for hop in reversed(hops):
            y = hop.back(y)
        return y


def _marked(numbers_MA: Tensor, count: int) -> Tensor:
    """Boolean [M, count]: the numbers that each row has; ``count`` stands for none."""
    marks = torch.zeros(len(numbers_MA), count + 1, dtype=torch.bool, device=numbers_MA.device)
    return marks.scatter_(1, numbers_MA.clamp(max=count), True)[:, :count]


def _copies(goes_RP: Tensor, total: int) -> _Copies:
    """Copies of rows to the places where they go: first all rows of the first place, and so on; ``total`` of them."""
    rows, places = goes_RP.shape
    goes_PR = goes_RP.t().reshape(-1)
    row_N = _kept(torch.arange(rows, device=goes_RP.device).repeat(places), goes_PR, total)
    number_RP = (goes_PR.cumsum(0) - 1).view(places, rows).t()
    return _Copies(row_N, _kept(number_RP.reshape(-1), goes_RP.reshape(-1), total), _begins(goes_RP))


def _begins(goes_RP: Tensor) -> Tensor:
    """The beginning of the places of each row in a list of all."""
    count_R = goes_RP.sum(1)
    return count_R.cumsum(0) - count_R


def _kept(values: Tensor, is_kept: Tensor, total: int) -> Tensor:
    """The ``total`` values that are kept, in order, without asking the device for their number."""
    place = torch.where(is_kept, is_kept.cumsum(0) - 1, total)
    return values.new_empty(total + 1).scatter_(0, place, values)[:total]
