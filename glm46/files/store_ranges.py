"""Ranges of objects on the local disk: of a file that is a link to a URL, only the blocks that are needed are fetched.

The blocks lie in a sparse file outside the folder of the link, so that a program that knows nothing of it finds no file
instead of one with holes. Next to it, ``NAME.have`` has a byte for each block: odd if the block is there. The processes
of a machine share both through memory maps. In a bounded cache whole files are emptied when it is full; a reader looks
at the bytes of its blocks before and after it reads, and reads again if they have changed.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from glm46.files.block_digests import BLOCK_BYTES, blocks_name, decoded, digests_between, first_other_block
from glm46.files.store import OBJECTS_AT_ONCE, Store, StoreError, link, linked_object
from glm46.files.threads import map_in_threads

Span = tuple[int, int]
"""First byte and exclusive end."""

_RANGES = ".ranges"
_LIMIT = "limit"
"""File next to the folders of ranges of a bounded cache: its bytes, and the blocks that one miss fetches."""
_BLOCKS_OF_REQUEST = (1 << 23) // BLOCK_BYTES
_UNCHECKED_BYTES = 1 << 26
"""Bytes that a process fetches between two looks at the size of the cache."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_fetched_bytes: dict[Path, int] = {}
"""Bytes that this process has fetched into each bounded cache since it last looked at its size."""
_stores: dict[tuple[int, str], Store] = {}
"""Connections by process and URL: a connection does not survive a fork."""


def link_ranges(file: Path, url: str, length: int, key: str, sha256: str | None) -> bool:
    """Make a file a link to an object whose ranges are read; blocks that were fetched before stay. One process of a
    machine at a time calls it.

    Args:
        key: text that changes when the object is written again.
        sha256: of the whole object; None if nothing is known, then ranges are not verified.

    Returns:
        False if the object has no digests of its blocks although its hash is known: it must be fetched whole.
    """
    data = _data_of(file)
    # Blocks of an earlier boot may have been lost with it, although they are marked.
    state = f"{_BOOT.read_text().strip()} {length} {key} {sha256}\n"
    state_file = data.with_name(f"{data.name}.state")
    if not (state_file.is_file() and state_file.read_text() == state):
        digests = _read_digests(url, length, sha256)
        if digests is None and sha256 is not None:
            return False
        data.parent.mkdir(parents=True, exist_ok=True)
        for path, size in ((data, length), (_have_of(data), -(-length // BLOCK_BYTES))):
            path.unlink(missing_ok=True)
            with path.open("wb") as output:
                output.truncate(size)
        _digests_of(data).write_bytes(digests or b"")
        state_file.write_text(state)
    link(file, url)
    return True


def stated_sha256(path: Path) -> str | None:
    """Return the SHA-256 of the object of a link, if it was known when the link was made."""
    data = _data_of(path)
    sha256 = data.with_name(f"{data.name}.state").read_text().split()[-1]
    return None if sha256 == "None" else sha256


def limit_ranges(folder: Path, cache_bytes: int) -> None:
    """Bound the bytes that the ranges of a folder take on the disk, together with those of the folders of other URLs
    that are bounded. If the folder fits, a miss fetches 8 MiB, else single blocks."""
    ranges = _ranges_of(folder)
    ranges.mkdir(parents=True, exist_ok=True)
    total = sum(data.stat().st_size for data in ranges.iterdir() if data.suffix == ".safetensors")
    blocks = _BLOCKS_OF_REQUEST if total <= cache_bytes else 1
    (ranges.parent / _LIMIT).write_text(f"{cache_bytes} {blocks}")


def limited_bytes(cache: Path) -> int:
    """Return the bytes that bounded ranges take in a cache, the folder of the folders of URLs."""
    return sum(_limited_sizes(cache).values())


def remove_ranges(folder: Path) -> None:
    """Remove all fetched ranges of the files of a folder."""
    shutil.rmtree(_ranges_of(folder), ignore_errors=True)


def range_file(path: Path) -> "RangeFile | None":
    """Return the ranges of a file that is a link to an object; None for another file."""
    return RangeFile(path) if path.is_symlink() and _data_of(path).is_file() else None


def local_data(path: Path) -> Path:
    """Return the sparse file with the fetched ranges of a link to an object; the path itself for another file."""
    return _data_of(path) if path.is_symlink() and _data_of(path).is_file() else path


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
        self.data = _data_of(path)
        self.length = self.data.stat().st_size
        self._have = np.memmap(_have_of(self.data), np.uint8, "r+")
        digests = _digests_of(self.data)
        self._digests = np.memmap(digests, np.uint8, "r") if digests.stat().st_size else None
        limit = self.data.parent.parent / _LIMIT
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
            run[at : at + _BLOCKS_OF_REQUEST]
            for run in np.split(missing, breaks)
            for at in range(0, len(run), _BLOCKS_OF_REQUEST)
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
        store = _store_of(self._url)
        for _ in range(2):
            content = store.range(self._name, start, end)
            if self._digests is None:
                break
            if first_other_block(content, digests_between(self._digests, first, stop)) is None:
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
    sizes = _limited_sizes(cache)
    while sizes and sum(sizes.values()) > limit - unchecked - more_bytes:
        fullest = max(sizes, key=sizes.__getitem__)
        sizes.pop(fullest)
        _empty(fullest)


def _limited_sizes(cache: Path) -> dict[Path, int]:
    folders = [file.parent for file in cache.glob(f"*/{_RANGES}/{_LIMIT}")]
    files = [have.with_suffix("") for folder in folders for have in folder.glob("*/*.have")]
    return {file: 512 * file.stat().st_blocks for file in files}


def _empty(data: Path) -> None:
    """Free the disk that the ranges of an object take. Skips a file that is being written."""
    with data.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        have = np.memmap(_have_of(data), np.uint8, "r+")
        have |= 1
        have += 1  # the next even number, which readers tell from the one before
        length = data.stat().st_size
        file.truncate(0)
        file.truncate(length)


def _read_digests(url: str, length: int, sha256: str | None) -> bytes | None:
    folder, _, name = url.rpartition("/")
    try:
        content = _store_of(folder).read(blocks_name(name))
    except FileNotFoundError:
        return None
    return decoded(content, length, sha256)


def _store_of(url: str) -> Store:
    key = (os.getpid(), url)
    if key not in _stores:
        _stores[key] = Store(url)
    return _stores[key]


def _ranges_of(folder: Path) -> Path:
    return folder.parent / _RANGES / folder.name


def _data_of(path: Path) -> Path:
    return _ranges_of(path.parent) / path.name


def _have_of(data: Path) -> Path:
    return data.with_name(f"{data.name}.have")


def _digests_of(data: Path) -> Path:
    return data.with_name(f"{data.name}.digests")
