"""The parallel half of preparing text: one part of the input to files of tokens, with what is known per document."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from glm46.config.text_recipe import TextRecipe
from glm46.data.shards import SHARD_REMEDY
from glm46.data.tokenizer import Tokenizer, load_tokenizer
from glm46.files.array_file import map_arrays, write_arrays
from glm46.prepare.document_hashes import BANDS, band_hashes, evaluation_runs, is_contaminated, is_held_out
from glm46.prepare.filters import document_fault
from glm46.prepare.fim import encode_document
from glm46.prepare.normalization import normalized
from glm46.prepare.readers import EMPTY, BadDocument, Document, Part, find_files, parts_of, read_part

# Text per file that a part writes: bounds the memory of a process, and what a killed run loses.
PIECE_BYTES = 8_000_000

# What a document costs in memory besides its text, so that a million of single words are cut into pieces too.
DOCUMENT_BYTES = 500

# Places shown per reason in the report on what was left out.
SAMPLES = 3


@dataclass
class Tally:
    """How many documents were left out for a reason, and where the first of them are."""

    bad: dict[str, list] = field(default_factory=dict)
    dropped: dict[str, list] = field(default_factory=dict)

    @staticmethod
    def count(table: dict[str, list], reason: str, places: list[str], number: int = 1) -> None:
        """Add to one of the two tables."""
        entry = table.setdefault(reason, [0, []])
        entry[0] += number
        entry[1] = (entry[1] + places)[:SAMPLES]

    def count_dropped(self, reason: str, number: int) -> None:
        """Add documents whose places are not known any more."""
        if number:
            self.count(self.dropped, reason, [], number)

    def add(self, other: "Tally") -> None:
        """Take over the counts of another tally."""
        for mine, theirs in ((self.bad, other.bad), (self.dropped, other.dropped)):
            for reason, (number, places) in theirs.items():
                self.count(mine, reason, places, number)


@dataclass(frozen=True)
class Worker:
    """What a process keeps from part to part."""

    recipe: TextRecipe
    tokenizer: Tokenizer
    key: str
    evaluation: np.ndarray


_worker: Worker | None = None


def start_worker(recipe: TextRecipe, key: str) -> None:
    """Load what every part needs, once per process."""
    global _worker
    tokenizer = load_tokenizer(recipe.tokenizer)
    _worker = Worker(recipe, tokenizer, key, _evaluation(recipe, tokenizer))


def make_part(part: Part, stem: Path) -> tuple[int, Tally]:
    """Write the pieces of a part that are not there yet.

    A piece ``<stem>-000.safetensors`` holds, per document: ``doc_ends`` I64, ``text_bytes`` I64, ``hashes`` U64 [d, 2]
    of its text, and ``bands`` U64 [BANDS, d] where similar ones are looked for; and the ``tokens`` U32 of all, each
    document with its end token. Its metadata holds the key of the
    work, what was left out, and whether it is the last of its part.

    Returns:
        Bytes of input that the part stands for, and what was left out.
    """
    done = _finished(stem, _worker.key)
    total = Tally()
    if not done or done[-1][1]["last"] != "1":
        for number, (documents, tally, is_last) in enumerate(_pieces(part, _worker.recipe)):
            if number >= len(done):
                _write_piece(piece_file(stem, number), documents, tally, is_last)
        done = _finished(stem, _worker.key)
    for _, metadata in done:
        total.add(Tally(**json.loads(metadata["tally"])))
    return part.size_bytes, total


def piece_file(stem: Path, number: int) -> Path:
    """The file of one piece."""
    return stem.with_name(f"{stem.name}-{number:03d}.safetensors")


def finished_pieces(stem: Path, key: str) -> list[Path]:
    """The files of a part that is done."""
    return [file for file, _ in _finished(stem, key)]


def _finished(stem: Path, key: str) -> list[tuple[Path, dict[str, str]]]:
    """The first pieces of a part that are there without a gap, each with its metadata."""
    found: list[tuple[Path, dict[str, str]]] = []
    while not (found and found[-1][1]["last"] == "1"):
        file = piece_file(stem, len(found))
        if not file.exists() or (metadata := map_arrays(file, SHARD_REMEDY)[1]).get("key") != key:
            break
        found.append((file, metadata))
    return found


def _pieces(part: Part, recipe: TextRecipe) -> Iterator[tuple[list[Document], Tally, bool]]:
    """Documents of a part in groups of about `PIECE_BYTES`; at least one group, the last one marked."""
    documents, size, tally = [], 0, Tally()
    answer_key = recipe.answer_key if recipe.verify == "maths" else None
    for document in read_part(part, recipe.text_key, answer_key):
        if size >= PIECE_BYTES:
            yield documents, tally, False
            documents, size, tally = [], 0, Tally()
        if isinstance(document, BadDocument):
            reason, place = document.args
            # Empty files are common and harmless; what cannot be read may be a mistake in the recipe.
            tally.count(tally.dropped if reason == EMPTY else tally.bad, reason, [place])
            continue
        documents.append(document)
        size += len(document.text) + DOCUMENT_BYTES
    yield documents, tally, True


def _write_piece(file: Path, documents: list[Document], tally: Tally, is_last: bool) -> None:
    tokenizer = _worker.tokenizer
    tokens, lengths, text_bytes, hashes, bands = [], [], [], [], []
    end = np.array([tokenizer.eos_id], dtype=np.uint32)
    for document in documents:
        ids, encoded, digest = _treat(document, tally)
        if ids is None:
            continue
        tokens += [ids, end]
        lengths.append(len(ids) + 1)
        text_bytes.append(len(encoded))
        hashes.append(digest)
        if _worker.recipe.deduplicate == "near":
            bands.append(band_hashes(ids))
    tensors = {
        "doc_ends": np.cumsum(np.array(lengths, np.int64)),
        "text_bytes": np.array(text_bytes, np.int64),
        "hashes": np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, 2),
    }
    if _worker.recipe.deduplicate == "near":
        # One band after another: they are read one at a time.
        tensors["bands"] = np.array(bands, np.uint64).reshape(-1, BANDS).T
    tensors["tokens"] = np.concatenate([np.empty(0, np.uint32), *tokens])
    facts = {"key": _worker.key, "last": str(int(is_last)), "tally": json.dumps(vars(tally))}
    write_arrays(file, tensors, facts)


def _treat(document: Document, tally: Tally) -> tuple[np.ndarray | None, bytes, bytes]:
    """Ids, UTF-8 and hash of a document; no ids if it is left out."""
    recipe = _worker.recipe
    text = normalized(document.text, recipe.normalize)
    encoded = text.encode()
    digest = hashlib.blake2b(encoded, digest_size=16).digest()
    if fault := document_fault(text, document.answer, recipe):
        tally.count(tally.dropped, fault, [document.place])
        return None, encoded, digest
    # Held-out text stays as it is written, so that losses of different rates can be compared.
    held_out = is_held_out(np.frombuffer(digest[:8], "<u8"), recipe.held_out)[0]
    ids = _worker.tokenizer.encode(text) if held_out else encode_document(text, digest, recipe, _worker.tokenizer)
    if is_contaminated(ids, _worker.evaluation):
        tally.count(tally.dropped, "holds evaluation text", [document.place])
        return None, encoded, digest
    return ids, encoded, digest


def _evaluation(recipe: TextRecipe, tokenizer: Tokenizer) -> np.ndarray:
    """Runs of the evaluation text that the recipe names."""
    if not recipe.decontaminate:
        return evaluation_runs([])
    parts = parts_of(find_files(recipe.decontaminate, "decontaminate"), recipe.text_key)
    documents = [document for part in parts for document in read_part(part, recipe.text_key)]
    texts = [normalized(d.text, recipe.normalize) for d in documents if isinstance(d, Document)]
    return evaluation_runs([tokenizer.encode(text) for text in texts])
