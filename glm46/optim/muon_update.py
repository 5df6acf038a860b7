"""One Muon update of matrices that lie whole on this rank, and the pieces every other path shares.

Letters: N matrices, R rows, C columns; S and L are the shorter and the longer of R and C.

    m <- lerp(m, g, 1 - momentum)        u <- lerp(g, m, momentum) with Nesterov, else m
    O <- orthogonal factor of u          p <- p (1 - lr decay) - lr scale(R, C) O
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from glm46.optim.compact_state import Quantized, load_state, state_parts, store_state
from glm46.optim.newton_schulz import Coefficients, iterate_batched, orthogonalize, step_coefficients

NS_BACKENDS = ("eager", "compile")


@dataclass(frozen=True)
class Orthogonalizer:
    """How matrices are orthogonalised; matrices with equal settings and shapes are stacked."""

    coefficients: Coefficients
    eps: float
    dtype: torch.dtype
    backend: str
    one_by_one: bool = False

    def __call__(self, x_NSL: Tensor) -> Tensor:
        """The orthogonal factors of ``x_NSL`` [N, S, L], S <= L, in ``self.dtype``."""
        if self.one_by_one and len(x_NSL) > 1:
            # The kernel, and with it the rounding, depends on how many matrices it is given.
            return torch.cat([self(x_1SL) for x_1SL in x_NSL.split(1)])
        options = {"eps": self.eps, "dtype": self.dtype}
        if self.backend == "compile":
            return _compiled()(x_NSL, self.coefficients, iterate=iterate_batched, **options)
        return orthogonalize(x_NSL, self.coefficients, **options)


@cache
def _compiled():
    # Once per process: a model has few canonical shapes, and each is compiled for itself.
    return torch.compile(orthogonalize, dynamic=False)


def orthogonalizer(group: dict) -> Orthogonalizer:
    """The settings of a parameter group of ``Muon``."""
    if group["ns_backend"] not in NS_BACKENDS:
        raise ValueError(f"ns_backend {group['ns_backend']!r} is unknown; known: {', '.join(NS_BACKENDS)}")
    coefficients = step_coefficients(group["ns_coefficients"], group["ns_steps"])
    return Orthogonalizer(coefficients, group["eps"], group["ns_dtype"], group["ns_backend"], group["mesh_invariant"])


def update_scale(adjust_lr: str | None, update_rms: float, rows: int, columns: int) -> float:
    """Factor on the learning rate of a rows x columns matrix; both are those of the whole matrix.

    Raises:
        ValueError: an unknown rule.

    Source: "match_rms_adamw", Moonlight (arXiv 2502.16982, equation 4); "original", KellerJordan/Muon; "spectral",
    sqrt(rows / columns), Bernstein (https://jeremybernste.in/writing/deriving-muon).
    """
    if adjust_lr == "match_rms_adamw":
        return update_rms * math.sqrt(max(rows, columns))
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    if adjust_lr == "spectral":
        return math.sqrt(rows / columns)
    if adjust_lr is None:
        return 1.0
    raise ValueError(f"adjust_lr {adjust_lr!r} is unknown; known: match_rms_adamw, original, spectral, None")


@dataclass(frozen=True)
class Piece:
    """Views of the same part of one parameter, its gradient and its momentum on this rank, all [N, r, c].

    ``rows`` and ``columns`` are those of the whole matrices, of which the views may hold a part. Without a gradient
    there is nothing to contribute and nothing to update. ``is_busy`` [N, 1, 1] is one for the matrices to update and
    zero for those to leave alone; absent for all of them.
    """

    group: dict
    parameter: Tensor
    gradient: Tensor | None
    momentum: Tensor | Quantized
    rows: int
    columns: int
    is_busy: Tensor | None = None

    def direction(self) -> Tensor:
        """Advance the momentum and return what is orthogonalised, [N, r, c], never a view of gradient or momentum."""
        with self._idle_kept(*state_parts(self.momentum)):
            return self._advance()

    def _advance(self) -> Tensor:
        weight = self.group["momentum"]
        gradient = self.gradient
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
        scale = update_scale(self.group["adjust_lr"], self.group["update_rms"], self.rows, self.columns)
        with self._idle_kept(self.parameter):
            self.parameter.mul_(1.0 - lr * self.group["weight_decay"])
            if isinstance(lr, Tensor):
                self.parameter.sub_(update.to(self.parameter.dtype) * (lr * scale))
            else:
                self.parameter.add_(update, alpha=-lr * scale)

    @contextmanager
    def _idle_kept(self, *tensors: Tensor) -> Iterator[None]:
        """Undo what the block does to idle matrices: on the device, because asking it which these are would wait."""
        before = [] if self.is_busy is None else [tensor.clone() for tensor in tensors]
        yield
        for tensor, old in zip(tensors, before, strict=False):
            tensor.copy_(torch.where(self.is_busy, tensor, old))


def canonical(matrices_NRC: Tensor) -> Tensor:
    """The same matrices with the shorter side first; a view."""
    return matrices_NRC.mT if matrices_NRC.shape[-2] > matrices_NRC.shape[-1] else matrices_NRC


def update_whole(pieces: Sequence[Piece], gather: torch.dtype, back: torch.dtype, settings: Orthogonalizer) -> None:
    """Update pieces that hold whole matrices of one canonical shape, stacked into one iteration.

    ``gather`` and ``back`` are the types in which matrices travel elsewhere and updates return: rounding to them here
    too keeps one process equal to many.
    """
    counts = [piece.parameter.shape[0] for piece in pieces]
    if sum(counts) == 1:
        # Rounded before it is turned: torch transposes fast only within one type and two dimensions.
        x_SL = canonical(pieces[0].direction()[0].to(gather)).contiguous()
        update = settings(x_SL[None]).to(back)
        pieces[0].apply(update if pieces[0].parameter.shape[1] <= pieces[0].parameter.shape[2] else update.mT)
        return
    short, long = canonical(pieces[0].parameter).shape[1:]
    x_NSL = torch.empty(sum(counts), short, long, dtype=gather, device=pieces[0].parameter.device)
    for part, piece in zip(x_NSL.split(counts), pieces, strict=True):
        part.copy_(canonical(piece.direction()))
    for part, piece in zip(settings(x_NSL).to(back).split(counts), pieces, strict=True):
        piece.apply(part if piece.parameter.shape[1] <= piece.parameter.shape[2] else part.mT)
