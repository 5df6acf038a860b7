"""Ranges of objects on the local disk: of a file that is a link to a URL, only the blocks that are needed are fetched.

The blocks lie in a sparse file outside the folder of the link, so that a program that knows nothing of it finds no file
instead of one with holes. Next to it, ``NAME.have`` has a byte for each block: odd if the block is there. The processes
of a machine share both through memory maps. In a bounded cache whole files are emptied when it is full; a reader looks
at the bytes of its blocks before and after it reads, and reads again if they have changed.
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from glm46.files.block_digests import BLOCK_BYTES, DIGEST_BYTES, first_other_block
from glm46.files.store import OBJECTS_AT_ONCE, StoreError, linked_object
from glm46.files.store_links import BLOCKS_OF_REQUEST, LIMIT, data_of, digests_of, have_of, limited_sizes, store_of
from glm46.files.threads import map_in_threads

Span = tuple[int, int]
"""First byte and exclusive end."""

_UNCHECKED_BYTES = 1 << 26
"""Bytes that a process fetches between two looks at the size of the cache."""

_fetched_bytes: dict[Path, int] = {}
"""Bytes that this process has fetched into each bounded cache since it last looked at its size."""


def range_file(path: Path) -> "RangeFile | None":
    """Return the ranges of a file that is a link to an object; None for another file."""
    return RangeFile(path) if path.is_symlink() and data_of(path).is_file() else None


def local_data(path: Path) -> Path:
    """Return the sparse file with the fetched ranges of a link to an object; the path itself for another file."""
    return data_of(path) if path.is_symlink() and data_of(path).is_file() else path


class RangeFile:
    """The ranges of one object; see `link_ranges`.

    Attributes:
        data: the sparse file. Only what `fetch` has been called for may be read from it.
    """

    def __init__(self, path: Path):
        target = linked_object(path)
        assert target is not None, "range_file"
        store, self._name = target
        self._url = store.url
        self.data = data_of(path)
        self.length = self.data.stat().st_size
        self._have = np.memmap(have_of(self.data), np.uint8, "r+")
        digests = digests_of(self.data)
        self._digests = np.memmap(digests, np.uint8, "r") if digests.stat().st_size else None
        limit = self.data.parent.parent / LIMIT
        self._limit: int | None = None
        self._aligned = 1
        if limit.is_file():
            self._limit, self._aligned = map(int, limit.read_text().split())

    def fetch(self, spans: Iterable[Span], turn: float = 0.0) -> None:
        """Fetch the missing blocks of some ranges, verified, several at a time.

        Args:
            turn: share of the missing blocks that are fetched last. Processes that need the same blocks have different
                ones, and skip what the others have fetched.

        Raises:
            StoreError: the store does not answer, or its bytes differ from their digests in two attempts.
        """
        missing = self._missing(spans := [*spans])
        if not len(missing):
            return
        if self._limit is not None:
            _make_room(self._limit, self.data.parents[3], BLOCK_BYTES * len(missing))
            missing = self._missing(spans)  # it may have emptied this file
        breaks = np.flatnonzero(np.diff(missing, prepend=-1) != 1)
        runs = [
            run[at : at + BLOCKS_OF_REQUEST]
            for run in np.split(missing, breaks)
            for at in range(0, len(run), BLOCKS_OF_REQUEST)
        ]
        first = int(turn * len(runs))
        map_in_threads(self._fetch_run, runs[first:] + runs[:first], OBJECTS_AT_ONCE)

    def read(self, start: int, size: int) -> bytes:
        """Return some bytes, which end at the end of the object. Raises the errors of `fetch`."""
        blocks = slice(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES))
        while True:
            self.fetch([(start, start + size)])
            marks = self._have[blocks].copy()
            with self.data.open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), size, start)
            if (marks & 1).all() and (self._have[blocks] == marks).all():
                return content

    def forget(self, start: int, size: int) -> None:
        """Fetch some bytes again at their next use."""
        self._have[start // BLOCK_BYTES : -(-(start + size) // BLOCK_BYTES)] &= 254

    def _missing(self, spans: Sequence[Span]) -> np.ndarray:
        """Return the numbers of the blocks to fetch for some ranges, int64, ascending."""
        numbers = [np.empty(0, np.int64)]
        unit = self._aligned * BLOCK_BYTES
        for start, stop in spans:
            if not (self._have[start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)] & 1).all():
                first = start // unit * self._aligned
                numbers.append(np.arange(first, min(-(-stop // unit) * self._aligned, len(self._have))))
        blocks = np.unique(np.concatenate(numbers))
        missing: np.ndarray = blocks[self._have[blocks] & 1 == 0]
        return missing

    def _fetch_run(self, numbers: np.ndarray) -> None:
        """Fetch consecutive blocks in one request."""
        if (self._have[numbers] & 1).all():  # by another process
            return
        first = int(numbers[0])
        stop = int(numbers[-1]) + 1
        start = first * BLOCK_BYTES
        end = min(stop * BLOCK_BYTES, self.length)
        store = store_of(self._url)
        for _ in range(2):
            content = store.range(self._name, start, end)
            if self._digests is None:
                break
            if first_other_block(content, _digests_between(self._digests, first, stop)) is None:
                break
        else:
            raise StoreError(
                errno.EIO, f"bytes {start} to {end - 1} differ from their digests", store.url_of(self._name)
            )
        with self.data.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # not between the emptying of the file and of its marks
            os.pwrite(file.fileno(), content, start)
            self._have[first:stop] |= 1


def _make_room(limit: int, cache: Path, more_bytes: int) -> None:
    """Empty the fullest files of a cache that would be too large with more bytes."""
    unchecked = min(_UNCHECKED_BYTES, limit // 16)
    _fetched_bytes[cache] = _fetched_bytes.get(cache, unchecked) + more_bytes
    if _fetched_bytes[cache] < unchecked:
        return
    _fetched_bytes[cache] = 0
    sizes = limited_sizes(cache)
    while sizes and sum(sizes.values()) > limit - unchecked - more_bytes:
        fullest = max(sizes, key=sizes.__getitem__)
        sizes.pop(fullest)
        _empty(fullest)


def _empty(data: Path) -> None:
    """Free the disk that the ranges of an object take. Skips a file that is being written."""
    with data.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        have = np.memmap(have_of(data), np.uint8, "r+")
        have |= 1
        have += 1  # the next even number, which readers tell from the one before
        length = data.stat().st_size
        file.truncate(0)
        file.truncate(length)


def _digests_between(digests: np.ndarray, first: int, stop: int) -> bytes:
    """Return the digests of some of the blocks. ``digests``: of all blocks, uint8."""
    return digests[DIGEST_BYTES * first : DIGEST_BYTES * stop].tobytes()
