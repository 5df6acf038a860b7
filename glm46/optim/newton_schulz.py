"""Newton-Schulz iteration: the orthogonal factor U V^T of a matrix U S V^T, approximately, with matrix products only.

Letters: N matrices, S rows, L columns, always S <= L (the caller transposes tall matrices).
One iteration is X <- a X + (b G + c G^2) X with G = X X^T: an odd polynomial applied to every singular value.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

KELLER_STEP = (3.4445, -4.7750, 2.0315)
FINISHING_STEP = (2.0, -1.5, 0.5)

NAMED_COEFFICIENTS: dict[str, Coefficients] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon: steepest at zero, singular values end in [0.7, 1.2].
    "keller": (KELLER_STEP,),
    # You Jiacheng, tuned per step for five steps; in KellerJordan/modded-nanogpt since 2025.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express, Amsel et al. (arXiv 2505.16932): minimax per step, with their safety and cushion of modded-nanogpt.
    "polar_express": (
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
    # DeepSeek-V4, section 2.4: eight fast steps, then two that bring every singular value to one.
    "deepseek_v4": (KELLER_STEP,) * 8 + (FINISHING_STEP,) * 2,
}

# On a CPU stacking helps while one iteration fits in the cache of a core; larger matrices go one by one (measured: a
# quarter faster than either extreme on 96 x 320 in bf16).
CPU_CACHE_BYTES = 4 << 20


def step_coefficients(coefficients: str | Sequence[Sequence[float]], steps: int) -> Coefficients:
    """One triple (a, b, c) per step; the last triple of a shorter list repeats.

    Raises:
        ValueError: unknown name, a malformed triple, or fewer steps than the set needs.
    """
    if isinstance(coefficients, str):
        if coefficients not in NAMED_COEFFICIENTS:
            raise ValueError(f"ns_coefficients {coefficients!r} is unknown; known: {', '.join(NAMED_COEFFICIENTS)}")
        triples = NAMED_COEFFICIENTS[coefficients]
        if coefficients == "deepseek_v4" and steps < len(triples):
            raise ValueError(f"ns_coefficients 'deepseek_v4' needs ns_steps >= {len(triples)}, not {steps}")
    else:
        triples = tuple(tuple(float(value) for value in triple) for triple in coefficients)
        if not triples or any(len(triple) != 3 for triple in triples):
            raise ValueError(f"ns_coefficients must be a name or triples (a, b, c), not {coefficients!r}")
    if steps < 1:
        raise ValueError(f"ns_steps must be at least 1, not {steps}")
    return (triples + triples[-1:] * steps)[:steps]


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations of ``steps`` iterations on one matrix: two S x S x L products and one S x S x S."""
    short, long = min(rows, columns), max(rows, columns)
    return steps * (4 * short * short * long + 2 * short**3)


def stack_limit(short: int, long: int, dtype: torch.dtype) -> int:
    """Matrices that a CPU iterates on at once: the stack, its normalised copy, two results, two short x short."""
    return max(1, CPU_CACHE_BYTES // (dtype.itemsize * (4 * short * long + 2 * short * short)))


def normalize(x_NSL: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """A new tensor: each matrix divided by its Frobenius norm (FP32 or better, at least ``eps``), as ``dtype``."""
    # fp32: a norm rounded to bf16 would shift all singular values by up to half a percent.
    wide = torch.promote_types(x_NSL.dtype, torch.float32)
    norm_N11 = torch.linalg.vector_norm(x_NSL, dim=(-2, -1), keepdim=True, dtype=wide).clamp_min_(eps)
    return (x_NSL / norm_N11).to(dtype)


def iterate_into(out_SL: Tensor, x_SL: Tensor, coefficients: Coefficients) -> None:
    """All iterations on one normalised matrix, the last one written to ``out_SL``."""
    last = len(coefficients) - 1
    for step, (a, b, c) in enumerate(coefficients):
        gram_SS = x_SL @ x_SL.mT
        polynomial_SS = torch.addmm(gram_SS, gram_SS, gram_SS, beta=b, alpha=c)
        x_SL = torch.addmm(x_SL, polynomial_SS, x_SL, beta=a, out=out_SL if step == last else None)


def iterate_batched(x_NSL: Tensor, coefficients: Coefficients) -> Tensor:
    """All iterations on N normalised matrices at once."""
    for a, b, c in coefficients:
        gram_NSS = x_NSL @ x_NSL.mT
        polynomial_NSS = torch.baddbmm(gram_NSS, gram_NSS, gram_NSS, beta=b, alpha=c)
        x_NSL = torch.baddbmm(x_NSL, polynomial_NSS, x_NSL, beta=a)
    return x_NSL


def orthogonalize(
    x_NSL: Tensor,
    coefficients: Coefficients,
    *,
    eps: float,
    dtype: torch.dtype,
    iterate: Callable[[Tensor, Coefficients], Tensor] | None = None,
) -> Tensor:
    """The approximate orthogonal factor of each matrix, in ``dtype``; ``x_NSL`` is not changed.

    Args:
        x_NSL: [N, S, L] with S <= L, any floating type.
        eps: lower bound of the Frobenius norm; a zero matrix stays zero.
        dtype: type of the products.
        iterate: the iteration on [N, S, L]; absent: batched or one by one, whichever is faster on this device.
    """
    if iterate is not None:
        return iterate(normalize(x_NSL, eps, dtype), coefficients)
    limit = stack_limit(x_NSL.shape[-2], x_NSL.shape[-1], dtype)
    if x_NSL.device.type != "cpu" or 1 < len(x_NSL) <= limit:
        return iterate_batched(normalize(x_NSL, eps, dtype), coefficients)
    out_NSL = torch.empty(x_NSL.shape, dtype=dtype)
    for out_nSL, x_nSL in zip(out_NSL.split(limit), x_NSL.split(limit), strict=True):
        if limit == 1 or len(x_nSL) == 1:
            iterate_into(out_nSL[0], normalize(x_nSL[0], eps, dtype), coefficients)
        else:
            out_nSL.copy_(iterate_batched(normalize(x_nSL, eps, dtype), coefficients))
    return out_NSL
