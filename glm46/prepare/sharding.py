"""The serial half of preparing text: remove duplicates, split by document hash, write shards of bounded size."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from glm46.data.manifest import ShardEntry, Split
from glm46.data.shards import SHARD_REMEDY, write_shard
from glm46.files.array_file import map_arrays
from glm46.prepare.document_hashes import is_held_out
from glm46.prepare.duplicates import Duplicates
from glm46.prepare.parts import Tally

# A shard is written when it reaches this size: 128 MiB on disk, and the memory that writing needs.
SHARD_TOKENS = 2**25


class SplitWriter:
    """Collects the documents of one split and writes a shard each time `SHARD_TOKENS` is reached."""

    def __init__(self, folder: Path, name: str, metadata: dict[str, str]):
        self._folder, self._name, self._metadata = folder, name, metadata | {"split": name}
        self._tokens: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._text_bytes = 0
        self._entries: list[ShardEntry] = []

    def add(self, tokens: np.ndarray, doc_ends: np.ndarray, text_bytes: np.ndarray, keep: np.ndarray) -> None:
        """Append the documents of a piece for which ``keep``, bool [d], is true."""
        if not keep.any():
            return
        lengths = np.diff(doc_ends, prepend=0)
        self._tokens.append(tokens[np.repeat(keep, lengths)])
        self._lengths.append(lengths[keep])
        self._text_bytes += int(text_bytes[keep].sum())
        if sum(len(t) for t in self._tokens) >= SHARD_TOKENS:
            self._write()

    def finish(self) -> Split:
        """Write the remaining documents and return the split."""
        if self._tokens:
            self._write()
        return Split.of(tuple(self._entries))

    def _write(self) -> None:
        tokens, doc_ends = np.concatenate(self._tokens), np.cumsum(np.concatenate(self._lengths))
        file = f"{self._name}-{len(self._entries):05d}.safetensors"
        digest = write_shard(self._folder / file, tokens, doc_ends, self._metadata)
        self._entries.append(ShardEntry(file, len(doc_ends), len(tokens), self._text_bytes, digest))
        self._tokens, self._lengths, self._text_bytes = [], [], 0


def write_splits(
    pieces: Sequence[Path], folder: Path, held_out: float, metadata: dict[str, str], tally: Tally, memory_bytes: int
) -> dict[str, Split]:
    """Write the shards of the training and validation split from the pieces, in their order.

    The first of equal documents is kept. Only its own hash decides whether a document is held out.

    Args:
        pieces: files of `make_part`; each is open only while it is read.
        held_out: share of the documents to hold out.
        metadata: for the header of each shard.
        tally: counts the duplicates.
        memory_bytes: memory for finding duplicates.
    """
    duplicates = Duplicates(pieces, memory_bytes, pieces[0].parent if pieces else folder)
    writers = {name: SplitWriter(folder, name, metadata) for name in ("train", "validation")}
    for piece in pieces:
        tensors = map_arrays(piece, SHARD_REMEDY)[0]
        equal, similar = duplicates.take(len(tensors["doc_ends"]))
        for reason, number in (("exact duplicate", equal.sum()), ("near duplicate", (similar & ~equal).sum())):
            if number:
                tally.count(tally.filtered, reason, [], int(number))
        keep = ~(equal | similar)
        held_out_here = is_held_out(tensors["hashes"][:, 0], held_out)
        for name, part in (("train", ~held_out_here), ("validation", held_out_here)):
            writers[name].add(tensors["tokens"], tensors["doc_ends"], tensors["text_bytes"], keep & part)
    return {name: writer.finish() for name, writer in writers.items()}
