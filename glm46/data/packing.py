"""Rows of tokens out of shards: where a row begins, which tokens it holds, and where documents end in it.

Concatenate-and-chunk, as GLM pre-trains: the documents of a split form one long sequence, cut every ``seq_len`` tokens
wherever that falls. A row reads a few tokens past its end, so that no target is lost there.
"""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from glm46.data.manifest import Split
from glm46.data.shards import open_shard


class TokenStream:
    """The tokens of one split as one sequence over all its shards, read through memory maps."""

    def __init__(self, folder: Path, split: Split):
        self.length = split.tokens
        self._shards = [open_shard(folder / entry.file) for entry in split.shards]
        self._starts = [0, *accumulate(entry.tokens for entry in split.shards)]

    def read(self, start: int, out: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Copy the tokens from ``start`` on into ``out``, int64 [n].

        Returns:
            How many there were before the split ended, and the places in ``out`` behind each last token of a document,
            ascending, as a list of int64 arrays.
        """
        done, ends = 0, []
        number = bisect_right(self._starts, start) - 1
        while done < len(out) and number < len(self._shards):
            shard = self._shards[number]
            low = start + done - self._starts[number]
            high = min(low + len(out) - done, len(shard.tokens))
            out[done : done + high - low] = shard.tokens[low:high]
            first, last = np.searchsorted(shard.doc_ends, (low, high), side="right")
            ends.append(shard.doc_ends[first:last] + (done - low))
            done += high - low
            number += 1
        return done, ends


def full_rows(tokens: int, seq_len: int, mtp_depth: int) -> int:
    """Rows of ``seq_len`` tokens that have all their targets. The few tokens behind the last one are not trained on."""
    return max(0, (tokens - 1 - mtp_depth) // seq_len)
