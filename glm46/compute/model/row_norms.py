"""Squared norms of the rows of ``W + scale * B A``, for DoRA, which scales the rows to its magnitudes."""

from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor

from glm46.compute.model.quantised_weights import columns_of, in_compute_type

_CHUNK_ELEMENTS = 1 << 24
"""Elements of a weight converted to FP32 at a time."""


@torch.no_grad()
def row_squares(
    base: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    quantised: tuple[Tensor, torch.dtype] | None = None,
) -> Tensor:
    """Compute ``|W_i + scale * (B A)_i|^2`` of each row, without a tensor of the size of W.

    Args:
        base: FP32 [..., O], `base_squares` of the weight, which is frozen.
        weight: [..., O, I], any dtype; a subset of the rows or columns of the matrix.
        a: [..., R, I], all of its rows.
        b: [..., O, R].
        quantised: scales and compute type of a quantised weight, see `in_compute_type`.

    Returns:
        FP32 [..., O]; for a subset of the columns, their part of the sum.
    """
    if weight.ndim == 2:
        stacked = weight.unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0)
        return row_squares(base, *stacked, scale, _stacked(quantised)).squeeze(0)
    a = a.float()
    b = b.float()
    cross = _by_pieces(weight, quantised, lambda w, experts: w @ a[experts].mT)
    # |w|^2 + 2 scale b.(A w) + scale^2 b.(A A^T b)
    return base + scale * (cross.mul_(2).add_(b @ (a @ a.mT), alpha=scale) * b).sum(-1)


@torch.no_grad()
def base_squares(weight: Tensor, quantised: tuple[Tensor, torch.dtype] | None = None) -> Tensor:
    """Compute ``|W_i|^2`` of each row of [..., O, I], FP32 [..., O]; ``quantised`` as in `row_squares`."""
    if weight.ndim == 2:
        return base_squares(weight.unsqueeze(0), _stacked(quantised)).squeeze(0)
    return _by_pieces(weight, quantised, lambda w, _: w.square().sum(-1))


def _stacked(quantised: tuple[Tensor, torch.dtype] | None) -> tuple[Tensor, torch.dtype] | None:
    return None if quantised is None else (quantised[0].unsqueeze(0), quantised[1])


def _by_pieces(
    weight_EOI: Tensor, quantised: tuple[Tensor, torch.dtype] | None, function: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """Apply ``function(weight, experts)`` to FP32 pieces, several experts or some rows of one; result [E, O, ...]."""
    scales, dtype = quantised or (None, weight_EOI.dtype)
    E, O = weight_EOI.shape[:2]  # noqa: E741 - the letters of dimensions
    I = columns_of(weight_EOI, scales)  # noqa: E741
    results = []
    experts_at_once = max(1, _CHUNK_ELEMENTS // max(1, O * I))  # O is 0 on a rank without rows
    rows_at_once = max(1, _CHUNK_ELEMENTS // I)
    for experts in (slice(first, first + experts_at_once) for first in range(0, E, experts_at_once)):
        pieces = weight_EOI[experts].split(rows_at_once, dim=1)
        piece_scales = repeat(None) if scales is None else scales[experts].split(rows_at_once, dim=1)
        in_fp32 = (in_compute_type(*piece, dtype).float() for piece in zip(pieces, piece_scales, strict=False))
        results.append(torch.cat([function(piece, experts) for piece in in_fp32], dim=1))
    return torch.cat(results)
