"""Token dispatch to experts and back on one device. Expert parallelism replaces the dispatcher."""

from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.compat import FunctionContext
from glm46.compute.model.router import Routing

Sent = TypeVar("Sent")
"""Tokens in transit to their experts, by dispatcher."""
Results = TypeVar("Results", contravariant=True)
"""What the experts return: [N, D], or what a `ChunkSchedule` returned."""
Way = TypeVar("Way")
"""What a dispatcher needs to bring results back to their tokens."""


class ArrivedRows(NamedTuple):
    """Rows for the experts of this rank, sorted by expert."""

    x_ND: Tensor
    """[N, D]. The results of rows past the last offset are not read."""
    weights_N: Tensor
    """FP32 [N]: routing weights."""
    offsets: Tensor
    """int32 [E]: running sum of the rows of each expert."""


class ExpertProducts(Protocol):
    """The two halves of the experts; see `Experts`."""

    def first_product(self, x_ND: Tensor, offsets: Tensor) -> Tensor:
        """Return the gate and up rows, [N, 2F]."""

    def second_product(self, gate_up: Tensor, weights_N: Tensor, offsets: Tensor) -> Tensor:
        """Return the results, [N, D]."""


class ChunkSchedule(Protocol):
    """Computes the experts on several chunks of tokens, each while others travel."""

    def compute(self, experts: ExpertProducts, rows: ArrivedRows) -> tuple[NamedTuple, ...]:
        """Compute all chunks; ``rows`` is the first one. Returns what `TokenDispatcher.combine` takes as results."""


class TokenDispatcher(Protocol[Sent, Results, Way]):
    """Moves tokens to the ranks of their experts and back."""

    multiple: int
    """Number to a multiple of which the rows of each expert are padded, for FP8 products; 1 does not pad."""

    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> Sent:
        """Start sending each token to its experts. Work done before `arrived` overlaps with the exchange."""

    def arrived(self, sent: Sent) -> tuple[ArrivedRows, Way, ChunkSchedule | None]:
        """Return the received rows, their way back, and a schedule if other chunks are still in transit."""

    def combine(self, results: Results, way: Way) -> Tensor:
        """Sum the expert results of each token, [T, D]."""


class Copy(torch.autograd.Function):
    """Row n of the result is row ``row_N[n]``. Backward sums the copies of a row in a fixed order, in FP32, and rounds
    once; the built-in backward of indexing uses atomics on a GPU, whose order varies.

    ``place`` holds the places of each row in the result, in one of three forms: [T, A], where places past the last row
    of the result are dropped assignments; with ``first_R``, concatenated lists, the list of row r beginning at
    ``first_R[r]``; or [T], a single place per row.
    """

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, row_N: Tensor, place: Tensor, first_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(place, first_R)
        return x.index_select(0, row_N)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_copies(grad, *ctx.saved_tensors), None, None, None


class _SumContext(FunctionContext, Protocol):
    row_N: Tensor


class Sum(torch.autograd.Function):
    """Transpose of `Copy`: row r of the result is the sum of the rows at its places."""

    @staticmethod
    def forward(ctx: _SumContext, y: Tensor, row_N: Tensor, place: Tensor, first_R: Tensor | None) -> Tensor:
        # Not `save_for_backward`: a recomputation stops at the last saved tensor, which is then before the exchange
        # with other ranks. The cost is one index per assignment kept under activation checkpointing.
        ctx.row_N = row_N
        return _sum_copies(y, place, first_R)

    @staticmethod
    def backward(ctx: _SumContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.row_N), None, None, None


def _sum_copies(y_ND: Tensor, place: Tensor, first_R: Tensor | None) -> Tensor:
    # fp32: all forms sum BF16 rows in FP32 and round once, without a tensor of all terms in memory.
    if first_R is not None:
        if not len(place):
            return y_ND.new_zeros(len(first_R), *y_ND.shape[1:])
        return F.embedding_bag(place, y_ND, first_R, mode="sum")
    if place.dim() == 1:
        return y_ND.index_select(0, place)
    if torch.compiler.is_compiling():  # one kernel with the addition that follows; `embedding_bag` is always its own
        return y_ND[place].sum(1)
    if len(y_ND) >= place.numel():  # no assignment is dropped
        return F.embedding_bag(place, y_ND, mode="sum")
    if len(y_ND) == 0:
        return y_ND.new_zeros(len(place), y_ND.shape[1])
    is_kept_TA = (place < len(y_ND)).to(y_ND.dtype)
    return F.embedding_bag(place.clamp(max=len(y_ND) - 1), y_ND, per_sample_weights=is_kept_TA, mode="sum")


class Copies(NamedTuple):
    """Rows that are each copied to some of N places; see `Copy`."""

    row_N: Tensor
    """int64: the row at each place."""
    place: Tensor
    """int64: the places of each row, without places of padding."""
    first_R: Tensor | None = None
    """int64: where the places of each row begin in `place`, if it is a list."""

    def copy_rows(self, x: Tensor) -> Tensor:
        """Copy each row to its places."""
        rows: Tensor = Copy.apply(x, *self)
        return rows

    def sum_rows(self, y: Tensor) -> Tensor:
        """Sum the places of each row."""
        sums: Tensor = Sum.apply(y, *self)
        return sums


class LocalDispatcher:
    """A `TokenDispatcher` for ranks that hold all experts: one stable sort, no communication."""

    def __init__(self) -> None:
        self.multiple = 1

    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> tuple[ArrivedRows, Copies]:
        """See `TokenDispatcher.start`; sends nothing."""
        T, A = routing.experts.shape
        order_N, place_N, sizes_E = sort_assignments(routing.experts.flatten(), num_experts)
        token_N = order_N // A
        place_TA = place_N.view(T, A)
        weights_N = routing.weights.flatten()[order_N]
        offsets = sizes_E.cumsum(0).to(torch.int32)
        if self.multiple > 1:
            row_P, place_N, offsets = pad_groups(len(token_N), offsets, self.multiple)
            weights_N = pad_weights(weights_N, place_N, len(row_P))
            token_N = token_N[row_P]
            place_TA = place_N[place_TA]
        # Dropped assignments are rows of weight 0 here.
        copies = Copies(token_N, place_TA)
        return ArrivedRows(copies.copy_rows(x_TD), weights_N, offsets), copies

    def arrived(self, sent: tuple[ArrivedRows, Copies]) -> tuple[ArrivedRows, Copies, None]:
        """See `TokenDispatcher.arrived`; here N = T * A, without padding, and offsets covers all experts."""
        rows, copies = sent
        return rows, copies, None

    def combine(self, results: Tensor, way: Copies) -> Tensor:
        """See `TokenDispatcher.combine`."""
        return way.sum_rows(results)


def sort_assignments(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort assignments by expert, stably. Each expert sees its tokens in order, so that sums round reproducibly.

    Returns:
        int64: the assignment at each place of the sorted order [N], the place of each assignment [N], and the number of
        assignments per expert [E].
    """
    # Short keys are faster: a GPU uses radix sort, with a pass for each byte of a key.
    keys_N = expert_N.to(torch.int16) if num_experts <= torch.iinfo(torch.int16).max + 1 else expert_N
    order_N = keys_N.argsort(stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    sizes_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device)
    return order_N, place_N, sizes_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))


def pad_groups(rows: int, offsets: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad each group of rows to a multiple of ``multiple``, without waiting for the device to read the sizes.

    Padding repeats the last row of its group, so that the maximum of a group does not change. Empty groups stay
    empty; GPU kernels accept them as long as there is at least one row in total.

    Args:
        rows: number of rows, all of them in a group.
        offsets: int [E], running sum of the group sizes.

    Returns:
        int64 [P], a multiple of ``multiple`` that is at least the sum of the padded sizes: the row at each place; int64
        [N]: the place of each row; int32 [E]: running sum of the padded sizes.
    """
    groups = len(offsets)
    device = offsets.device
    row_N = torch.arange(rows, device=device)
    if not rows:
        return row_N, row_N, offsets.to(torch.int32)
    end_E = offsets.long()
    size_E = end_E.diff(prepend=end_E.new_zeros(1))
    padded_end_E = ((size_E + multiple - 1) // multiple * multiple).cumsum(0)
    padded_size_E = padded_end_E.diff(prepend=padded_end_E.new_zeros(1))
    shift_E = (padded_end_E - padded_size_E) - (end_E - size_E)  # by how much padding moves the start of each group
    place_P = torch.arange(-(-(rows + groups * (multiple - 1)) // multiple) * multiple, device=device)
    group_P = torch.searchsorted(padded_end_E, place_P, right=True).clamp(max=groups - 1)
    row_P = (place_P - shift_E[group_P]).minimum(end_E[group_P] - 1).clamp(0, rows - 1)
    place_N = row_N + shift_E[torch.searchsorted(end_E, row_N, right=True).clamp(max=groups - 1)]
    return row_P, place_N, padded_end_E.to(torch.int32)


def pad_weights(weights_N: Tensor, place_N: Tensor, places: int) -> Tensor:
    """Return the weight at each place of `pad_groups`; padding has weight 0, without gradient. So padding adds nothing
    to the gradients of the experts, although `combine` passes it the gradient of the row that it repeats."""
    return weights_N.new_zeros(places).index_copy(0, place_N, weights_N)
