"""Values of a teacher that was asked about prepared chats before a run: at each target its most likely tokens and their
log-probabilities.

A folder has ``manifest.json`` and a safetensors file for each part of the documents: ``keys`` U8 [documents, 16], their
hashes; ``ends`` I64 [documents], the exclusive ends of their targets; ``ids`` U32 and ``logprobs`` F32 [targets, K],
the most likely first; ``checksums`` U32 [documents], the CRC-32 of both. A document is found by the hash of its tokens
and targets, so that no packing, order or layout can give a value to another token.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.finetune import DistillationConfig
from glm46.engine.reliability.run_lock import writing
from glm46.files.array_file import map_arrays, write_arrays
from glm46.files.durable import replace_durably
from glm46.files.file_content import read_json_object
from glm46.storage.data.batches import IGNORE, Batch
from glm46.storage.data.manifest import FILE_NAME, Manifest
from glm46.storage.data.packing import open_tokens
from glm46.storage.data.shards import NOT_A_TARGET

_FORMAT, _AGAIN = "glm46-teacher-1", "run 'python -m glm46 teach' with this config"
_KEY = "finetune.distillation.stored_path"
_LEAST_DOCUMENTS, _MOST_PARTS = 64, 512
"""Of a part, which a kill loses; of a folder: a run opens them all, and a process may have about a thousand files."""

Values = tuple[np.ndarray, np.ndarray]
"""Of a document: ids uint32 and log-probabilities float32, [targets, K]."""


class AskedDocument(NamedTuple):
    """A document of a prepared source: its tokens int64 [n], and bool [n], whether the next one is a target."""

    tokens: np.ndarray
    is_target: np.ndarray

    @property
    def key(self) -> bytes:
        return blake2b(self.tokens.astype("<u4").tobytes() + self.is_target.tobytes(), digest_size=16).digest()


def facts_of(teacher: str, config: DistillationConfig, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The facts that decide the values of a folder: teacher, tokenizer, data, how it was asked; and its parts."""
    if plain := [manifest.folder for manifest in manifests if manifest.splits["train"].targets is None]:
        raise UserError(
            f"{plain[0]}: is text, and values are stored of chats, which rows hold whole; remove the source"
        )
    splits = [split for manifest in manifests for split in manifest.splits.values()]
    documents = sum(split.documents for split in splits)
    return {
        "format": _FORMAT, "teacher": teacher, "tokenizer": manifests[0].tokenizer, "top_k": config.top_k,
        "temperature": config.temperature, "documents": documents,
        "shards": sorted({shard.sha256 for split in splits for shard in split.shards}),
        "parts": min(_MOST_PARTS, -(-documents // _LEAST_DOCUMENTS)),
    }  # fmt: skip


def _parts(folder: Path, facts: dict[str, Any]) -> list[Path]:
    return [folder / f"part-{number:05}.safetensors" for number in range(facts["parts"])]


def _documents(manifests: Sequence[Manifest]) -> Iterator[AskedDocument]:
    for stream in (open_tokens(manifest, split) for manifest in manifests for split in manifest.splits):
        for start, end in pairwise(chain([0], *(ends.tolist() for ends in stream.doc_ends_by_shard()))):
            marked = np.empty(end - start, np.int64)
            stream.read(start, marked)
            yield AskedDocument(marked & ~NOT_A_TARGET, np.append(marked[1:] < NOT_A_TARGET, False))


def store(
    folder: Path, facts: dict[str, Any], manifests: Sequence[Manifest],
    ask: Callable[[list[AskedDocument]], list[Values]], agree: Callable[[Callable[[], Any]], Any], *, writes: bool,
) -> tuple[int, Iterator[tuple[AskedDocument, Values]]]:  # fmt: skip
    """The number of parts that a folder lacks or that are damaged; and an iterator that asks for them, writes them one
    by one, and yields their documents. Collective. Raises UserError if the folder is of other values; the iterator if
    these are no log-probabilities.

    Args:
        agree: runs work, and raises what it raises on any rank.
        writes: true on one rank.
    """
    missing = agree(lambda: _begin(folder, facts))

    def stored() -> Iterator[tuple[AskedDocument, Values]]:
        found, size = _documents(manifests), -(-facts["documents"] // max(facts["parts"], 1))
        for part in _parts(folder, facts):
            documents = [document for document in islice(found, size) if document.is_target.any()]
            if part in missing:
                values = ask(documents)
                write = partial(_write, part, facts, documents, values)
                agree(write if writes else lambda: None)
                yield from zip(documents, values, strict=True)

    return len(missing), stored()


def _begin(folder: Path, facts: dict[str, Any]) -> list[Path]:
    file = folder / FILE_NAME
    known = read_json_object(file, f"remove the folder, and {_AGAIN}") if file.exists() else facts
    if known.get("format") != _FORMAT:
        raise UserError(f"{_KEY} = {str(folder)!r}: holds other data than values of a teacher; name another folder")
    changed = [name for name in facts if known.get(name) != facts[name]]
    if changed and any(folder.glob("part-*")):
        both = {
            name: f" ({known.get(name)} there, {facts[name]} asked)" for name in ("teacher", "top_k", "temperature")
        }
        others = " and ".join(name + both.get(name, "") for name in changed)
        raise UserError(
            f"{_KEY} = {str(folder)!r}: holds values of another {others}; name another folder, or remove this one"
        )
    with writing(folder, key=_KEY):
        folder.mkdir(parents=True, exist_ok=True)
        replace_durably(file, [json.dumps(facts, indent=1).encode()])
    return [part for part in _parts(folder, facts) if not part.exists() or _whole(part) is None]


def _whole(part: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a part; None if it is damaged."""
    try:
        arrays = map_arrays(part, "")[0]
    except UserError:
        return None
    bounds = pairwise([0, *arrays["ends"].tolist()])
    found = [_checksum((arrays["ids"][low:high], arrays["logprobs"][low:high])) for low, high in bounds]
    return arrays if found == arrays["checksums"].tolist() else None


def _write(part: Path, facts: dict[str, Any], documents: list[AskedDocument], values: list[Values]) -> None:
    ids = np.concatenate([np.empty((0, facts["top_k"]), np.uint32), *(ids for ids, _ in values)])
    logprobs = np.concatenate([np.empty((0, facts["top_k"]), np.float32), *(logprobs for _, logprobs in values)])
    total = np.exp(logprobs.astype(np.float64)).sum(1)
    if not (np.isfinite(logprobs).all() and (np.diff(logprobs) <= 0).all() and (total < 1.01).all()):
        raise UserError(
            f"{facts['teacher']}: its log-probabilities are not finite, not in order, or of probabilities that add up "
            f"to {total.max():.3g}; take another type of it, such as --dtype float32"
        )
    arrays = {
        "ends": np.fromiter(accumulate(len(ids) for ids, _ in values), np.int64, len(values)),
        "ids": ids, "logprobs": logprobs, "checksums": np.array([*map(_checksum, values)], np.uint32),
        "keys": np.frombuffer(b"".join(each.key for each in documents), np.uint8).reshape(-1, 16),
    }  # fmt: skip
    with writing(part.parent, key=_KEY):
        write_arrays(part, arrays, {"format": _FORMAT})


def _checksum(values: Values) -> int:
    return zlib.crc32(values[1].tobytes(), zlib.crc32(values[0].tobytes()))


class TeacherValues:
    """The values of a folder, by document."""

    def __init__(self, folder: Path):
        """Raises UserError if there are none, or not all."""
        self._stated = f"{_KEY} = {str(folder)!r}"
        if not (folder / FILE_NAME).is_file():
            raise UserError(f"{self._stated}: holds no values of a teacher; {_AGAIN} first")
        self.facts = read_json_object(folder / FILE_NAME, f"remove the folder, and {_AGAIN}")
        names = {"format", "teacher", "tokenizer", "top_k", "temperature", "documents", "shards", "parts"}
        if self.facts.get("format") != _FORMAT or not names <= self.facts.keys() or not self.facts["parts"]:
            raise UserError(f"{self._stated}: holds other data than values of a teacher; name another folder")
        files = _parts(folder, self.facts)
        if lacks := [file for file in files if not file.exists()]:
            raise UserError(f"{self._stated}: lacks {len(lacks)} of {len(files)} parts; {_AGAIN}, which goes on")
        found = {file: _whole(file) for file in files}
        if damaged := [file for file, arrays in found.items() if arrays is None]:
            raise UserError(f"{damaged[0]}: is damaged; {_AGAIN}, which asks for it again")
        self._parts = [arrays for arrays in found.values() if arrays is not None]
        keys = np.concatenate([part["keys"] for part in self._parts]).view("S16")[:, 0]
        places = [(number, place) for number, part in enumerate(self._parts) for place in range(len(part["ends"]))]
        order = np.argsort(keys)
        self._keys, self._places = keys[order], np.array(places, np.int32).reshape(-1, 2)[order]

    def check(self, config: DistillationConfig, manifests: Sequence[Manifest]) -> None:
        """Raise UserError if a run needs other values than these."""
        facts, wanted, faults = self.facts, facts_of("", config, manifests), list[str]()
        if wanted["tokenizer"] != facts["tokenizer"]:
            faults.append(f"is of another tokenizer ({facts['tokenizer'][:12]}…) than model.tokenizer_path names")
        elif lacks := set(wanted["shards"]) - set(facts["shards"]):
            of = f"{len(lacks)} of {len(wanted['shards'])} shards of data.sources"
            faults.append(f"lacks {of}, which is other data, or in another chat format")
        if config.top_k > facts["top_k"]:
            wrong = f"fewer than finetune.distillation.top_k = {config.top_k}"
            faults.append(f"has {facts['top_k']} tokens of each target, {wrong}")
        if config.temperature != facts["temperature"]:
            wrong = f"not of finetune.distillation.temperature = {config.temperature:g}"
            faults.append(f"is of temperature {facts['temperature']:g}, {wrong}")
        remedy = f"restore the key, or name an empty folder and {_AGAIN}"
        if faults:
            raise UserError(*(f"{self._stated}: {fault}; {remedy}" for fault in faults))

    def of_batch(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """The tokens int64 [B, K, S], `IGNORE` without a target, and their FP32 log-probabilities, there 0. Raises
        UserError if values are missing."""
        numbers, tokens, labels = (batch[name].numpy() for name in ("document_ids", "input_ids", "labels"))
        ids = np.full((*tokens.shape, top_k), IGNORE, np.int64)
        logprobs = np.zeros(ids.shape, np.float32)
        for row, of_row in enumerate(numbers):
            for low, high in pairwise(np.flatnonzero(np.diff(of_row, prepend=-2, append=-2)).tolist()):
                document = AskedDocument(tokens[row, low:high], labels[row, low:high] != IGNORE)
                if document.is_target.any():
                    places = low + np.flatnonzero(document.is_target)
                    ids[row, places], logprobs[row, places] = (found[:, :top_k] for found in self.of(document))
        ids_BKS, logprobs_BKS = (torch.from_numpy(each).transpose(1, 2).contiguous() for each in (ids, logprobs))
        return ids_BKS, logprobs_BKS

    def of(self, document: AskedDocument) -> Values:
        """Of a document with targets; errors as of `of_batch`."""
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
        return part["ids"][rows], part["logprobs"][rows]
