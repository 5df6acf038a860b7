"""The last half of preparing text: parts without duplicates, split by document hash, into shards of bounded size."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from glm46.data.manifest import ShardEntry, Split
from glm46.data.shards import map_tensors, write_shard

# A shard is closed at the first part that brings it to this; 128 MiB on disk, the memory that writing needs.
SHARD_TOKENS = 2**25


class SplitWriter:
    """Collects documents of one split and writes a shard whenever enough are there."""

    def __init__(self, folder: Path, name: str, metadata: dict[str, str]):
        self._folder, self._name, self._metadata = folder, name, metadata | {"split": name}
        self._tokens: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._text_bytes = 0
        self._entries: list[ShardEntry] = []

    def add(self, tokens: np.ndarray, doc_ends: np.ndarray, text_bytes: np.ndarray, keep: np.ndarray) -> None:
        """Append the documents of a part for which ``keep`` (bool [d]) holds."""
        if not keep.any():
            return
        lengths = np.diff(doc_ends, prepend=0)
        self._tokens.append(tokens[np.repeat(keep, lengths)])
        self._lengths.append(lengths[keep])
        self._text_bytes += int(text_bytes[keep].sum())
        if sum(len(t) for t in self._tokens) >= SHARD_TOKENS:
            self._write()

    def finish(self) -> Split:
        """Write what is left and say what was written."""
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
    parts: Sequence[Path], folder: Path, held_out_per_10000: int, metadata: dict[str, str], dropped: Counter
) -> dict[str, Split]:
    """Shards of the training and validation split from part files, in the order of the parts.

    Of equal documents the first is kept. A document is held out if its own hash says so, whatever else there is.

    Args:
        parts: files of `make_part`.
        folder: to write into.
        held_out_per_10000: share of the documents to hold out.
        metadata: for the header of each shard.
        dropped: counts by reason, added to.
    """
    keep_masks = first_occurrences([map_tensors(part)[0]["hashes"] for part in parts])
    writers = {name: SplitWriter(folder, name, metadata) for name in ("train", "validation")}
    for part, keep in zip(parts, keep_masks, strict=True):
        tensors, _ = map_tensors(part)
        held_out = tensors["hashes"][:, 0] % np.uint64(10_000) < held_out_per_10000
        if not keep.all():
            dropped["exact duplicate"] += int((~keep).sum())
        for name, chosen in (("train", keep & ~held_out), ("validation", keep & held_out)):
            writers[name].add(tensors["tokens"], tensors["doc_ends"], tensors["text_bytes"], chosen)
    return {name: writer.finish() for name, writer in writers.items()}


def first_occurrences(hashes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each list of 128-bit hashes (U64 [d, 2]), which documents have no equal one before them; bool [d] each."""
    everything = np.concatenate([np.empty((0, 2), np.uint64), *hashes])
    # Stable, so that among equals the first document comes first.
    ranking = np.lexsort((everything[:, 1], everything[:, 0]))
    ordered = everything[ranking]
    keep = np.ones(len(everything), bool)
    keep[ranking[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.split(keep, np.cumsum([len(h) for h in hashes])[:-1])
