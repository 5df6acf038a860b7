"""Which sample comes at which place: pure functions of the global sample number, with nothing to remember.

`mix` says which source the g-th sample of a mixture comes from and how many of that source came before.
`permute` says which sample of the source that is, in a random order that needs no table.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from glm46.config.errors import UserError

# Integer weights sum to this. `mix` multiplies it with the sample number in 64 bits: good up to 9e12 samples.
WEIGHT_TOTAL = 10**6

_ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `WEIGHT_TOTAL`, each within one of its exact share (largest remainders).

    Raises:
        UserError: no weight, a weight that is not positive and finite, or one too small to be kept.
    """
    if not weights or any(not (math.isfinite(w) and w > 0) for w in weights):
        raise UserError(f"data.sources: weights {list(weights)}; each must be positive and finite; leave others out")
    exact = [w / math.fsum(weights) * WEIGHT_TOTAL for w in weights]
    whole = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: WEIGHT_TOTAL - sum(whole)]:
        whole[i] += 1
    if 0 in whole:
        raise UserError(
            f"data.sources[{whole.index(0)}].weight = {weights[whole.index(0)]}: below a millionth of the sum; "
            "leave the source out or raise its weight"
        )
    return whole


def mix(numbers: np.ndarray, weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Source of each sample, and the count of earlier samples of the same source.

    Every prefix of a mixture of up to eight sources holds each of them within two samples of its exact share. Source
    by source, of the numbers that are left, one takes those at which the rounded quota of the others stands still. The
    heaviest chooses first: a rounding error is passed on in proportion to what is left, and so fades.

    Args:
        numbers: int64 [n], global sample numbers, non-negative.
        weights: integers with a sum of at most `WEIGHT_TOTAL`.

    Returns:
        source int64 [n], index int64 [n].

    Source: the recursive division of Grain's mixture, with rounding and an order of its own.
    """
    remaining = sum(weights)
    low, high = numbers.astype(np.int64), numbers.astype(np.int64) + 1
    source, index = np.full(low.shape, -1, np.int64), np.zeros(low.shape, np.int64)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        others = remaining - weights[i]
        low_left, high_left = ((n * others + remaining // 2) // remaining for n in (low, high))
        taken = (low_left == high_left) & (low != high) & (source < 0)
        source[taken], index[taken] = i, (low - low_left)[taken]
        remaining, low, high = others, low_left, high_left
    return source, index


def taken(count: int, weights: Sequence[int]) -> list[int]:
    """How many of the first ``count`` samples of `mix` come from each source."""
    remaining, left, counts = sum(weights), count, [0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        others = remaining - weights[i]
        left_behind = (left * others + remaining // 2) // remaining
        counts[i], remaining, left = left - left_behind, others, left_behind
    return counts


def permute(indices: np.ndarray, size: int, key: str) -> np.ndarray:
    """A random permutation of range(size), evaluated at ``indices`` only.

    A Feistel network over the next power of four, walked until it falls below ``size``; a bijection for any key.

    Args:
        indices: int64 [n] in [0, size).
        size: length of the permutation, below 2**62.
        key: any text; another text is another permutation.

    Returns:
        int64 [n].
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = indices.astype(np.uint64)
    out = values.copy()
    todo = np.arange(len(values))
    while len(todo):
        values = _feistel(values, shift, mask, round_keys)
        inside = values < np.uint64(size)
        out[todo[inside]] = values[inside]
        todo, values = todo[~inside], values[~inside]
    return out.astype(np.int64)


def _feistel(values: np.ndarray, shift: np.uint64, mask: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    left, right = values >> shift, values & mask
    for key in round_keys:
        # Multiplication carries upwards only, so the upper half of the product is the well mixed one.
        mixed = (right + key) * _MULTIPLIER
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MULTIPLIER
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << shift) | right


def order(
    numbers: np.ndarray, weights: Sequence[int], names: Sequence[str], sizes: Sequence[int], seed: int,
    before: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Source and sample within it for each global sample number of a mixture.

    Each source is passed through completely, in an order of its own per pass, before its next pass begins.

    Args:
        numbers: int64 [n], global sample numbers.
        weights: from `integer_weights`.
        names: of the sources; a name, not a place in the list, decides the order within a source.
        sizes: samples per pass of each source.
        seed: of the run.
        before: samples of each source that were read before number 0; empty: none.

    Returns:
        source int64 [n], sample int64 [n].
    """
    source, index = mix(numbers, weights)
    if before:
        index += np.asarray(before, np.int64)[source]
    sample = np.empty_like(index)
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        mine = np.flatnonzero(source == i)
        epochs = index[mine] // size
        for epoch in np.unique(epochs):
            at = mine[epochs == epoch]
            sample[at] = permute(index[at] - epoch * size, size, f"{seed}/{name}/{epoch}")
    return source, sample
