"""Newton-Schulz iteration: the orthogonal factor U V^T of a matrix U S V^T, approximately, with matrix products only.

Letters: N matrices, S rows, L columns, always S <= L (the caller transposes tall matrices).
One iteration is X <- a X + (b G + c G^2) X with G = X X^T: an odd polynomial applied to every singular value.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b and c: steep at zero; singular values end in [0.7, 1.2]. Source: Keller Jordan,
https://kellerjordan.github.io/posts/muon."""

# Far below the norm of any non-zero gradient: experts with few tokens still get updates of full size.
LEAST_NORM = 1e-12
"""Lower bound for the Frobenius norm by which a matrix is divided; a zero matrix stays zero."""

# On a CPU stacking helps while one iteration fits in the cache of a core; larger matrices go one by one (measured: a
# quarter faster than either extreme on 96 x 320 in bf16).
CPU_CACHE_BYTES = 4 << 20


def stack_limit(short: int, long: int, dtype: torch.dtype) -> int:
    """Return how many matrices fit in a CPU iteration: the stack, its normalised copy, two results, and two products
    short x short."""
    return max(1, CPU_CACHE_BYTES // (dtype.itemsize * (4 * short * long + 2 * short * short)))


def normalize(x_NSL: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide each matrix by its Frobenius norm (FP32 or better); a new tensor of ``dtype``."""
    # fp32: a norm rounded to bf16 would shift all singular values by up to half a percent.
    wide = torch.promote_types(x_NSL.dtype, torch.float32)
    norm_N11: Tensor = torch.linalg.vector_norm(x_NSL, dim=(-2, -1), keepdim=True, dtype=wide).clamp_min_(LEAST_NORM)
    return (x_NSL / norm_N11).to(dtype)


def _buffer(x: Tensor) -> Tensor:
    """Return a buffer for every second result: the input, unless it is transposed, since products would round
    differently."""
    return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def iterate_into(out_SL: Tensor, x_SL: Tensor, steps: int) -> None:
    """Run all iterations on one normalised matrix, which may be overwritten; write the result to ``out_SL``."""
    a, b, c = COEFFICIENTS
    gram_SS = x_SL.new_empty(x_SL.shape[0], x_SL.shape[0])
    polynomial_SS = torch.empty_like(gram_SS)
    results = (out_SL, _buffer(x_SL))
    for step in range(steps):
        torch.mm(x_SL, x_SL.mT, out=gram_SS)
        torch.addmm(gram_SS, gram_SS, gram_SS, beta=b, alpha=c, out=polynomial_SS)
        x_SL = torch.addmm(x_SL, polynomial_SS, x_SL, beta=a, out=results[step % 2])
    if steps % 2 == 0:
        out_SL.copy_(x_SL)  # the last result is in the buffer


def iterate_batched(x_NSL: Tensor, steps: int) -> Tensor:
    """Run all iterations on N normalised matrices at once, which may be overwritten."""
    a, b, c = COEFFICIENTS
    gram_NSS = x_NSL.new_empty(*x_NSL.shape[:2], x_NSL.shape[1])
    polynomial_NSS = torch.empty_like(gram_NSS)
    results = torch.empty_like(x_NSL, memory_format=torch.contiguous_format), _buffer(x_NSL)
    for step in range(steps):
        torch.bmm(x_NSL, x_NSL.mT, out=gram_NSS)
        torch.baddbmm(gram_NSS, gram_NSS, gram_NSS, beta=b, alpha=c, out=polynomial_NSS)
        x_NSL = torch.baddbmm(x_NSL, polynomial_NSS, x_NSL, beta=a, out=results[step % 2])
    return x_NSL


def orthogonalize(x_NSL: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Compute the approximate orthogonal factor of each matrix, in ``dtype``; ``x_NSL`` is not changed.

    A GPU iterates on all matrices at once. A CPU iterates on as many as fit in its cache, a single matrix unbatched.

    Args:
        x_NSL: [N, S, L] with S <= L, any floating-point dtype.
        dtype: dtype of the products.
    """
    limit = stack_limit(x_NSL.shape[-2], x_NSL.shape[-1], dtype)
    if x_NSL.device.type != "cpu" or 1 < len(x_NSL) <= limit:
        return iterate_batched(normalize(x_NSL, dtype), steps)
    out_NSL = torch.empty(x_NSL.shape, dtype=dtype)
    for out_nSL, x_nSL in zip(out_NSL.split(limit), x_NSL.split(limit), strict=True):
        if limit == 1 or len(x_nSL) == 1:
            iterate_into(out_nSL[0], normalize(x_nSL[0], dtype), steps)
        else:
            out_nSL.copy_(iterate_batched(normalize(x_nSL, dtype), steps))
    return out_NSL
