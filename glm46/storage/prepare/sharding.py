"""The serial half of preparing text: remove duplicates, split by document hash, write shards of bounded size."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from glm46.config.text_recipe import LABELLED, PAIRS, Recipe
from glm46.files.array_file import map_arrays, write_arrays
from glm46.files.durable import replace_durably
from glm46.storage.data.manifest import FILE_NAME, Manifest, ShardEntry, Split
from glm46.storage.data.manifest import FORMAT as MANIFEST_FORMAT
from glm46.storage.data.shards import BLOCK_BYTES, NOT_A_TARGET, SHARD_REMEDY
from glm46.storage.data.shards import FORMAT as SHARD_FORMAT
from glm46.storage.prepare.duplicates import Duplicates, is_held_out
from glm46.storage.prepare.tally import Tally

# A shard is written when it reaches this size: 128 MiB on disk, and the memory that writing needs.
SHARD_TOKENS = 2**25

# Memory for finding duplicates, for any number of documents: less memory takes longer and gives the same result.
DUPLICATES_BYTES = 10**9


class SplitWriter:
    """Collects the documents of one split and writes a shard each time `SHARD_TOKENS` is reached.

    With ``is_chat``, tokens that are not targets have the bit `NOT_A_TARGET`.
    """

    def __init__(self, folder: Path, name: str, metadata: dict[str, str], *, is_chat: bool = False):
        self._folder = folder
        self._name = name
        self._metadata = metadata | {"split": name}
        self._is_chat = is_chat
        self._tokens: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._text_bytes = 0
        self._entries: list[ShardEntry] = []

    def add(self, piece: Mapping[str, np.ndarray], keep: np.ndarray) -> None:
        """Append the texts or conversations of a piece (`make_part`) for which ``keep``, bool [n], is true."""
        if not keep.any():
            return
        lengths = np.diff(piece["doc_ends"], prepend=0)
        is_kept = np.repeat(keep, piece.get("documents", 1))
        self._tokens.append(piece["tokens"][np.repeat(is_kept, lengths)])
        self._lengths.append(lengths[is_kept])
        self._text_bytes += int(piece["text_bytes"][keep].sum())
        if sum(len(t) for t in self._tokens) >= SHARD_TOKENS:
            self._write()

    def finish(self) -> Split:
        """Write the remaining documents and return the split."""
        if self._tokens:
            self._write()
        return Split.from_shards(tuple(self._entries))

    def _write(self) -> None:
        tokens = np.concatenate(self._tokens)
        doc_ends = np.cumsum(np.concatenate(self._lengths))
        file = f"{self._name}-{len(self._entries):05d}.safetensors"
        targets = int((tokens < NOT_A_TARGET).sum()) if self._is_chat else None
        metadata = self._metadata | ({"targets": str(targets)} if self._is_chat else {})
        digest = write_shard(self._folder / file, tokens, doc_ends, metadata)
        self._entries.append(ShardEntry(file, len(doc_ends), len(tokens), self._text_bytes, digest, targets))
        self._tokens = []
        self._lengths = []
        self._text_bytes = 0


def write_splits(
    pieces: Sequence[Path], folder: Path, recipe: Recipe, metadata: dict[str, str], tally: Tally
) -> dict[str, Split]:
    """Write the shards of the training and validation split from the pieces, in their order.

    Of equal texts or conversations the first is kept. The hash of a document alone decides whether it is held out.

    Args:
        pieces: files of `make_part`; each is open only while it is read.
        recipe: recipe of the pieces.
        metadata: metadata for the header of each shard.
        tally: counts the duplicates, and the conversations or preferences.
    """
    duplicates = Duplicates(pieces, DUPLICATES_BYTES, pieces[0].parent if pieces else folder)
    names = ("train", "validation")
    writers = {name: SplitWriter(folder, name, metadata, is_chat=recipe.is_chat) for name in names}
    for piece in pieces:
        tensors = map_arrays(piece, SHARD_REMEDY)[0]
        equal, similar = duplicates.take(len(tensors["hashes"]))
        for reason, number in (("exact duplicate", equal.sum()), ("near duplicate", (similar & ~equal).sum())):
            if number:
                tally.count(tally.filtered, reason, [], int(number))
        keep = ~(equal | similar)
        held_out = is_held_out(tensors["hashes"][:, 0], recipe.held_out)
        for name, part in zip(names, (~held_out, held_out), strict=True):
            writers[name].add(tensors, keep & part)
            if recipe.is_chat:
                what = {PAIRS: "pairs", LABELLED: "labelled answers"}.get(recipe.format, "conversations")
                tally.count(tally.noted, f"{what}, {name}", [], int((keep & part).sum()))
    return {name: writer.finish() for name, writer in writers.items()}


def _block_checksums(array: np.ndarray) -> np.ndarray:
    """Return the CRC-32 of each block of `BLOCK_BYTES` of an array, uint32 [blocks]. The last block may be shorter."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return np.array([zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)], np.uint32)


def write_shard(file: Path, tokens: np.ndarray, doc_ends: np.ndarray, metadata: dict[str, str]) -> str:
    """Write one shard atomically; return its SHA-256 in hex. ``tokens`` uint32 [n], ``doc_ends`` int64 [d]."""
    counts = {"format": SHARD_FORMAT, "tokens": str(len(tokens)), "documents": str(len(doc_ends))}
    tokens = tokens.astype("<u4", copy=False)
    doc_ends = doc_ends.astype("<i8", copy=False)
    checksums = np.concatenate([_block_checksums(doc_ends), _block_checksums(tokens)])
    tensors = {"doc_ends": doc_ends, "tokens": tokens, "checksums": checksums}
    return write_arrays(file, tensors, metadata | counts).sha256


def save_manifest(manifest: Manifest) -> None:
    """Write ``manifest.json`` into the folder atomically, without the ``targets`` of text."""
    fields = asdict(manifest, dict_factory=lambda pairs: {key: value for key, value in pairs if value is not None})
    content = {"format": MANIFEST_FORMAT} | {key: value for key, value in fields.items() if key != "folder"}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    replace_durably(manifest.folder / FILE_NAME, [text.encode()])
