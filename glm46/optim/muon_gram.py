"""Matrices too large for one owner: their long side stays cut, and the ranks sum S x S Gram matrices instead.

Letters: S rows, L columns of which this rank holds l, S <= L. The iteration runs on G = X X^T in FP32, on all ranks
alike, and only the last product touches this rank's columns. Half precision would drift, hence FP32 and one restart.
"""

import torch
import torch.distributed as dist

from glm46.optim.muon_update import Orthogonalizer, Piece
from glm46.optim.newton_schulz import GRAM_RESTART_STEP, gram_polynomial


def update_by_gram(
    piece: Piece | None, short: int, settings: Orthogonalizer, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Update one matrix whose long side is cut over ``group``; ``piece`` is None where this rank holds nothing.

    Two all-reduces of S x S in FP32, or in FP64 for FP64 iterations.
    """
    wide = torch.promote_types(settings.dtype, torch.float32)
    x_1Sl = torch.zeros(1, short, 0, dtype=wide, device=device)
    if piece is not None and piece.gradient is not None:
        direction = piece.direction()
        # The whole matrix decides which side is the short one, not the part held here.
        x_1Sl = (direction.mT if piece.rows > piece.columns else direction).to(wide)
    norm = None
    for part in (settings.coefficients[:GRAM_RESTART_STEP], settings.coefficients[GRAM_RESTART_STEP:]):
        if not part:
            continue
        gram_1SS = x_1Sl @ x_1Sl.mT
        dist.all_reduce(gram_1SS, group=group)
        if norm is None:
            norm = gram_1SS.diagonal(dim1=-2, dim2=-1).sum().sqrt().clamp_min(settings.eps)
            # Twice by the norm instead of once by its square, which FP32 may not hold.
            gram_1SS, x_1Sl = gram_1SS / norm / norm, x_1Sl / norm
        x_1Sl = gram_polynomial(gram_1SS, part) @ x_1Sl
    if piece is not None and piece.gradient is not None:
        piece.apply(x_1Sl.mT if piece.rows > piece.columns else x_1Sl)
