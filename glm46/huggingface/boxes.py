"""Which piece of a Hugging Face tensor a rank's part of one of our tensors holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from glm46.files.tensor_file import Box
from glm46.huggingface.names import HFPart

_MOST_ELEMENTS = 1 << 22
"""Elements of a piece. What passes through memory on its way (another type, a GPU) is then small enough, also in FP32,
for the C library to use the same memory again; larger pieces would each get new memory from the kernel."""


@dataclass(frozen=True)
class Interval:
    """Places that lie behind each other both in the local part and in the whole tensor."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class Overlap:
    """A box that the local part and a Hugging Face tensor share."""

    local: tuple[int | slice, ...]
    """What to index the local part with."""
    box: Box
    """The same values in the Hugging Face tensor."""


def intervals_of(index: Tensor) -> list[Interval]:
    """The runs of a dimension.

    Args:
        index: int64 [local size]: global places in local order.
    """
    if index.numel() == 0:
        return []
    breaks = (index[1:] != index[:-1] + 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], index.numel()]
    return [Interval(start, int(index[start]), end - start) for start, end in zip(starts, ends, strict=True)]


def overlaps(part: HFPart, runs: list[list[Interval]]) -> Iterator[Overlap]:
    """Every box that the part shares with the local part whose runs are given for each dimension of our tensor."""
    stacked = len(part.start) - len(part.hf_shape)
    sizes = (1,) * stacked + part.hf_shape
    shared = [
        [_cut(run, start, size) for run in of_dim if run.whole < start + size and start < run.whole + run.length]
        for of_dim, start, size in zip(runs, part.start, sizes, strict=True)
    ]
    for combination in product(*shared):
        lead, inner = combination[:stacked], combination[stacked:]
        row_elements = 1
        for run in inner[1:]:
            row_elements *= run.length
        rows_at_once = max(1, _MOST_ELEMENTS // row_elements)
        for first in range(0, inner[0].length, rows_at_once):
            rows = min(rows_at_once, inner[0].length - first)
            cut = (Interval(inner[0].local + first, inner[0].whole + first, rows), *inner[1:])
            yield Overlap(
                local=tuple(run.local for run in lead) + tuple(slice(r.local, r.local + r.length) for r in cut),
                box=tuple((run.whole, run.length) for run in cut),
            )


def _cut(run: Interval, start: int, size: int) -> Interval:
    """The part of a run inside [start, start + size), with places counted from `start`."""
    first, end = max(run.whole, start), min(run.whole + run.length, start + size)
    return Interval(run.local + first - run.whole, first - start, end - first)
