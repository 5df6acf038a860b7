"""What a teacher has said of prepared chats before a run: at each target its most likely tokens and their
log-probabilities.

A folder has ``manifest.json`` and a safetensors file for each part of the documents: ``keys`` U8 [documents, 16], the
hash of each; ``ends`` I64 [documents], the exclusive end of its targets; ``ids`` U32 and ``logprobs`` F32 [targets, K],
the most likely first; ``checksums`` U32 [documents], the CRC-32 of both. A document is found by the hash of its tokens
and targets, so that no packing, order or layout can give a value to another token.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.finetune import DistillationConfig
from glm46.files.array_file import map_arrays, write_arrays
from glm46.files.durable import replace_durably
from glm46.files.file_content import read_json_object
from glm46.storage.chats.chat_format import made_in
from glm46.storage.data.batches import IGNORE, Batch
from glm46.storage.data.manifest import FILE_NAME, Manifest
from glm46.storage.data.packing import open_tokens
from glm46.storage.data.shards import NOT_A_TARGET

_FORMAT = "glm46-teacher-1"
_AGAIN = "run 'python -m glm46 teach' with this config"
_LEAST_DOCUMENTS, _MOST_PARTS = 64, 512
"""Documents of a part; and parts of a folder, each of which is an open file of a run, which may have about a thousand.
A kill loses the part in work."""


class Document(NamedTuple):
    """A document of a prepared source."""

    tokens: np.ndarray
    """int64 [n]."""
    is_target: np.ndarray
    """bool [n]: True where the next token is a target."""

    @property
    def key(self) -> bytes:
        return blake2b(self.tokens.astype("<u4").tobytes() + self.is_target.tobytes(), digest_size=16).digest()


class Values(NamedTuple):
    """What a teacher says of the targets of a document."""

    ids: np.ndarray
    """uint32 [targets, K], the most likely first."""
    logprobs: np.ndarray
    """float32 [targets, K]."""

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.logprobs.tobytes(), zlib.crc32(self.ids.tobytes()))


def identity(teacher: str, config: DistillationConfig, manifests: Iterable[Manifest]) -> dict:
    """What decides the values of a folder: teacher, tokenizer, data, and how it was asked."""
    manifests = list(manifests)
    if plain := [str(manifest.folder) for manifest in manifests if manifest.splits["train"].targets is None]:
        raise UserError(
            f"{plain[0]}: is text, and values are stored of chats, which rows hold whole; remove the source"
        )
    splits = [split for manifest in manifests for split in manifest.splits.values()]
    return {
        "format": _FORMAT, "teacher": teacher, "tokenizer": manifests[0].tokenizer, "top_k": config.top_k,
        "temperature": config.temperature, "chat_formats": sorted({made_in(each.settings) for each in manifests}),
        "shards": sorted({shard.sha256 for split in splits for shard in split.shards}),
        "documents": sum(split.documents for split in splits),
    }  # fmt: skip


def _parts(folder: Path, documents: int) -> list[Path]:
    count = -(-documents // _documents_of_part(documents))
    return [folder / f"part-{number:05}.safetensors" for number in range(count)]


def _documents_of_part(documents: int) -> int:
    return max(_LEAST_DOCUMENTS, -(-documents // _MOST_PARTS))


def _documents(manifests: Iterable[Manifest]) -> Iterator[Document]:
    for manifest in manifests:
        for split in manifest.splits:
            stream = open_tokens(manifest, split)
            for start, end in pairwise(chain([0], *(ends.tolist() for ends in stream.doc_ends_by_shard()))):
                marked = np.empty(end - start, np.int64)
                stream.read(start, marked)
                yield Document(marked & ~NOT_A_TARGET, np.append(marked[1:] < NOT_A_TARGET, False))


def missing_parts(folder: Path, facts: Mapping) -> list[int]:
    """Numbers of the parts that a folder lacks; makes the folder. Raises UserError if it is of other values."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE_NAME
    if file.exists() and (known := read_json_object(file, f"remove the folder, and {_AGAIN}")) != facts:
        changed = [name for name in facts if known.get(name) != facts[name]]
        raise UserError(
            f"finetune.distillation.stored_path = {str(folder)!r}: holds values of another {' and '.join(changed)}; "
            "name another folder, or remove this one"
        )
    replace_durably(file, [json.dumps(facts, indent=1).encode()])
    return [number for number, part in enumerate(_parts(folder, facts["documents"])) if not part.exists()]


def parts_to_ask(
    manifests: Iterable[Manifest], facts: Mapping, missing: Sequence[int]
) -> Iterator[tuple[int, list[Document]]]:
    """The missing parts by number, and their documents that have targets."""
    found, size = _documents(manifests), _documents_of_part(facts["documents"])
    for number in range(-(-facts["documents"] // size)):
        documents = list(islice(found, size))
        if number in missing:
            yield number, [document for document in documents if document.is_target.any()]


def write_part(folder: Path, facts: Mapping, number: int, documents: list[Document], values: list[Values]) -> None:
    """Write a part. Raises UserError for values that no distribution has."""
    empty = Values(np.empty((0, facts["top_k"]), np.uint32), np.empty((0, facts["top_k"]), np.float32))
    for document, found in zip(documents, values, strict=True):
        total = np.exp(found.logprobs.astype(np.float64)).sum(1)
        if not (np.isfinite(found.logprobs).all() and (np.diff(found.logprobs) <= 0).all() and (total < 1.01).all()):
            raise UserError(
                f"{facts['teacher']}: its log-probabilities of a document of {len(document.tokens)} tokens are none: "
                f"they add up to {total.max():.3g} or are not finite; take a teacher in another type"
            )
    ids, logprobs = (np.concatenate(both) for both in zip(empty, *values, strict=True))
    arrays = {
        "ends": np.fromiter(accumulate(int(each.is_target.sum()) for each in documents), np.int64, len(documents)),
        "ids": ids, "logprobs": logprobs,
        "checksums": np.array([each.checksum for each in values], np.uint32),
        "keys": np.frombuffer(b"".join(each.key for each in documents), np.uint8).reshape(-1, 16),
    }  # fmt: skip
    write_arrays(_parts(folder, facts["documents"])[number], arrays, {"format": _FORMAT})


class StoredValues:
    """The values of a folder, by document."""

    def __init__(self, folder: Path):
        """Raises UserError if there are none, or not all."""
        self._folder, self._stated = folder, f"finetune.distillation.stored_path = {str(folder)!r}"
        if not (folder / FILE_NAME).is_file():
            raise UserError(f"{self._stated}: holds no values of a teacher; {_AGAIN} first")
        self.facts = read_json_object(folder / FILE_NAME, f"remove the folder, and {_AGAIN}")
        if self.facts.get("format") != _FORMAT:
            raise UserError(f"{self._stated}: holds no values of a teacher, or of another version; name another folder")
        parts = _parts(folder, self.facts["documents"])
        if lacks := [part for part in parts if not part.exists()]:
            raise UserError(f"{self._stated}: lacks {len(lacks)} of {len(parts)} parts; {_AGAIN}, which goes on there")
        self._parts = [map_arrays(part, f"remove the file, and {_AGAIN}")[0] for part in parts]
        keys = np.concatenate([part["keys"] for part in self._parts]).view("S16")[:, 0]
        counts = [len(part["ends"]) for part in self._parts]
        places = np.stack([np.repeat(np.arange(len(parts)), counts), np.concatenate([*map(np.arange, counts)])], 1)
        order = np.argsort(keys)
        self._keys, self._places = keys[order], places[order]

    def check(self, config: DistillationConfig, manifests: Iterable[Manifest]) -> None:
        """Raise UserError if a run needs other values than these."""
        facts, wanted, faults = self.facts, identity("", config, manifests), list[str]()
        if wanted["tokenizer"] != facts["tokenizer"]:
            faults.append(f"is of another tokenizer ({facts['tokenizer'][:12]}…) than model.tokenizer_path names")
        elif not set(wanted["chat_formats"]) <= set(facts["chat_formats"]):
            faults.append(f"is of chats in the format of {facts['chat_formats'][0]}, and the sources have another")
        elif lacks := set(wanted["shards"]) - set(facts["shards"]):
            faults.append(f"is of other data: it lacks {len(lacks)} of {len(wanted['shards'])} shards of data.sources")
        if config.top_k > facts["top_k"]:
            faults.append(f"has {facts['top_k']} tokens of each target, fewer than finetune.distillation.top_k")
        if config.temperature != facts["temperature"]:
            faults.append(f"is of temperature {facts['temperature']:g}, not of finetune.distillation.temperature")
        if faults:
            remedy = f"restore these keys, or name an empty folder and {_AGAIN}"
            raise UserError(*(f"{self._stated}: {fault}; {remedy}" for fault in faults))

    def of_batch(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """The tokens int64 [B, K, S], `IGNORE` without a target, and their FP32 log-probabilities, there 0. Raises
        UserError if values are missing or damaged."""
        numbers, tokens, labels = (batch[name].numpy() for name in ("document_ids", "input_ids", "labels"))
        ids = np.full((*tokens.shape, top_k), IGNORE, np.int64)
        logprobs = np.zeros(ids.shape, np.float32)
        for row, of_row in enumerate(numbers):
            bounds = np.flatnonzero(np.diff(of_row, prepend=-2, append=-2))
            for low, high in pairwise(bounds.tolist()):
                document = Document(tokens[row, low:high], labels[row, low:high] != IGNORE)
                if document.is_target.any():
                    places, found = low + np.flatnonzero(document.is_target), self._of(document)
                    ids[row, places], logprobs[row, places] = found.ids[:, :top_k], found.logprobs[:, :top_k]
        ids_BKS, logprobs_BKS = (torch.from_numpy(each).transpose(1, 2).contiguous() for each in (ids, logprobs))
        return ids_BKS, logprobs_BKS

    def _of(self, document: Document) -> Values:
        key = np.bytes_(document.key.rstrip(b"\0"))  # as NumPy gives those of the array
        at = int(np.searchsorted(self._keys, key))
        if at == len(self._keys) or self._keys[at] != key:
            raise UserError(
                f"{self._stated}: has no values of a document of {len(document.tokens)} tokens; name an empty folder "
                f"and {_AGAIN}"
            )
        number, place = self._places[at].tolist()
        part = self._parts[number]
        rows = slice(int(part["ends"][place - 1]) if place else 0, int(part["ends"][place]))
        found = Values(part["ids"][rows], part["logprobs"][rows])
        if found.checksum != part["checksums"][place] or len(found.ids) != document.is_target.sum():
            file = _parts(self._folder, self.facts["documents"])[number]
            raise UserError(f"{file}: is damaged (checksum); remove the file, and {_AGAIN}")
        return found
