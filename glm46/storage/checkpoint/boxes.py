"""The parts of a stored tensor that belong to a rank's local part of one of our tensors, as boxes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch import Tensor

from glm46.files.tensor_file import Box

_MOST_ELEMENTS = 1 << 22
"""Maximum number of elements of one box. Temporary memory for it (another type, a GPU) is then small enough, also in
FP32, for the C library to reuse; larger boxes would get new memory from the kernel each time."""


@dataclass(frozen=True)
class Interval:
    """Indices of one dimension that are consecutive both in the local part and in the full tensor."""

    local: int
    """First index in the local part."""
    whole: int
    """First index in the full tensor."""
    length: int


@dataclass(frozen=True)
class SharedBox:
    """A box that the local part and a stored tensor share."""

    local: tuple[int | slice, ...]
    """Index of the box in the local part."""
    box: Box
    """The same values in the stored tensor."""


def intervals_of(index: Tensor) -> list[Interval]:
    """Split a dimension into intervals. ``index``, int64 [local size], holds the global indices in local order."""
    if index.numel() == 0:
        return []
    breaks = (index[1:] != index[:-1] + 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], index.numel()]
    return [Interval(start, int(index[start]), end - start) for start, end in zip(starts, ends, strict=True)]


def overlaps(
    start: Sequence[int], shape: tuple[int, ...], intervals: Sequence[Sequence[Interval]]
) -> Iterator[SharedBox]:
    """Yield all boxes that a stored tensor shares with a local part.

    Args:
        start: index in our tensor of the stored tensor's first element.
        shape: shape of the stored tensor, which may lack the first dimensions of our tensor.
        intervals: for each dimension of our tensor, the intervals that the local part holds.
    """
    stacked = len(start) - len(shape)  # dimensions that the stored tensor lacks, such as that of the experts
    sizes = (1,) * stacked + shape
    shared_by_dim = [
        [
            _cut(interval, first, size)
            for interval in dim_intervals
            if interval.whole < first + size and first < interval.whole + interval.length
        ]
        for dim_intervals, first, size in zip(intervals, start, sizes, strict=True)
    ]
    for combination in product(*shared_by_dim):
        lead = combination[:stacked]
        inner = combination[stacked:]
        rows_at_once = max(1, _MOST_ELEMENTS // prod(interval.length for interval in inner[1:]))
        for first in range(0, inner[0].length, rows_at_once):
            rows = min(rows_at_once, inner[0].length - first)
            cut = (Interval(inner[0].local + first, inner[0].whole + first, rows), *inner[1:])
            yield SharedBox(
                local=tuple(interval.local for interval in lead)
                + tuple(slice(interval.local, interval.local + interval.length) for interval in cut),
                box=tuple((interval.whole, interval.length) for interval in cut),
            )


def _cut(interval: Interval, start: int, size: int) -> Interval:
    """Return the part of an interval inside [start, start + size), with `whole` counted from `start`."""
    first = max(interval.whole, start)
    end = min(interval.whole + interval.length, start + size)
    return Interval(interval.local + first - interval.whole, first - start, end - first)
