"""Hashes of documents and of their n-grams of tokens, and the duplicates among documents.

Similar documents: MinHash over n-grams, in bands (arXiv math/9903042; Broder 1997). Two documents whose sets of n-grams
have Jaccard similarity s agree in some band with probability 1 - (1 - s^rows)^bands, which is 0.5 at s = 0.72.

Duplicates are found in memory that does not grow with the number of documents. The keys of all documents are read
several times, each time for another part of the key space that fits into memory. Groups of similar documents are joined
in a table of the first known document of each group, a mapped file.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from glm46.files.array_file import map_arrays
from glm46.storage.data.mixing import GOLDEN_GAMMA, MIX_1
from glm46.storage.data.shards import SHARD_REMEDY

# Fourteen bands of eight rows, as in datatrove and FineWeb.
BANDS = 14
ROWS = 8
NGRAM_TOKENS = 8

# Any fixed odd factors work. Changing them changes which documents count as similar: raise `pipeline.PIPELINE` then.
_RNG = np.random.Generator(np.random.PCG64(20260101))
_FACTORS = _RNG.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32) | np.uint32(1)
_OFFSETS = _RNG.integers(0, 2**32, BANDS * ROWS, dtype=np.uint32)
# Buckets of document hashes; the documents of the first ones are held out.
_BUCKETS = 10_000
# N-grams hashed at once: the table of all hash functions over them fits into the processor's cache.
_BLOCK = 512


def ngram_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Hash each n-gram of ``length`` tokens, uint64 [n - length + 1]; a shorter document as one n-gram, uint64 [1]."""
    length = min(length, len(tokens))
    hashes = np.zeros(len(tokens) - length + 1, np.uint64)
    for i in range(length):
        hashes *= GOLDEN_GAMMA
        hashes += tokens[i : i + len(hashes)]
    # Without mixing, the low bits would depend on the low bits of the tokens only.
    hashes ^= hashes >> np.uint64(32)
    hashes *= MIX_1
    return hashes ^ (hashes >> np.uint64(29))


def band_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return the MinHash bands of one document, uint64 [BANDS]. ``tokens`` uint32 [n], n > 0, without the end token."""
    ngrams = (ngram_hashes(tokens, NGRAM_TOKENS) >> np.uint64(32)).astype(np.uint32)
    minima = np.full(BANDS * ROWS, np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(ngrams), _BLOCK):
        block = ngrams[None, start : start + _BLOCK] * _FACTORS[:, None]
        block += _OFFSETS[:, None]
        np.minimum(minima, block.min(axis=1), out=minima)
    rows = minima.reshape(BANDS, ROWS)
    bands = np.zeros(BANDS, np.uint64)
    for row in range(ROWS):
        bands = bands * GOLDEN_GAMMA + rows[:, row]
    return bands


def is_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Return which documents are held out for validation, bool [d], by the first half of their hashes, uint64 [d]."""
    return hashes % np.uint64(_BUCKETS) < round(share * _BUCKETS)


# Bytes that `links` and the consumer of its results need per key in memory: measured, then rounded up.
_KEY_BYTES = 200

Keys = Callable[[], Iterable[np.ndarray]]
"""Function that returns one or more keys of all documents in order, in arrays uint64 [keys, n]; called once for each
pass."""


class Duplicates:
    """Duplicates among the documents of all pieces, returned piece by piece in their order."""

    def __init__(self, pieces: Sequence[Path], memory_bytes: int, folder: Path):
        """Find the duplicates.

        Args:
            pieces: files of `make_part`; similar documents are searched only if they hold ``bands``.
            memory_bytes: memory that this object may hold at any time, without mapped files.
            folder: folder for unnamed mapped files, 8 bytes per document.

        Raises:
            OSError: the disk is full.
        """

        def tensors(name: str) -> Iterator[np.ndarray]:
            return (map_arrays(piece, SHARD_REMEDY)[0][name] for piece in pieces)

        capacity = memory_bytes // _KEY_BYTES
        documents = sum(map(len, tensors("hashes")))
        self._equal = numbers_on_disk(documents, folder)
        self._similar = numbers_on_disk(documents, folder)
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
        window = slice(self._next, self._next + documents)
        self._next += documents
        numbers = np.arange(window.start, window.stop)
        return self._equal[window] != numbers, self._similar[window] != numbers


def numbers_on_disk(count: int, folder: Path | None) -> np.ndarray:
    """Return the numbers 0, 1, ... in a mapped file, uint32 [count]. The system deletes the file with the process.

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
        capacity: number of keys to hold at once. Documents with equal keys count once.
    """
    capacity = max(capacity, 1)
    # A quarter of the capacity is for keys that turn out to be duplicates.
    readings = max(1, -(-4 * documents // (3 * capacity)))
    for reading in range(readings):
        held = []
        start = 0
        for block in keys():
            numbers = np.arange(start, start + block.shape[1], dtype=np.uint64)
            chosen = block[0] % np.uint64(readings) == reading
            held.append(np.concatenate((block[:, chosen], numbers[None, chosen])))
            start += len(numbers)
            if sum(records.shape[1] for records in held) > capacity:
                distinct, later, firsts = _sort_by_key(held)
                held = [distinct]
                yield later, firsts
        if held:
            yield _sort_by_key(held)[1:]


def _sort_by_key(held: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first record with each key, the documents of all other records, and the first document with their
    key. The last row of the records holds the documents."""
    records = np.concatenate(held, axis=1)
    records = records[:, np.lexsort(records[::-1])]
    is_first = np.ones(records.shape[1], bool)
    is_first[1:] = (records[:-1, 1:] != records[:-1, :-1]).any(axis=0)
    firsts = records[-1, is_first][np.cumsum(is_first) - 1]
    return records[:, is_first], records[-1, ~is_first], firsts[~is_first]


def join(firsts: np.ndarray, documents: np.ndarray, partners: np.ndarray) -> None:
    """Join the groups of documents pair by pair.

    Args:
        firsts: for each document an earlier document of its group, or itself if it is the first; changed in place.
        documents, partners: integers [n], the pairs.
    """
    while len(documents):
        documents = _first_of_group(firsts, documents)
        partners = _first_of_group(firsts, partners)
        apart = documents != partners
        later = np.maximum(documents, partners)[apart]
        earlier = np.minimum(documents, partners)[apart]
        documents = later
        partners = earlier
        # Of several groups to join, the earliest wins; the next round joins the others.
        np.minimum.at(firsts, documents, partners)


def _first_of_group(firsts: np.ndarray, documents: np.ndarray) -> np.ndarray:
    while True:
        nearer: np.ndarray = firsts[documents]
        further = firsts[nearer]
        if np.array_equal(nearer, further):
            return nearer
        firsts[documents] = further
