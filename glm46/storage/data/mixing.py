"""The order of samples as pure functions of the global sample number, without state.

`mix` gives the source of each sample of a mixture, and its index within that source. `permute` gives the sample at an
index, in a random order that needs no table. `loader` calls `source_and_sample`, which does both.
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

# Rounds of the Feistel network. With fewer, the permutations of a few elements are not equally frequent. Changing it
# changes the order of samples.
_ROUNDS = 6

# Increment and multipliers of SplitMix64, used here as odd factors of hashes. Source: Steele, Lea, Flood, OOPSLA 2014.
# Changing them changes the order of samples (`_feistel`), the documents of a range of shares (`packing`) and the
# documents that count as similar (`duplicates`).
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Return integers that sum to `WEIGHT_TOTAL`, each within one of its exact share (largest remainders).

    Raises:
        UserError: there are no weights, a weight is not positive and finite, or its integer is 0. Below a millionth of
            the sum that depends on the other weights.
    """
    if not weights or any(not (math.isfinite(weight) and weight > 0) for weight in weights):
        raise UserError(f"data.sources: weights {list(weights)}; each must be positive and finite; remove the others")
    exact = [weight / math.fsum(weights) * WEIGHT_TOTAL for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: WEIGHT_TOTAL - sum(whole)]:
        whole[i] += 1
    if 0 in whole:
        raise UserError(
            f"data.sources[{whole.index(0)}].weight = {weights[whole.index(0)]}: rounds to no millionth of the "
            "sum; remove the source, or raise its weight"
        )
    return whole


def mix(numbers: np.ndarray, weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sample, and the number of earlier samples of the same source.

    The sources divide the samples in turn, heaviest first. Of the numbers that no earlier source took, counted from 0,
    number n goes to this source if round(share of the later sources * n) has the same value at n + 1. Every prefix of
    a mixture of up to eight sources holds each of them within two samples of its exact share; with more sources the
    deviation can be larger, because each division rounds again. Heaviest first, because a division multiplies the
    earlier rounding errors by the share of the later sources, and that share is then smallest.

    Args:
        numbers: int64 [n], global sample numbers, non-negative.
        weights: integers with a sum of at most `WEIGHT_TOTAL`.

    Returns:
        source int64 [n], index int64 [n].

    Source: the recursive division of Grain's mixture, with different rounding and order.
    """
    source = np.full(numbers.shape, -1, np.int64)
    index = np.zeros(numbers.shape, np.int64)
    divided_before = _divided(numbers.astype(np.int64), weights)
    divided_after = _divided(numbers.astype(np.int64) + 1, weights)
    for (i, before, later_before), (_, after, later_after) in zip(divided_before, divided_after, strict=True):
        # Counted here, so no earlier source took the sample, and not counted for the later sources.
        is_taken = (before != after) & (later_before == later_after)
        source[is_taken] = i
        index[is_taken] = (before - later_before)[is_taken]
    return source, index


def samples_by_source(count: int, weights: Sequence[int]) -> list[int]:
    """Return how many of the first ``count`` samples of `mix` come from each source."""
    in_order_of_sources = sorted(_divided(count, weights))
    return [remaining - later for _, remaining, later in in_order_of_sources]


def _divided(count: _Count, weights: Sequence[int]) -> Iterator[tuple[int, _Count, _Count]]:
    """Yield, for each source, heaviest first, its index and two counts: how many of the first ``count`` samples it and
    the later sources take, and how many the later sources take. ``count`` is an int, or int64 [n]."""
    remaining_weight = sum(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        later_weight = remaining_weight - weights[i]
        later_count = (count * later_weight + remaining_weight // 2) // remaining_weight  # rounded to nearest
        yield i, count, later_count
        remaining_weight = later_weight
        count = later_count


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
        next_lower = upper ^ ((mixed >> np.uint64(32)) & mask)
        upper = lower
        lower = next_lower
    return (upper << shift) | lower


def source_and_sample(
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
            in_epoch = positions[epochs == epoch]
            sample[in_epoch] = permute(index[in_epoch] - epoch * size, size, f"{seed}/{name}/{epoch}")
    return source, sample
