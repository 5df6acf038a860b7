"""The parallel half of preparing text: turn one part of the input into files of tokens and facts per document."""

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
from glm46.prepare.document_hashes import BANDS, band_hashes, evaluation_ngrams, is_contaminated, is_held_out
from glm46.prepare.documents import document_fault, encode_document, normalize
from glm46.prepare.input_files import find_files
from glm46.prepare.readers import EMPTY, BadDocument, Document, InputPart, parts_of, read_part

# Text per piece: bounds the memory of a process and the work that a killed run loses.
PIECE_BYTES = 8_000_000

# Memory of a document besides its text, so that a million one-word documents are cut into pieces too.
DOCUMENT_BYTES = 500

# Places shown per reason in the summary.
_MAX_PLACES = 3


@dataclass
class Tally:
    """Counts of unreadable (``bad``) and filtered documents by reason, and the places of the first of each."""

    bad: dict[str, list] = field(default_factory=dict)
    filtered: dict[str, list] = field(default_factory=dict)

    @staticmethod
    def count(table: dict[str, list], reason: str, places: list[str], number: int = 1) -> None:
        """Add documents to one of the two tables."""
        entry = table.setdefault(reason, [0, []])
        entry[0] += number
        entry[1] = (entry[1] + places)[:_MAX_PLACES]

    def add(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        for mine, theirs in ((self.bad, other.bad), (self.filtered, other.filtered)):
            for reason, (number, places) in theirs.items():
                self.count(mine, reason, places, number)


@dataclass(frozen=True)
class _WorkerState:
    """State that a worker process keeps from part to part."""

    recipe: TextRecipe
    tokenizer: Tokenizer
    key: str
    evaluation: np.ndarray


_worker: _WorkerState | None = None


def start_worker(recipe: TextRecipe, key: str) -> None:
    """Load the tokenizer and the evaluation text, once per process."""
    global _worker
    tokenizer = load_tokenizer(recipe.tokenizer)
    _worker = _WorkerState(recipe, tokenizer, key, _evaluation(recipe, tokenizer))


def make_part(part: InputPart, stem: Path) -> tuple[int, Tally]:
    """Write the pieces of a part that do not exist yet.

    A piece ``<stem>-000.safetensors`` holds, per document: ``doc_ends`` I64, ``text_bytes`` I64, ``hashes`` U64 [d, 2]
    of its text, and with ``deduplicate = "near"`` also ``bands`` U64 [BANDS, d]; and the ``tokens`` U32 of all
    documents, each with its end token. Its metadata holds the key of the work, the tally, and whether it is the last
    piece of its part.

    Returns:
        Input bytes of the part, and its tally.
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
    """Return the file of one piece."""
    return stem.with_name(f"{stem.name}-{number:03d}.safetensors")


def finished_pieces(stem: Path, key: str) -> list[Path]:
    """Return the pieces of a finished part."""
    return [file for file, _ in _finished(stem, key)]


def _finished(stem: Path, key: str) -> list[tuple[Path, dict[str, str]]]:
    """Return the existing pieces of a part up to the first missing one, each with its metadata."""
    found: list[tuple[Path, dict[str, str]]] = []
    while not (found and found[-1][1]["last"] == "1"):
        file = piece_file(stem, len(found))
        if not file.exists() or (metadata := map_arrays(file, SHARD_REMEDY)[1]).get("key") != key:
            break
        found.append((file, metadata))
    return found


def _pieces(part: InputPart, recipe: TextRecipe) -> Iterator[tuple[list[Document], Tally, bool]]:
    """Yield the documents of a part in groups of about `PIECE_BYTES`, each with its tally and whether it is the last.

    An empty part gives one empty group.
    """
    documents, size, tally = [], 0, Tally()
    answer_key = recipe.answer_key if recipe.verify == "maths" else None
    for document in read_part(part, recipe.text_key, answer_key):
        if size >= PIECE_BYTES:
            yield documents, tally, False
            documents, size, tally = [], 0, Tally()
        if isinstance(document, BadDocument):
            reason, place = document.args
            # Empty files are common and harmless; unreadable documents may be a mistake in the recipe.
            tally.count(tally.filtered if reason == EMPTY else tally.bad, reason, [place])
            continue
        documents.append(document)
        size += len(document.text) + DOCUMENT_BYTES
    yield documents, tally, True


def _write_piece(file: Path, documents: list[Document], tally: Tally, is_last: bool) -> None:
    tokenizer = _worker.tokenizer
    tokens, lengths, text_bytes, hashes, bands = [], [], [], [], []
    end = np.array([tokenizer.eos_id], dtype=np.uint32)
    for document in documents:
        ids, encoded, digest = _process_document(document, tally)
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
        # Stored band by band, because bands are read one at a time.
        tensors["bands"] = np.array(bands, np.uint64).reshape(-1, BANDS).T
    tensors["tokens"] = np.concatenate([np.empty(0, np.uint32), *tokens])
    facts = {"key": _worker.key, "last": str(int(is_last)), "tally": json.dumps(vars(tally))}
    write_arrays(file, tensors, facts)


def _process_document(document: Document, tally: Tally) -> tuple[np.ndarray | None, bytes, bytes]:
    """Return token ids, UTF-8 bytes and hash of a document; None for the ids if it is filtered."""
    recipe = _worker.recipe
    text = normalize(document.text, recipe.normalize)
    encoded = text.encode()
    digest = hashlib.blake2b(encoded, digest_size=16).digest()
    if fault := document_fault(text, document.answer, recipe):
        tally.count(tally.filtered, fault, [document.place])
        return None, encoded, digest
    # Held-out text is not rearranged, so that losses under different fim_rate values can be compared.
    held_out = is_held_out(np.frombuffer(digest[:8], "<u8"), recipe.held_out)[0]
    ids = _worker.tokenizer.encode(text) if held_out else encode_document(text, digest, recipe, _worker.tokenizer)
    if is_contaminated(ids, _worker.evaluation):
        tally.count(tally.filtered, "holds evaluation text", [document.place])
        return None, encoded, digest
    return ids, encoded, digest


def _evaluation(recipe: TextRecipe, tokenizer: Tokenizer) -> np.ndarray:
    """Return the n-gram hashes of the evaluation text that the recipe names."""
    if not recipe.decontaminate:
        return evaluation_ngrams([])
    parts = parts_of(find_files(recipe.decontaminate, "decontaminate"), recipe.text_key)
    documents = [document for part in parts for document in read_part(part, recipe.text_key)]
    texts = [normalize(d.text, recipe.normalize) for d in documents if isinstance(d, Document)]
    return evaluation_ngrams([tokenizer.encode(text) for text in texts])
