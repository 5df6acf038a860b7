"""Muon update of matrices that are entirely on this rank, and the steps that all paths share.

Letters: N matrices, R rows, C columns; S and L are the shorter and the longer of R and C.

    m <- lerp(m, g, 1 - momentum)        u <- lerp(g, m, momentum), as in Nesterov
    O <- orthogonal factor of u          p <- p (1 - lr decay) - lr scale(R, C) O
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm46.compat import named_range
from glm46.compute.optim.compact_state import Quantized, load_state, state_parts, store_state
from glm46.compute.optim.newton_schulz import orthogonalize
from glm46.compute.optim.rounding import EntryNumbers, RandomBits, row_slices, store_bfloat16

_UPDATE_RMS = 0.2
"""Root mean square of an update under match_rms_adamw, similar to AdamW's updates."""


@dataclass(frozen=True)
class Orthogonalizer:
    """Settings of the orthogonalisation of an optimizer."""

    steps: int
    dtype: torch.dtype
    """Dtype of the products, and of matrices on the way to their owner and back."""

    def __call__(self, x_NSL: Tensor) -> Tensor:
        """Compute the orthogonal factors of ``x_NSL`` [N, S, L], S <= L, in ``self.dtype``."""
        with named_range("Muon.orthogonalize"):
            return orthogonalize(x_NSL, self.steps, self.dtype)


def update_scale(adjust_lr: str, rows: int, columns: int) -> float:
    """Return the factor on the learning rate of a matrix; ``rows`` and ``columns`` of the full matrix.

    Raises:
        ValueError: an unknown rule.

    Source: "match_rms_adamw", Moonlight (arXiv 2502.16982, equation 4); "original", KellerJordan/Muon.
    """
    if adjust_lr == "match_rms_adamw":
        return _UPDATE_RMS * math.sqrt(max(rows, columns))
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    raise ValueError(f"adjust_lr {adjust_lr!r} is unknown; known: match_rms_adamw, original")


@dataclass(frozen=True)
class Piece:
    """Part of one parameter, its gradient and its momentum on this rank, all [N, r, c]. Parameter and momentum are
    views. Gradient and momentum are on the device that computes the update; the parameter may be in host memory.

    ``rows`` and ``columns`` are the size of the full matrices; the views may hold a part of them. A piece without a
    gradient contributes nothing and is not updated. ``numbers`` are the numbers of its entries for stochastic rounding;
    None for FP32.
    """

    group: dict[str, Any]
    parameter: Tensor
    gradient: Tensor | None
    momentum: Tensor | Quantized
    rows: int
    columns: int
    numbers: EntryNumbers | None = None

    def direction(self) -> Tensor:
        """Update the momentum and return the matrices to orthogonalise, [N, r, c], in new memory."""
        momentum_decay = self.group["momentum"]
        gradient = self.gradient
        assert gradient is not None, "a piece without a gradient has no direction"
        momentum = self.momentum
        wide = (torch.float32, torch.float64)
        if isinstance(momentum, Tensor) and momentum.dtype in wide and momentum.dtype == gradient.dtype:
            momentum.lerp_(gradient, 1.0 - momentum_decay)
        else:
            # The sum is computed in FP32 or wider, and rounded once.
            momentum = load_state(self.momentum, gradient)
            gradient = gradient.to(momentum.dtype)
            momentum.lerp_(gradient, 1.0 - momentum_decay)
            store_state(self.momentum, momentum, self._random_bits("momentum_buffer"))
        return gradient.lerp(momentum, momentum_decay)

    def apply(self, update: Tensor) -> None:
        """Decay the parameter and subtract the scaled ``update`` [N, r, c]."""
        lr = self.group["lr"]
        scale = update_scale(self.group["adjust_lr"], self.rows, self.columns)
        decay = 1.0 - lr * self.group["weight_decay"]
        update = update.to(self.parameter.device)
        if self.parameter.dtype != torch.bfloat16:
            self.parameter.mul_(decay)
            self.parameter.add_(update, alpha=-lr * scale)
            return
        for matrices in row_slices(self.parameter):
            weights = self.parameter[matrices].float().mul_(decay)
            weights.add_(update[matrices], alpha=-lr * scale)
            store_bfloat16(self.parameter[matrices], weights, self._random_bits("weight", matrices))

    def _random_bits(self, tensor: str, matrices: tuple[slice, ...] = ()) -> RandomBits:
        assert self.numbers is not None, "a piece in BF16 or 8 bits needs the numbers of its entries"
        return self.numbers[matrices].random_bits(self.group["updates"], tensor)


def canonical(matrices_NRC: Tensor) -> Tensor:
    """Return the matrices with the shorter side first; a view."""
    return matrices_NRC.mT if matrices_NRC.shape[-2] > matrices_NRC.shape[-1] else matrices_NRC


def _in_orientation_of(parameter_NRC: Tensor, matrices_NSL: Tensor) -> Tensor:
    """Invert `canonical`: return the matrices in the shape of the parameter; a view."""
    return matrices_NSL.mT if parameter_NRC.shape[-2] > parameter_NRC.shape[-1] else matrices_NSL


def update_whole(pieces: Sequence[Piece], orthogonalizer: Orthogonalizer) -> None:
    """Update pieces with full matrices of one canonical shape, stacked into one iteration.

    They are rounded to the dtype in which sharded matrices are sent, so that one process gives the same bits as many.
    """
    counts = [piece.parameter.shape[0] for piece in pieces]
    if sum(counts) == 1:
        # Round before transposing: torch transposes fast only within one type and two dimensions.
        x_SL = canonical(pieces[0].direction()[0].to(orthogonalizer.dtype)).contiguous()
        update = orthogonalizer(x_SL[None])
        pieces[0].apply(_in_orientation_of(pieces[0].parameter, update))
        return
    short, long = canonical(pieces[0].parameter).shape[1:]
    device = state_parts(pieces[0].momentum)[0].device
    x_NSL = torch.empty(sum(counts), short, long, dtype=orthogonalizer.dtype, device=device)
    for part, piece in zip(x_NSL.split(counts), pieces, strict=True):
        part.copy_(canonical(piece.direction()))
    for part, piece in zip(orthogonalizer(x_NSL).split(counts), pieces, strict=True):
        piece.apply(_in_orientation_of(piece.parameter, part))
