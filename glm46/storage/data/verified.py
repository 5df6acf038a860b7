"""Verified reads from a shard: every block is compared with its checksum each time it is read.

A shard may be damaged while a run reads it, and large sources are not hashed at the start. The bytes are copied first
and then verified, so they cannot change in between. Reading a truncated file raises an error; a memory map would kill
the process.
"""

import os
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import numpy as np

from glm46.config.errors import UnreadableError, UserError
from glm46.files.regular_file import open_descriptor
from glm46.files.store_ranges import range_file
from glm46.storage.data.shards import BLOCK_BYTES, NOT_A_TARGET, open_shard

_REMEDY = (
    "these bytes were not trained on; restore the file, or remove the folder and prepare it again; the same command "
    "then resumes from the newest checkpoint"
)


class VerifiedShard:
    """One shard, open for reading. Token ids must be below ``vocab_size``.

    Raises:
        UserError: see `open_shard`; and by each method, with file and bytes, if the bytes that it reads are damaged.
        UnreadableError: by each method, if the system cannot read them.
    """

    def __init__(self, file: Path, vocab_size: int):
        shard = open_shard(file)
        self._file = file
        self._ranges = range_file(file)
        self._vocab_size = vocab_size
        self._is_marked = "targets" in shard.metadata
        self._handle: IO[bytes] | None = None
        self._close: Callable[[], object] = lambda: None
        checksums_at = shard.places["checksums"]
        end_blocks = -(-shard.doc_ends.nbytes // BLOCK_BYTES)
        self._ends = _Blocks(shard.doc_ends.dtype, len(shard.doc_ends), shard.places["doc_ends"], checksums_at)
        checksums_at += 4 * end_blocks
        self._tokens = _Blocks(shard.tokens.dtype, len(shard.tokens), shard.places["tokens"], checksums_at)
        self._last_ends: list[int] | None = None
        """Last end in each full block of `_ends`; None before the first search."""

    def close(self) -> None:
        """Close the file. The next read opens it again; it is also closed when this object is collected."""
        self._close()
        self._handle = None

    def tokens(self, low: int, high: int) -> np.ndarray:
        """Read the tokens of a range, uint32 [high - low], with the bit `NOT_A_TARGET` in a shard of chats."""
        tokens = self._read(self._tokens, low, high)
        ids = tokens & ~np.uint32(NOT_A_TARGET) if self._is_marked else tokens
        if len(ids) and ids.max() >= self._vocab_size:
            at = int(np.argmax(ids >= self._vocab_size))
            self._refuse(
                self._tokens.values_at + 4 * (low + at), 4, f"token id {ids[at]} is not below {self._vocab_size}"
            )
        return tokens

    def ends_in(self, low: int, high: int) -> np.ndarray:
        """Read the exclusive ends of the documents that end in a range, int64 [n]: low < end <= high."""
        per_block = BLOCK_BYTES // 8
        if self._last_ends is None:
            self._last_ends = self.all_ends()[per_block - 1 :: per_block].tolist()
        first_block = bisect_right(self._last_ends, low)
        stop_block = bisect_right(self._last_ends, high, first_block) + 1
        ends = self._read(self._ends, first_block * per_block, min(stop_block * per_block, self._ends.length))
        start, stop = np.searchsorted(ends, (low, high), side="right")
        return ends[start:stop]

    def all_ends(self) -> np.ndarray:
        """Read the exclusive ends of all documents, int64 [documents]."""
        ends = self._read(self._ends, 0, self._ends.length)
        steps = np.diff(ends, prepend=0)
        if steps.min() <= 0 or ends[-1] != self._tokens.length:
            at = int(np.argmax(steps <= 0)) if steps.min() <= 0 else len(ends) - 1
            self._refuse(
                self._ends.values_at + 8 * at,
                8,
                f"document {at} ends at token {ends[at]}, the previous one at "
                f"{ends[at] - steps[at]} of {self._tokens.length}",
            )
        return ends

    def _read(self, blocks: "_Blocks", low: int, high: int, *, is_again: bool = False) -> np.ndarray:
        """Return a verified copy of the items of a range."""
        per_block = BLOCK_BYTES // blocks.dtype.itemsize
        first_block = low // per_block
        stop_block = -(-min(high, blocks.length) // per_block)
        start_bytes = first_block * BLOCK_BYTES
        size = min(stop_block * per_block, blocks.length) * blocks.dtype.itemsize - start_bytes
        data = memoryview(self._pread(blocks.values_at + start_bytes, size))
        checksums_at = blocks.checksums_at + 4 * first_block
        checksums = np.frombuffer(self._pread(checksums_at, 4 * (stop_block - first_block)), "<u4").tolist()
        for number, expected in enumerate(checksums):
            start = number * BLOCK_BYTES
            block = data[start : start + BLOCK_BYTES]
            if zlib.crc32(block) != expected:
                if self._ranges is not None and not is_again:  # damaged on the way, or on the local disk
                    self._ranges.forget(blocks.values_at + start_bytes, size)
                    self._ranges.forget(checksums_at, 4 * len(checksums))
                    return self._read(blocks, low, high, is_again=True)
                at = blocks.values_at + start_bytes + start
                self._refuse(at, len(block), f"do not match the checksum at byte {checksums_at + 4 * number}")
        first_item = first_block * per_block
        return np.frombuffer(data, blocks.dtype)[low - first_item : high - first_item]

    def _pread(self, place: int, size: int) -> bytes:
        try:
            if self._ranges is not None:
                return self._ranges.read(place, size)
            if self._handle is None:
                # Unbuffered: reads are short and in random order.
                self._handle = os.fdopen(open_descriptor(self._file), "rb", buffering=0)
                self._close = weakref.finalize(self, self._handle.close)
            data = os.pread(self._handle.fileno(), size, place)
        except OSError as error:
            self.close()  # the descriptor stays broken when its storage returns
            raise UnreadableError(
                f"{self._file}: bytes {place} to {place + size - 1}: cannot be read: {error.strerror}; mount its "
                "storage again; the same command then resumes from the newest checkpoint"
            ) from error
        if len(data) < size:
            self._refuse(place + len(data), size - len(data), "missing, the file is truncated")
        return data

    def _refuse(self, place: int, size: int, reason: str) -> NoReturn:
        raise UserError(f"{self._file}: bytes {place} to {place + size - 1}: {reason}; {_REMEDY}")


class _Blocks(NamedTuple):
    """Type and length of a tensor, and the bytes at which its values and their checksums begin in the file."""

    dtype: np.dtype
    length: int
    values_at: int
    checksums_at: int
