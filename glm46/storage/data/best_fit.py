"""Best-fit packing: rows of whole documents with almost no padding.

For long-context stages, where a reasoning trace or a repository must stay in one piece. A document that fits into a row
is never cut; a longer one is cut into full rows and a remainder. Source: Ding et al., arXiv 2404.10830, best-fit
decreasing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

# Documents packed as one group. Larger groups improve the fill by less than a thousandth.
_GROUP = 2**20


@dataclass(frozen=True)
class PackPlan:
    """Rows of pieces of documents.

    Attributes:
        row_starts: int64 [rows + 1], index of each row's first piece in the two other arrays, and the number of pieces.
        piece_starts: int64 [pieces], first token of the piece in the split.
        piece_lengths: int64 [pieces], tokens in the piece.
    """

    row_starts: np.ndarray
    piece_starts: np.ndarray
    piece_lengths: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1


def plan_groups(doc_ends: Iterable[np.ndarray], seq_len: int) -> Iterator[PackPlan]:
    """Pack all documents of a split into rows, group by group. Groups follow one another.

    Args:
        doc_ends: int64 [documents] per block: the exclusive end of each document in the split, ascending, no document
            empty.
        seq_len: tokens per row.
    """
    waiting = list[np.ndarray]([np.empty(0, np.int64), np.empty(0, np.int64)])
    before = 0
    for ends in doc_ends:
        if len(ends):
            cut = _cut(ends, before, seq_len)
            waiting = [*map(np.concatenate, zip(waiting, cut, strict=True))]
            before = int(ends[-1])
        while len(waiting[0]) >= _GROUP:
            yield _pack(waiting[0][:_GROUP], waiting[1][:_GROUP], seq_len)
            waiting = [waiting[0][_GROUP:], waiting[1][_GROUP:]]
    if len(waiting[0]):
        yield _pack(waiting[0], waiting[1], seq_len)


def concatenate(groups: Iterable[PackPlan]) -> PackPlan:
    """Concatenate plans into one."""
    groups = list(groups)
    empty = np.empty(0, np.int64)
    before = np.cumsum([0, *(len(group.piece_starts) for group in groups)])
    row_starts = [group.row_starts[1:] + first for group, first in zip(groups, before[:-1], strict=True)]
    return PackPlan(
        np.concatenate([np.zeros(1, np.int64), *row_starts]),
        np.concatenate([empty, *(group.piece_starts for group in groups)]),
        np.concatenate([empty, *(group.piece_lengths for group in groups)]),
    )


def _pack(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> PackPlan:
    rows, count = best_fit(lengths, seq_len)
    order = np.argsort(rows, kind="stable")
    row_starts = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=count))))
    return PackPlan(row_starts, starts[order], lengths[order])


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Assign pieces to rows, longest first, each to the fullest row that has room for it.

    The bits of one integer record which amounts of free space exist, so the tightest fit is the lowest set bit at or
    above the piece's length.

    Returns:
        The row of each piece, int64 [n], and the number of rows.
    """
    row_by_piece = np.empty(len(lengths), np.int64)
    is_full = lengths == capacity
    count = int(is_full.sum())
    row_by_piece[is_full] = np.arange(count)
    rows: list[list[int]] = [[] for _ in range(capacity)]  # by their free space
    spaces = 0
    order = np.argsort(-lengths, kind="stable")[count:]
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = rows[free].pop()
            if not rows[free]:
                spaces ^= 1 << free
        else:
            free = capacity
            row = count
            count += 1
        row_by_piece[piece] = row
        free -= length
        if free:
            rows[free].append(row)
            spaces |= 1 << free
    return row_by_piece, count


def _cut(doc_ends: np.ndarray, before: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of the pieces of documents that are cut every ``seq_len`` tokens.

    The first document begins at ``before``.
    """
    lengths = np.diff(doc_ends, prepend=before)
    counts = -(-lengths // seq_len)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(doc_ends - lengths, counts) + number * seq_len
    return starts, np.minimum(np.repeat(doc_ends, counts) - starts, seq_len)
