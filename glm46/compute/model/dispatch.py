"""Token dispatch to experts and back on one device. Expert parallelism replaces the dispatcher."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.model.router import Routing


class TokenDispatcher(Protocol):
    """Moves tokens to the ranks of their experts and back."""

    multiple: int
    """The rows of each expert are padded to a multiple of this, which FP8 products need; 1 does not pad."""

    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> Any:
        """Start sending each token to its experts. Work done before `arrived` overlaps with the exchange."""

    def arrived(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Rows sorted by this rank's experts [N, D], their weights FP32 [N], offsets int32, context of `combine`. The
        results of rows past the last offset are not read."""

    def rest(self, context: Any) -> tuple:
        """Further arguments of the experts, if some tokens are still on their way; see `Experts.forward`."""

    def combine(self, y: Any, context: Any) -> Tensor:
        """Sum of each token's expert results, [T, D]; ``y`` is what the experts returned."""


class Copy(torch.autograd.Function):
    """Row n of the result is row ``row_N[n]``. Backward sums the copies of a row in a fixed order, in FP32, and rounds
    once; the built-in backward of indexing uses atomics on a GPU, whose order varies.

    The places of each row are ``place``: [T, A], those past the last row of the result being of dropped assignments;
    or, beginning at ``first_R``, those of row 0, then those of row 1; or [T], one of each row that counts.
    """

    @staticmethod
    def forward(ctx, x: Tensor, row_N: Tensor, place: Tensor, first_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(place, first_R)
        return x.index_select(0, row_N)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sum_copies(grad, *ctx.saved_tensors), None, None, None


class Sum(torch.autograd.Function):
    """Transpose of `Copy`: sums the rows at the places of each."""

    @staticmethod
    def forward(ctx, y: Tensor, row_N: Tensor, place: Tensor, first_R: Tensor | None) -> Tensor:
        # Not a saved tensor: a recomputation stops at the last saved tensor, and so before the exchange with other
        # ranks. This keeps one index per assignment under activation checkpointing.
        ctx.row_N = row_N
        return _sum_copies(y, place, first_R)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.row_N), None, None, None


def _sum_copies(y_ND: Tensor, place: Tensor, first_R: Tensor | None) -> Tensor:
    # fp32: all forms sum BF16 rows in FP32 and round once, without a tensor of all terms in memory.
    if first_R is not None:
        rows = len(first_R), *y_ND.shape[1:]
        return F.embedding_bag(place, y_ND, first_R, mode="sum") if len(place) else y_ND.new_zeros(rows)
    if place.dim() == 1:
        return y_ND.index_select(0, place)
    if torch.compiler.is_compiling():  # one kernel with the addition that follows; `embedding_bag` is always its own
        return y_ND[place].sum(1)
    if len(y_ND) >= place.numel():  # none is dropped
        return F.embedding_bag(place, y_ND, mode="sum")
    if len(y_ND) == 0:
        return y_ND.new_zeros(len(place), y_ND.shape[1])
    is_kept_TA = (place < len(y_ND)).to(y_ND.dtype)
    return F.embedding_bag(place.clamp(max=len(y_ND) - 1), y_ND, per_sample_weights=is_kept_TA, mode="sum")


class LocalDispatcher:
    """A `TokenDispatcher` for ranks that hold all experts: one stable sort, no communication."""

    def __init__(self):
        self.multiple = 1

    def start(self, x_TD: Tensor, routing: Routing, num_experts: int) -> Any:
        """See `TokenDispatcher.start`; sends nothing."""
        T, A = routing.experts.shape
        order_N, place_N, sizes_E = sort_assignments(routing.experts.flatten(), num_experts)
        token_N, place_TA = order_N // A, place_N.view(T, A)
        weights_N, offsets = routing.weights.flatten()[order_N], sizes_E.cumsum(0).to(torch.int32)
        if self.multiple > 1:
            row_P, place_N, offsets = pad_groups(len(token_N), offsets, self.multiple)
            weights_N = pad_weights(weights_N, place_N, len(row_P))
            token_N, place_TA = token_N[row_P], place_N[place_TA]
        # Dropped assignments are rows of weight 0 here.
        x_ND = Copy.apply(x_TD, token_N, place_TA, None)
        return x_ND, weights_N, offsets, (token_N, place_TA)

    def arrived(self, pending: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `TokenDispatcher.arrived`; here N = T * A, without padding, and offsets covers all experts."""
        return pending

    def rest(self, context: Any) -> tuple:
        """See `TokenDispatcher.rest`: none."""
        return ()

    def combine(self, y: Any, context: Any) -> Tensor:
        """See `TokenDispatcher.combine`."""
        return Sum.apply(y, *context, None)


def sort_assignments(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort assignments by expert, stably. Each expert sees its tokens in order, so that sums round reproducibly.

    Returns:
        int64: the assignment at each place of the sorted order [N], the place of each assignment [N], and the number of
        assignments per expert [E].
    """
    # A GPU sorts by radix, in a pass for each byte of a key.
    keys_N = expert_N.to(torch.int16) if num_experts <= torch.iinfo(torch.int16).max + 1 else expert_N
    order_N = keys_N.argsort(stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    sizes_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device)
    return order_N, place_N, sizes_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))


def pad_groups(rows: int, offsets: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad each group of rows to a multiple of ``multiple``, without asking the device for sizes.

    Padding repeats the last row of its group, so that no largest element of a group changes by it. Empty groups stay
    empty, which GPU kernels take as long as there is a row in all.

    Args:
        rows: number of rows, all of them in a group.
        offsets: int [E], running sum of the group sizes.

    Returns:
        int64 [P], a multiple of ``multiple`` that is at least the sum of the padded sizes: the row at each place; int64
        [N]: the place of each row; int32 [E]: running sum of the padded sizes.
    """
    groups, device = len(offsets), offsets.device
    row_N = torch.arange(rows, device=device)
    if not rows:
        return row_N, row_N, offsets.to(torch.int32)
    end_E = offsets.long()
    size_E = end_E.diff(prepend=end_E.new_zeros(1))
    padded_end_E = ((size_E + multiple - 1) // multiple * multiple).cumsum(0)
    padded_size_E = padded_end_E.diff(prepend=padded_end_E.new_zeros(1))
    shift_E = (padded_end_E - padded_size_E) - (end_E - size_E)
    place_P = torch.arange(-(-(rows + groups * (multiple - 1)) // multiple) * multiple, device=device)
    group_P = torch.searchsorted(padded_end_E, place_P, right=True).clamp(max=groups - 1)
    row_P = (place_P - shift_E[group_P]).minimum(end_E[group_P] - 1).clamp(0, rows - 1)
    place_N = row_N + shift_E[torch.searchsorted(end_E, row_N, right=True).clamp(max=groups - 1)]
    return row_P, place_N, padded_end_E.to(torch.int32)


def pad_weights(weights_N: Tensor, place_N: Tensor, places: int) -> Tensor:
    """The weight at each of the places of `pad_groups`; that of padding is 0, and has no gradient. So padding adds
    nothing to the gradients of the experts, although `combine` hands it the gradient of the row that it repeats."""
    return weights_N.new_zeros(places).index_copy(0, place_N, weights_N)
