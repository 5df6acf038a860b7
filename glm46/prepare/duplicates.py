"""Find duplicate documents in memory that does not grow with their number.

All steps are sorts, on disk where the memory setting is too small. Documents with equal keys are linked to the first of
them. Links of similar documents are then rearranged by the alternating large-star and small-star steps of Kiveris et
al. 2014 (Connected Components in MapReduce and Beyond), until each document is linked to the first of its component.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from glm46.data.shards import SHARD_REMEDY
from glm46.files.array_file import map_arrays
from glm46.prepare.document_hashes import BANDS
from glm46.prepare.sorting import SortedRecords, differ_from_last

# Sorts that hold memory at once: one being read, one being filled, one waiting to be read.
_SORTS_AT_ONCE = 3

NewSort = Callable[[int], SortedRecords]
"""Makes an empty `SortedRecords` with the given number of columns."""


class Duplicates:
    """The duplicates among the documents of all pieces, given piece by piece in their order."""

    def __init__(self, pieces: Sequence[Path], memory_bytes: int, folder: Path):
        """Find the duplicates.

        Args:
            pieces: files of `make_part`; similar documents are searched only if they hold ``bands``.
            memory_bytes: memory that this object may hold at any time.
            folder: for temporary files: about 32 bytes per document, and as many per duplicate.
        """

        def new_sort(columns: int) -> SortedRecords:
            return SortedRecords(columns, memory_bytes // _SORTS_AT_ONCE, folder)

        equal = new_sort(1)
        for documents, _ in links((map_arrays(piece, SHARD_REMEDY)[0]["hashes"].T for piece in pieces), new_sort):
            equal.add([documents])
        self._equal = _SortedNumbers(block[0] for block in equal)
        self._similar = _SortedNumbers(iter(()))
        if pieces and "bands" in map_arrays(pieces[0], SHARD_REMEDY)[0]:
            self._similar = _SortedNumbers(similar(lambda band: _band(pieces, band), new_sort))
        self._next = 0

    def take(self, documents: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the next ``documents`` equal an earlier one, and which are similar to one; bool each."""
        first, self._next = self._next, self._next + documents
        return self._equal.take(first, self._next), self._similar.take(first, self._next)


def similar(band: Callable[[int], Iterable[np.ndarray]], new_sort: NewSort) -> Iterator[np.ndarray]:
    """Yield the numbers of documents that are similar to an earlier one, directly or through others; ascending, uint64.

    Args:
        band: returns one band of all documents in order, in arrays uint64 [n]; called for one band at a time.
    """
    edges = new_sort(2)
    for number in range(BANDS):
        for documents, firsts in links((values[None] for values in band(number)), new_sort):
            _add_both_ways(edges, documents, firsts)
    moved = 1
    while moved:
        moved, edges = _star_steps(edges, new_sort)
    for document, other in edges:
        # Each duplicate has one edge to an earlier document: the first of its component.
        yield document[other < document]


def links(keys: Iterable[np.ndarray], new_sort: NewSort) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every document that has the key of an earlier one, and the first with that key; uint64 [n] each, unordered.

    Args:
        keys: of all documents in order, uint64 [columns, n] each.
    """
    records, first = None, 0
    for block in keys:
        records = records or new_sort(len(block) + 1)
        stop = first + block.shape[1]
        records.add([*block, np.arange(first, stop, dtype=np.uint64)])
        first = stop
    for _, documents, firsts in _with_firsts(records or ()):
        later = documents != firsts
        if later.any():
            yield documents[later], firsts[later]


def _star_steps(edges: SortedRecords, new_sort: NewSort) -> tuple[int, SortedRecords]:
    """One large-star and one small-star step. ``edges`` and the result hold each edge in both directions.

    Returns:
        The number of edges that were moved, and the new edges.
    """
    moved, large, small = 0, new_sort(2), new_sort(2)
    # Large star: link the later neighbours of each document to the first document around it.
    for (document,), other, lowest in _with_firsts(edges):
        behind = other > document
        document, other, lowest = document[behind], other[behind], lowest[behind]
        lowest = np.minimum(document, lowest)
        moved += int((lowest != document).sum())
        large.add([other, lowest])
    # Small star: link the earlier neighbours, and the document itself, to the first of them.
    for (document,), other, lowest in _with_firsts(large):
        is_lowest = other == lowest
        moved += len(is_lowest) - int(is_lowest.sum())
        _add_both_ways(small, np.where(is_lowest, document, other), lowest)
    return moved, small


def _add_both_ways(edges: SortedRecords, one: np.ndarray, two: np.ndarray) -> None:
    edges.add([one, two])
    edges.add([two, one])


def _with_firsts(blocks: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield keys and values of sorted records, and for each the value of the first record with its key.

    The last column of a block holds the values, the columns before it the keys.
    """
    last: tuple[np.ndarray, np.uint64] | None = None
    for block in blocks:
        keys, values = block[:-1], block[-1]
        starts = np.concatenate(([0], np.flatnonzero(differ_from_last(keys)) + 1))
        firsts = np.repeat(values[starts], np.diff(starts, append=len(values)))
        if last is not None and np.array_equal(keys[:, 0], last[0]):
            firsts[: starts[1] if len(starts) > 1 else None] = last[1]
        last = keys[:, -1].copy(), firsts[-1]
        yield keys, values, firsts


def _band(pieces: Sequence[Path], band: int) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield map_arrays(piece, SHARD_REMEDY)[0]["bands"][band]


class _SortedNumbers:
    """Ascending numbers, read range by range."""

    def __init__(self, blocks: Iterator[np.ndarray]):
        self._blocks, self._rest = blocks, np.empty(0, np.uint64)

    def take(self, first: int, stop: int) -> np.ndarray:
        """Return which numbers of the next range are present, bool [stop - first]."""
        found = np.zeros(stop - first, bool)
        while True:
            count = int(np.searchsorted(self._rest, np.uint64(stop)))
            found[self._rest[:count].astype(np.int64) - first] = True
            self._rest = self._rest[count:]
            if len(self._rest) or (block := next(self._blocks, None)) is None:
                return found
            self._rest = block
