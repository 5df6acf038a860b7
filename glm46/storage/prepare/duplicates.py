"""Find duplicate documents in memory that does not grow with their number.

The keys of all documents are read several times, each time for another part of the possible keys, as many as fit into
memory. Groups of similar documents are joined in a table of the first known document of each group, a mapped file.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from glm46.files.array_file import map_arrays
from glm46.storage.data.shards import SHARD_REMEDY
from glm46.storage.prepare.document_hashes import BANDS

# Bytes that `links` and the reader of its results need per key that is held: measured, then rounded up.
_KEY_BYTES = 200

Keys = Callable[[], Iterable[np.ndarray]]
"""Returns one or more keys of all documents in order, in arrays uint64 [keys, n]; called once for each reading."""


class Duplicates:
    """The duplicates among the documents of all pieces, given piece by piece in their order."""

    def __init__(self, pieces: Sequence[Path], memory_bytes: int, folder: Path):
        """Find the duplicates.

        Args:
            pieces: files of `make_part`; similar documents are searched only if they hold ``bands``.
            memory_bytes: memory that this object may hold at any time, besides mapped files.
            folder: for mapped files without a name, 8 bytes per document.

        Raises:
            OSError: the disk is full.
        """

        def tensors(name: str) -> Iterator[np.ndarray]:
            return (map_arrays(piece, SHARD_REMEDY)[0][name] for piece in pieces)

        capacity, documents = memory_bytes // _KEY_BYTES, sum(map(len, tensors("hashes")))
        self._equal, self._similar = numbers_on_disk(documents, folder), numbers_on_disk(documents, folder)
        for later, firsts in links(lambda: (hashes.T for hashes in tensors("hashes")), documents, capacity):
            self._equal[later] = firsts
        if pieces and "bands" in map_arrays(pieces[0], SHARD_REMEDY)[0]:
            for band in range(BANDS):
                keys = lambda band=band: (bands[band : band + 1] for bands in tensors("bands"))  # noqa: E731
                for later, firsts in links(keys, documents, capacity):
                    join(self._similar, later, firsts)
        self._next = 0

    def take(self, documents: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the next ``documents`` equal an earlier one, and which are similar to one, directly or
        through others; bool each."""
        here = slice(self._next, self._next + documents)
        self._next += documents
        numbers = np.arange(here.start, here.stop)
        return self._equal[here] != numbers, self._similar[here] != numbers


def numbers_on_disk(count: int, folder: Path | None) -> np.ndarray:
    """The numbers from 0 on in a mapped file, uint32 [count]. The system deletes the file with the process.

    The file is written before it is mapped: a write to a mapped page for which the disk has no room kills the process.
    """
    if not count:
        return np.empty(0, np.uint32)
    with tempfile.TemporaryFile(dir=folder) as file:
        for start in range(0, count, 2**16):
            file.write(np.arange(start, min(start + 2**16, count), dtype=np.uint32).data)
        file.flush()
        return np.memmap(file, np.uint32, "r+", shape=(count,)).view(np.ndarray)


def links(keys: Keys, documents: int, capacity: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield documents that have the keys of an earlier one, and the first with those keys; uint64 [n] each, unordered.

    Args:
        capacity: keys to hold at once. Many documents with equal keys need no more than one.
    """
    capacity = max(capacity, 1)
    # A quarter of the room is for keys that turn out to be known.
    readings = max(1, -(-4 * documents // (3 * capacity)))
    for reading in range(readings):
        held, start = [], 0
        for block in keys():
            numbers = np.arange(start, start + block.shape[1], dtype=np.uint64)
            chosen = block[0] % np.uint64(readings) == reading
            held.append(np.concatenate((block[:, chosen], numbers[None, chosen])))
            start += len(numbers)
            if sum(records.shape[1] for records in held) > capacity:
                known, later, firsts = _known(held)
                held = [known]
                yield later, firsts
        if held:
            yield _known(held)[1:]


def _known(held: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first record with each key, the documents of all other records, and the first document with their
    key. The last row of the records holds the documents."""
    records = np.concatenate(held, axis=1)
    records = records[:, np.lexsort(records[::-1])]
    is_first = np.ones(records.shape[1], bool)
    is_first[1:] = (records[:-1, 1:] != records[:-1, :-1]).any(axis=0)
    firsts = records[-1, is_first][np.cumsum(is_first) - 1]
    return records[:, is_first], records[-1, ~is_first], firsts[~is_first]


def join(firsts: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Join the groups of documents pair by pair.

    Args:
        firsts: for each document an earlier one of its group, or itself if it is the first; changed in place.
        one, other: integers [n], the pairs.
    """
    while len(one):
        one, other = _first_of_group(firsts, one), _first_of_group(firsts, other)
        apart = one != other
        one, other = np.maximum(one, other)[apart], np.minimum(one, other)[apart]
        # Of several groups to join, the earliest wins; the next round joins the others.
        np.minimum.at(firsts, one, other)


def _first_of_group(firsts: np.ndarray, documents: np.ndarray) -> np.ndarray:
    while True:
        nearer = firsts[documents]
        further = firsts[nearer]
        if np.array_equal(nearer, further):
            return nearer
        firsts[documents] = further
