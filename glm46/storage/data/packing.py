"""Rows of tokens from shards, with the ends of the documents in each row.

Concatenate-and-chunk, as in GLM's pre-training: the documents of a split form one sequence, cut every ``seq_len``
tokens. A row is read a few tokens past its end, so that its last positions have targets. Best-fit packing, as in GLM's
long-context training: rows of whole documents.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from glm46.storage.data.best_fit import PackPlan
from glm46.storage.data.manifest import Manifest, Split
from glm46.storage.data.mixing import MIX_1, MIX_2
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.data.verified import VerifiedShard

# Each open shard is an open file, and a process may have about a thousand. Reopening one costs microseconds.
_MAX_OPEN_SHARDS = 64


class TokenStream:
    """The tokens of one split as one sequence over all its shards. Every read is verified (`VerifiedShard`).

    With ``marked``, the tokens of chats that are not targets have the bit `NOT_A_TARGET`, for `BatchBuilder`; otherwise
    all values are plain ids.
    """

    def __init__(self, folder: Path, split: Split, vocab_size: int, *, marked: bool = False):
        self.length = split.tokens
        self.is_marked = split.targets is not None and marked
        self._unmark = split.targets is not None and not marked
        self._vocab_size = vocab_size
        self._files = [folder / entry.file for entry in split.shards]
        self._shards: dict[int, VerifiedShard] = {}
        """Shards that have been read, by number."""
        self._open: dict[int, VerifiedShard] = {}
        """Those whose files are open; the one that was read last is last."""
        self._starts = [0, *accumulate(entry.tokens for entry in split.shards)]

    def doc_ends(self) -> np.ndarray:
        """Return the exclusive ends of all documents, int64 [documents]."""
        return np.concatenate([np.empty(0, np.int64), *self.doc_ends_by_shard()])

    def doc_ends_by_shard(self) -> Iterator[np.ndarray]:
        """Yield `doc_ends` shard by shard."""
        for number, start in enumerate(self._starts[:-1]):
            yield self._shard(number).all_ends() + start

    def read(self, start: int, out: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Copy the tokens from ``start`` on into ``out``, int64 [n].

        Returns:
            The number of tokens copied, fewer than n only at the end of the split; and the exclusive ends of documents
            in ``out``, ascending, as a list of int64 arrays.

        Raises:
            UserError: the bytes read are damaged; with file and bytes.
        """
        done = 0
        ends = []
        number = bisect_right(self._starts, start) - 1
        while done < len(out) and number < len(self._files):
            shard = self._shard(number)
            low = start + done - self._starts[number]
            high = min(low + len(out) - done, self._starts[number + 1] - self._starts[number])
            out[done : done + high - low] = shard.tokens(low, high)
            ends.append(shard.ends_in(low, high) + (done - low))
            done += high - low
            number += 1
        if self._unmark:
            out[:done] &= ~NOT_A_TARGET
        return done, ends

    def _shard(self, number: int) -> VerifiedShard:
        """Return a shard, opened at its first read. The files of the most recently read shards stay open."""
        shard = self._open.pop(number, None) or self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = VerifiedShard(self._files[number], self._vocab_size)
        self._open[number] = shard
        if len(self._open) > _MAX_OPEN_SHARDS:
            self._open.pop(next(iter(self._open))).close()
        return shard


def falls_into(documents: int, share: tuple[float, float]) -> np.ndarray:
    """Return which documents belong to a range of shares, bool [documents], by a hash of their numbers."""
    numbers = np.arange(1, documents + 1, dtype=np.uint64)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * factor
    uniform = (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
    return (share[0] <= uniform) & (uniform < share[1])


class SelectedTokens:
    """The tokens of selected documents of a split as one sequence, with the methods of `TokenStream`."""

    def __init__(self, stream: TokenStream, share: tuple[float, float]):
        ends = stream.doc_ends()
        chosen = falls_into(len(ends), share)
        lengths = np.diff(ends, prepend=0)[chosen]
        self._stream = stream
        self._ends = np.cumsum(lengths)
        self.is_marked = stream.is_marked
        # Offset from a position in this sequence to the position in the split.
        self._shifts = ends[chosen] - self._ends
        self.length = int(lengths.sum())

    def doc_ends(self) -> np.ndarray:
        """Return the same as `TokenStream.doc_ends`."""
        return self._ends

    def doc_ends_by_shard(self) -> Iterator[np.ndarray]:
        """Yield the same as `TokenStream.doc_ends_by_shard`, in one block."""
        yield self._ends

    def read(self, start: int, out: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Copy tokens, see `TokenStream.read`."""
        stop = min(start + len(out), self.length)
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left")) + 1 if stop > start else first
        ends = self._ends[first:last]
        at = start
        for end, shift in zip(ends.tolist(), self._shifts[first:last].tolist(), strict=True):
            until = min(end, stop)
            self._stream.read(at + shift, out[at - start : until - start])
            at = until
        return max(0, stop - start), [ends[ends <= stop] - start]


def full_rows(tokens: int, seq_len: int, mtp_depth: int) -> int:
    """Return the number of rows of ``seq_len`` tokens that have all targets. Tokens after the last row are unused."""
    return max(0, (tokens - 1 - mtp_depth) // seq_len)


def open_tokens(
    manifest: Manifest, split: str, share: tuple[float, float] = (0.0, 1.0)
) -> TokenStream | SelectedTokens:
    """Open the tokens of a split, or of its documents in a range of shares, marked (see `TokenStream`)."""
    stream = TokenStream(manifest.folder, manifest.splits[split], manifest.vocab_size, marked=True)
    return stream if share == (0.0, 1.0) else SelectedTokens(stream, share)


class ConcatenatedRows:
    """Row i holds the tokens from i * seq_len on, across document boundaries."""

    def __init__(self, stream: TokenStream | SelectedTokens, seq_len: int):
        self._stream = stream
        self._seq_len = seq_len
        self.is_marked = stream.is_marked

    def read(self, row: int, out: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Fill ``out``, int64 [n > seq_len]; returns the same as `TokenStream.read`."""
        return self._stream.read(row * self._seq_len, out)


class PackedRows:
    """Row i holds the pieces that a plan assigns to it; the rest of the row is padding."""

    def __init__(self, stream: TokenStream | SelectedTokens, seq_len: int, plan: PackPlan):
        self._stream = stream
        self._seq_len = seq_len
        self._plan = plan
        self.is_marked = stream.is_marked

    def read(self, row: int, out: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Fill ``out``, int64 [n > seq_len]; returns the same as `TokenStream.read`."""
        first, last = self._plan.row_starts[row : row + 2].tolist()
        starts = self._plan.piece_starts[first:last]
        lengths = self._plan.piece_lengths[first:last]
        if last - first == 1 and lengths[0] == self._seq_len:
            # A full piece may be part of a longer document, whose next tokens are targets too.
            return self._stream.read(int(starts[0]), out)
        done = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            self._stream.read(start, out[done : done + length])
            done += length
        return done, [np.cumsum(lengths)]
