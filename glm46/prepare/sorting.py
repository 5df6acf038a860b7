"""External sort of records: sorted runs on disk, merged block by block.

Only the file grows with the number of records. Many equal keys cost no more than different ones.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Runs merged at once. More are merged in several passes, so that each read stays larger than one disk block.
_FAN_IN = 128

# Bytes that sorting needs per record and column (the record, its sorted copy, a column being moved) and per record (the
# order, its workspace, and the results of the block's reader). Measured, then rounded up.
_PER_COLUMN, _PER_RECORD = 28, 28

# Blocks that a sorted buffer is returned in, so that its reader's arrays stay small compared with it.
_BLOCKS = 8

# While runs are merged, their heads, the merged block and its reader share the memory of a buffer.
_SHARES = 3

_WIDTH = 8  # bytes of a number


class _Run(NamedTuple):
    """One sorted run in the file: its first byte and its number of records."""

    start: int
    count: int


class SortedRecords:
    """A set of records, each a row of numbers, iterated in lexicographic order.

    Call `add` first, then iterate once.
    """

    def __init__(self, columns: int, memory_bytes: int, folder: Path):
        """Make an empty set.

        Args:
            columns: numbers per record.
            memory_bytes: memory that this object and the reader of its blocks may hold.
            folder: for the file, which has no name and is deleted with this process.
        """
        self._columns, self._folder = columns, folder
        self._capacity = max(2 * _FAN_IN, memory_bytes // (_PER_COLUMN * columns + _PER_RECORD))
        self._buffer: np.ndarray | None = None
        self._used = 0
        self._runs: list[_Run] = []
        self._file, self._end = None, 0

    def add(self, records: Sequence[np.ndarray] | np.ndarray) -> None:
        """Add records, given as columns uint64 [n]. Duplicates are stored once.

        Raises:
            OSError: the disk is full.
        """
        total, done = len(records[0]), 0
        while done < total:
            if self._buffer is None:
                self._buffer = np.empty((self._columns, self._capacity), np.uint64)
            count = min(total - done, self._capacity - self._used)
            for column, values in zip(self._buffer, records, strict=True):
                column[self._used : self._used + count] = values[done : done + count]
            self._used += count
            done += count
            if self._used == self._capacity:
                self._spill()

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield blocks uint64 [columns, n > 0]; each record once, ascending within and across blocks."""
        if not self._runs:
            records = _sorted_set(self._buffer[:, : self._used]) if self._used else np.empty((self._columns, 0))
            self._buffer = None
            size = max(1, self._capacity // _BLOCKS)
            for start in range(0, records.shape[1], size):
                yield records[:, start : start + size]
            return
        if self._used:
            self._spill()
        self._buffer = None
        while len(self._runs) > _FAN_IN:
            merged, self._runs = self._runs[:_FAN_IN], self._runs[_FAN_IN:]
            start = self._end
            for block in self._merge(merged):
                self._write(block)
            self._runs.append(_Run(start, (self._end - start) // (_WIDTH * self._columns)))
        yield from self._merge(self._runs)
        self._file.close()

    def _spill(self) -> None:
        records, self._used = _sorted_set(self._buffer[:, : self._used]), 0
        self._runs.append(_Run(self._end, records.shape[1]))
        self._write(records)

    def _write(self, records: np.ndarray) -> None:
        """Append records to the file, row by row."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed by the reader)
        # In pieces, because the transposition copies.
        step = max(1, self._capacity // _BLOCKS)
        for start in range(0, records.shape[1], step):
            data = memoryview(np.ascontiguousarray(records[:, start : start + step].T)).cast("B")
            while data:
                written = os.pwrite(self._file.fileno(), data, self._end)
                self._end += written
                data = data[written:]

    def _merge(self, runs: Sequence[_Run]) -> Iterator[np.ndarray]:
        chunk = max(1, self._capacity // (_SHARES * len(runs)))
        places = [run.start for run in runs]
        left = [run.count for run in runs]
        heads = [np.empty((self._columns, 0), np.uint64)] * len(runs)
        while any(left) or any(head.shape[1] for head in heads):
            # Refill every head each time: otherwise the emptiest one would limit the size of the block.
            for i, head in enumerate(heads):
                if count := min(chunk - head.shape[1], left[i]):
                    heads[i] = np.concatenate((head, self._read(places[i], count)), axis=1)
                    places[i] += count * _WIDTH * self._columns
                    left[i] -= count
            # Every record up to the smallest bound is in memory; the records still in the file are larger.
            bounds = [tuple(head[:, -1].tolist()) for head, more in zip(heads, left, strict=True) if more]
            counts = [_up_to(head, min(bounds)) if bounds else head.shape[1] for head in heads]
            taken = [head[:, :count] for head, count in zip(heads, counts, strict=True)]
            heads = [head[:, count:] for head, count in zip(heads, counts, strict=True)]
            yield _sorted_set(np.concatenate(taken, axis=1))

    def _read(self, start: int, count: int) -> np.ndarray:
        size = count * _WIDTH * self._columns
        data = bytearray()
        while len(data) < size:
            block = os.pread(self._file.fileno(), size - len(data), start + len(data))
            if not block:
                raise EOFError("the temporary file of a sort was truncated")
            data += block
        return np.frombuffer(data, np.uint64).reshape(count, self._columns).T


def _sorted_set(records: np.ndarray) -> np.ndarray:
    """Return the records in ascending order without duplicates, uint64 [columns, n]."""
    records = records[:, np.lexsort(records[::-1])]
    new = np.ones(records.shape[1], bool)
    new[1:] = differ_from_last(records)
    return records if new.all() else records[:, new]


def differ_from_last(records: np.ndarray) -> np.ndarray:
    """Return whether each record but the first differs from the previous one, bool [n - 1]."""
    differ = records[0, 1:] != records[0, :-1]
    for column in records[1:]:
        differ |= column[1:] != column[:-1]
    return differ


def _up_to(records: np.ndarray, bound: tuple[int, ...]) -> int:
    """Return the number of sorted records that are at most ``bound``."""
    low, high = 0, records.shape[1]
    for column, value in zip(records, bound, strict=True):
        equal = column[low:high]
        value = np.uint64(value)
        low, high = low + np.searchsorted(equal, value, "left"), low + np.searchsorted(equal, value, "right")
    return int(high)
