"""One Muon update of matrices that this rank holds whole, and the parts that every path shares.

Letters: N matrices, R rows, C columns; S and L are the shorter and the longer of R and C.

    m <- lerp(m, g, 1 - momentum)        u <- lerp(g, m, momentum) with Nesterov, else m
    O <- orthogonal factor of u          p <- p (1 - lr decay) - lr scale(R, C) O
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm46.compat import named_range
from glm46.compute.optim.compact_state import Quantized, load_state, state_parts, store_state
from glm46.compute.optim.newton_schulz import orthogonalize

_UPDATE_RMS = 0.2
"""Root mean square of an update under match_rms_adamw, near that of AdamW's updates."""


@dataclass(frozen=True)
class Orthogonalizer:
    """Settings of the orthogonalisation of an optimizer."""

    steps: int
    dtype: torch.dtype
    """Type of the products, and of updates on the way back from their owner."""

    @property
    def gather_dtype(self) -> torch.dtype:
        """Type of matrices on the way to their owner; gradients can be smaller than float16 holds."""
        return torch.bfloat16 if self.dtype == torch.float16 else self.dtype

    def __call__(self, x_NSL: Tensor) -> Tensor:
        """The orthogonal factors of ``x_NSL`` [N, S, L], S <= L, in ``self.dtype``."""
        with named_range("Muon.orthogonalize"):
            return orthogonalize(x_NSL, self.steps, self.dtype)


def update_scale(adjust_lr: str, rows: int, columns: int) -> float:
    """Factor on the learning rate of a matrix; rows and columns are those of the whole matrix.

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
    """The same part of one parameter, its gradient and its momentum on this rank, all [N, r, c]. Parameter and momentum
    are views. Gradient and momentum are on the device that computes the update; the parameter may be in host memory.

    ``rows`` and ``columns`` are those of the whole matrices; the views may hold a part of them. A piece without a
    gradient contributes nothing and is not updated.
    """

    group: dict
    parameter: Tensor
    gradient: Tensor | None
    momentum: Tensor | Quantized
    rows: int
    columns: int

    def direction(self) -> Tensor:
        """Advance the momentum and return the matrices to orthogonalise, [N, r, c], in memory of their own."""
        weight = self.group["momentum"]
        gradient = self.gradient
        assert gradient is not None, "a piece without a gradient has none"
        if isinstance(self.momentum, Tensor) and self.momentum.dtype == gradient.dtype:
            momentum = self.momentum.lerp_(gradient, 1.0 - weight)
        else:
            # The sum is made in the wider type: a bf16 lerp would round the weight and both terms.
            momentum = load_state(self.momentum, gradient)
            gradient = gradient.to(momentum.dtype)
            store_state(self.momentum, momentum.lerp_(gradient, 1.0 - weight))
        return gradient.lerp(momentum, weight) if self.group["nesterov"] else momentum.clone()

    def apply(self, update: Tensor) -> None:
        """Decay the parameter and subtract the scaled ``update`` [N, r, c]."""
        lr = self.group["lr"]
        scale = update_scale(self.group["adjust_lr"], self.rows, self.columns)
        self.parameter.mul_(1.0 - lr * self.group["weight_decay"])
        self.parameter.add_(update.to(self.parameter.device), alpha=-lr * scale)


def canonical(matrices_NRC: Tensor) -> Tensor:
    """The same matrices with the shorter side first; a view."""
    return matrices_NRC.mT if matrices_NRC.shape[-2] > matrices_NRC.shape[-1] else matrices_NRC


def update_whole(pieces: Sequence[Piece], settings: Orthogonalizer) -> None:
    """Update pieces that hold whole matrices of one canonical shape, stacked into one iteration.

    They are rounded to the type in which sharded matrices travel, which keeps one process equal to many.
    """
    counts = [piece.parameter.shape[0] for piece in pieces]
    if sum(counts) == 1:
        # Round before transposing: torch transposes fast only within one type and two dimensions.
        x_SL = canonical(pieces[0].direction()[0].to(settings.gather_dtype)).contiguous()
        update = settings(x_SL[None])
        pieces[0].apply(update if pieces[0].parameter.shape[1] <= pieces[0].parameter.shape[2] else update.mT)
        return
    short, long = canonical(pieces[0].parameter).shape[1:]
    device = state_parts(pieces[0].momentum)[0].device
    x_NSL = torch.empty(sum(counts), short, long, dtype=settings.gather_dtype, device=device)
    for part, piece in zip(x_NSL.split(counts), pieces, strict=True):
        part.copy_(canonical(piece.direction()))
    for part, piece in zip(settings(x_NSL).split(counts), pieces, strict=True):
        piece.apply(part if piece.parameter.shape[1] <= piece.parameter.shape[2] else part.mT)
