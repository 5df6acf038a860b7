"""The boxes of a Hugging Face tensor that a rank's part of one of our tensors holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch import Tensor

from glm46.files.tensor_file import Box
from glm46.storage.huggingface.names import HFPart

_MOST_ELEMENTS = 1 << 22
"""Elements of one box, at most. Temporary memory for it (another type, a GPU) is then small enough, also in FP32, for
the C library to reuse; larger boxes would get new memory from the kernel each time."""


@dataclass(frozen=True)
class Interval:
    """Indices of one dimension that are consecutive both in the local part and in the whole tensor."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class Overlap:
    """A box that the local part and a Hugging Face tensor share."""

    local: tuple[int | slice, ...]
    """Index of the box in the local part."""
    box: Box
    """The same values in the Hugging Face tensor."""


def intervals_of(index: Tensor) -> list[Interval]:
    """The intervals of a dimension. ``index``, int64 [local size], holds the global indices in local order."""
    if index.numel() == 0:
        return []
    breaks = (index[1:] != index[:-1] + 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], index.numel()]
    return [Interval(start, int(index[start]), end - start) for start, end in zip(starts, ends, strict=True)]


def overlaps(part: HFPart, intervals: Sequence[Sequence[Interval]]) -> Iterator[Overlap]:
    """All boxes that a Hugging Face tensor shares with a local part. ``intervals``: for each dimension of our tensor,
    the intervals that the local part holds."""
    stacked = len(part.start) - len(part.hf_shape)
    sizes = (1,) * stacked + part.hf_shape
    shared = [
        [_cut(one, start, size) for one in of_dim if one.whole < start + size and start < one.whole + one.length]
        for of_dim, start, size in zip(intervals, part.start, sizes, strict=True)
    ]
    for combination in product(*shared):
        lead, inner = combination[:stacked], combination[stacked:]
        rows_at_once = max(1, _MOST_ELEMENTS // prod(one.length for one in inner[1:]))
        for first in range(0, inner[0].length, rows_at_once):
            rows = min(rows_at_once, inner[0].length - first)
            cut = (Interval(inner[0].local + first, inner[0].whole + first, rows), *inner[1:])
            yield Overlap(
                local=tuple(one.local for one in lead) + tuple(slice(one.local, one.local + one.length) for one in cut),
                box=tuple((one.whole, one.length) for one in cut),
            )


def _cut(interval: Interval, start: int, size: int) -> Interval:
    """The part of an interval inside [start, start + size), with `whole` counted from `start`."""
    first, end = max(interval.whole, start), min(interval.whole + interval.length, start + size)
    return Interval(interval.local + first - interval.whole, first - start, end - first)
