"""The order of samples as pure functions of the global sample number, without state.

`mix` gives the source of each sample of a mixture, and its index within that source. `permute` gives the sample at an
index, in a random order that needs no table.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from glm46.config.errors import UserError

# Sum of integer weights. `mix` multiplies it with the sample number in 64 bits, which is exact up to 9e12 samples.
WEIGHT_TOTAL = 10**6

_Count = TypeVar("_Count", int, np.ndarray)

_ROUNDS = 6

# Increment and multipliers of SplitMix64. Source: Steele, Lea, Flood, OOPSLA 2014. Changing them changes the order of
# samples, the documents of a range of shares, and the documents that count as similar.
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Return integers that sum to `WEIGHT_TOTAL`, each within one of its exact share (largest remainders). Raises
    UserError if there are no weights, or a weight is not positive and finite or is below a millionth of the sum."""
    if not weights or any(not (math.isfinite(w) and w > 0) for w in weights):
        raise UserError(f"data.sources: weights {list(weights)}; each must be positive and finite; remove the others")
    exact = [w / math.fsum(weights) * WEIGHT_TOTAL for w in weights]
    whole = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: WEIGHT_TOTAL - sum(whole)]:
        whole[i] += 1
    if 0 in whole:
        raise UserError(
            f"data.sources[{whole.index(0)}].weight = {weights[whole.index(0)]}: below a millionth of the sum; "
            "remove the source, or raise its weight"
        )
    return whole


def mix(numbers: np.ndarray, weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sample, and the number of earlier samples of the same source.

    Every prefix of a mixture of up to eight sources holds each of them within two samples of its exact share. Each
    source in turn takes the remaining numbers at which the rounded quota of the later sources does not grow. The
    heaviest source is first, because a rounding error shrinks with each share that it is passed to.

    Args:
        numbers: int64 [n], global sample numbers, non-negative.
        weights: integers with a sum of at most `WEIGHT_TOTAL`.

    Returns:
        source int64 [n], index int64 [n].

    Source: the recursive division of Grain's mixture, with different rounding and order.
    """
    source = np.full(numbers.shape, -1, np.int64)
    index = np.zeros(numbers.shape, np.int64)
    bounds = (numbers.astype(np.int64), numbers.astype(np.int64) + 1)
    for (i, low, low_rest), (_, high, high_rest) in zip(*(_divided(bound, weights) for bound in bounds), strict=True):
        is_taken = (low_rest == high_rest) & (low != high) & (source < 0)
        source[is_taken] = i
        index[is_taken] = (low - low_rest)[is_taken]
    return source, index


def taken(count: int, weights: Sequence[int]) -> list[int]:
    """Return how many of the first ``count`` samples of `mix` come from each source."""
    return [before - rest for _, before, rest in sorted(_divided(count, weights))]


def _divided(count: _Count, weights: Sequence[int]) -> Iterator[tuple[int, _Count, _Count]]:
    """Yield, for each source, heaviest first, its index and two counts: how many of the first ``count`` samples it and
    the later sources take, and how many the later sources take. ``count`` is an int, or int64 [n]."""
    remaining = sum(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        others = remaining - weights[i]
        rest = (count * others + remaining // 2) // remaining
        yield i, count, rest
        remaining = others
        count = rest


def permute(indices: np.ndarray, size: int, key: str) -> np.ndarray:
    """Evaluate a random permutation of range(size) at ``indices``.

    A Feistel network over the next power of four, applied again to each value that is not below ``size``. It is a
    bijection for any key.

    Args:
        indices: int64 [n] in [0, size).
        size: length of the permutation, below 2**62.
        key: any text; selects the permutation.

    Returns:
        int64 [n].
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = indices.astype(np.uint64)
    out = values.copy()
    todo = np.arange(len(values))
    while len(todo):
        values = _feistel(values, shift, mask, round_keys)
        inside = values < np.uint64(size)
        out[todo[inside]] = values[inside]
        todo = todo[~inside]
        values = values[~inside]
    return out.astype(np.int64)


def _feistel(values: np.ndarray, shift: np.uint64, mask: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    upper = values >> shift
    lower = values & mask
    for key in round_keys:
        # Multiplication carries upwards only, so the upper half of the product is mixed best.
        mixed = (lower + key) * GOLDEN_GAMMA
        mixed = (mixed ^ (mixed >> np.uint64(29))) * GOLDEN_GAMMA
        upper, lower = lower, upper ^ ((mixed >> np.uint64(32)) & mask)
    return (upper << shift) | lower


def order(
    numbers: np.ndarray,
    weights: Sequence[int],
    names: Sequence[str],
    sizes: Sequence[int],
    seed: int,
    before: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each global sample number of a mixture, and the sample within it.

    Each pass over a source has its own order and reads every sample before the next pass begins.

    Args:
        numbers: int64 [n], global sample numbers.
        weights: from `integer_weights`.
        names: names of the sources; the name, not the index, decides the order within a source.
        sizes: samples per pass of each source.
        seed: seed of the run.
        before: samples of each source that were read before number 0; empty means none.

    Returns:
        source int64 [n], sample int64 [n].
    """
    source, index = mix(numbers, weights)
    if before:
        index += np.asarray(before, np.int64)[source]
    sample = np.empty_like(index)
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        positions = np.flatnonzero(source == i)
        epochs = index[positions] // size
        for epoch in np.unique(epochs):
            at = positions[epochs == epoch]
            sample[at] = permute(index[at] - epoch * size, size, f"{seed}/{name}/{epoch}")
    return source, sample
