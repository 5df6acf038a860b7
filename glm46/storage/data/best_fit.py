"""Best-fit packing: rows of whole documents with almost no padding.

For long-context stages, where a reasoning trace or a repository must stay in one piece. A document that fits into a row
is never cut; a longer one is cut into full rows and a remainder. Source: Ding et al., arXiv 2404.10830, best-fit
decreasing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

# Pieces packed as one group. Larger groups improve the fill by less than a thousandth.
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
    starts = np.empty(0, np.int64)  # of the pieces that wait for a full group
    lengths = np.empty(0, np.int64)
    previous_end = 0
    for ends in doc_ends:
        if len(ends):
            new_starts, new_lengths = _cut(ends, previous_end, seq_len)
            starts = np.concatenate([starts, new_starts])
            lengths = np.concatenate([lengths, new_lengths])
            previous_end = int(ends[-1])
        while len(starts) >= _GROUP:
            yield _pack(starts[:_GROUP], lengths[:_GROUP], seq_len)
            starts = starts[_GROUP:]
            lengths = lengths[_GROUP:]
    if len(starts):
        yield _pack(starts, lengths, seq_len)


def concatenate(groups: Iterable[PackPlan]) -> PackPlan:
    """Concatenate plans into one."""
    groups = list(groups)
    empty = np.empty(0, np.int64)
    pieces_before = np.cumsum([0, *(len(group.piece_starts) for group in groups)])[:-1]
    row_starts = [group.row_starts[1:] + before for group, before in zip(groups, pieces_before, strict=True)]
    return PackPlan(
        np.concatenate([np.zeros(1, np.int64), *row_starts]),
        np.concatenate([empty, *(group.piece_starts for group in groups)]),
        np.concatenate([empty, *(group.piece_lengths for group in groups)]),
    )


def _pack(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> PackPlan:
    row_by_piece, num_rows = best_fit(lengths, seq_len)
    order = np.argsort(row_by_piece, kind="stable")
    row_starts = np.concatenate(([0], np.cumsum(np.bincount(row_by_piece, minlength=num_rows))))
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
    num_rows = int(is_full.sum())
    row_by_piece[is_full] = np.arange(num_rows)
    rows_by_free: list[list[int]] = [[] for _ in range(capacity)]
    free_bits = 0
    order = np.argsort(-lengths, kind="stable")[num_rows:]  # without the full pieces
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = free_bits >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                free_bits ^= 1 << free
        else:
            free = capacity
            row = num_rows
            num_rows += 1
        row_by_piece[piece] = row
        free -= length
        if free:
            rows_by_free[free].append(row)
            free_bits |= 1 << free
    return row_by_piece, num_rows


def _cut(doc_ends: np.ndarray, previous_end: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of the pieces of documents that are cut every ``seq_len`` tokens.

    The first document begins at ``previous_end``.
    """
    lengths = np.diff(doc_ends, prepend=previous_end)
    pieces = -(-lengths // seq_len)
    index_in_document = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(doc_ends - lengths, pieces) + index_in_document * seq_len
    return starts, np.minimum(np.repeat(doc_ends, pieces) - starts, seq_len)
