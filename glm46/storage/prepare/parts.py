"""The parallel half of preparing text: turn one part of the input into files of tokens and facts per document.
`pipeline` calls `make_part` in worker processes.

A conversation is one unit of duplicates and of the split, and gives one or more documents; a pair gives one.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from glm46.config.text_recipe import PREFERENCES, TextRecipe
from glm46.files.array_file import map_arrays, write_arrays
from glm46.storage.chats.chat import ChatDocument, ChatOptions, render, render_pair
from glm46.storage.chats.chat_rows import BadConversation
from glm46.storage.chats.format_as_text import FORMAT_AS_TEXT
from glm46.storage.chats.pairs import EQUAL_HALVES
from glm46.storage.data.shards import NOT_A_TARGET, SHARD_REMEDY
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.prepare.contamination import EvaluationText, read_evaluation
from glm46.storage.prepare.documents import document_fault, encode_document, normalize
from glm46.storage.prepare.duplicates import BANDS, band_hashes, is_held_out
from glm46.storage.prepare.readers import InputPart, read_part
from glm46.storage.prepare.rows import EMPTY, BadDocument, Document, Fields
from glm46.storage.prepare.tally import Tally

# Text per piece: bounds the memory of a process and the work that a killed run loses.
PIECE_BYTES = 8_000_000

# Memory of a document in addition to its text, so that a million one-word documents are cut into pieces too.
DOCUMENT_BYTES = 500


@dataclass(frozen=True)
class _WorkerState:
    """State that a worker process keeps from part to part."""

    recipe: TextRecipe
    tokenizer: Tokenizer
    key: str
    evaluation: EvaluationText
    token_bytes: np.ndarray


_worker: _WorkerState
"""State of this process, once `start_worker` has run in it."""


def start_worker(recipe: TextRecipe, key: str, flavor: str) -> None:
    """Load the tokenizer and the evaluation text, once per process."""
    global _worker
    tokenizer = load_tokenizer(recipe.tokenizer, flavor)
    _worker = _WorkerState(recipe, tokenizer, key, read_evaluation(recipe), tokenizer.token_bytes())


def make_part(part: InputPart, stem: Path) -> tuple[int, Tally]:
    """Write the pieces of a part that do not exist yet.

    A piece ``<stem>-000.safetensors`` holds ``doc_ends`` I64 [d] of its documents and their ``tokens`` U32: ids, in
    text with an end token after each document, in chats with the bit `NOT_A_TARGET`. For each of n texts or
    conversations it holds ``text_bytes`` I64 [n], ``hashes`` U64 [n, 2], and with ``deduplicate = "near"`` also
    ``bands`` U64 [BANDS, n]; for conversations also the number of ``documents`` I64 [n]. Its metadata holds the key of
    the work, the tally, and whether it is the last piece of its part.

    Returns:
        Input bytes of the part, and its tally.
    """
    finished = finished_pieces(stem, _worker.key)
    if not finished or not finished[-1].is_last:
        for number, (documents, tally, is_last) in enumerate(_pieces(part, _worker.recipe)):
            if number >= len(finished):
                _write_piece(piece_file(stem, number), documents, tally, is_last)
        finished = finished_pieces(stem, _worker.key)
    total = Tally()
    for piece in finished:
        total.add(Tally(**json.loads(piece.metadata["tally"])))
    return part.size_bytes, total


def piece_file(stem: Path, number: int) -> Path:
    """Return the file of one piece."""
    return stem.with_name(f"{stem.name}-{number:03d}.safetensors")


class FinishedPiece(NamedTuple):
    """A file of `make_part`."""

    file: Path
    metadata: dict[str, str]

    @property
    def is_last(self) -> bool:
        """True if no other piece of its part follows."""
        return self.metadata["last"] == "1"


def finished_pieces(stem: Path, key: str) -> list[FinishedPiece]:
    """Return the existing pieces of a part up to the first missing one, or the first of other work."""
    pieces = list[FinishedPiece]()
    while not pieces or not pieces[-1].is_last:
        file = piece_file(stem, len(pieces))
        if not file.exists():
            break
        _, metadata, _ = map_arrays(file, SHARD_REMEDY)
        if metadata.get("key") != key:
            break
        pieces.append(FinishedPiece(file, metadata))
    return pieces


def _pieces(part: InputPart, recipe: TextRecipe) -> Iterator[tuple[list[Document], Tally, bool]]:
    """Yield the documents of a part in groups of about `PIECE_BYTES`, each with its tally and whether it is the last.

    An empty part gives one empty group.
    """
    documents = list[Document]()
    size = 0
    tally = Tally()
    for document in read_part(part, Fields.from_recipe(recipe)):
        if size >= PIECE_BYTES:
            yield documents, tally, False
            documents = []
            size = 0
            tally = Tally()
        if (readable := _readable(document, tally)) is not None:
            documents.append(readable)
            size += len(readable.text) + DOCUMENT_BYTES
    yield documents, tally, True


def _readable(document: Document | BadDocument, tally: Tally) -> Document | None:
    """Return a document; None, and count it, if it cannot be read."""
    if isinstance(document, Document):
        return document
    reason, place = document.args
    # Empty files, ties and truncated answers are common; unreadable documents may be a mistake in the recipe.
    is_usual = reason in (EMPTY, EQUAL_HALVES, *FORMAT_AS_TEXT)
    tally.count(tally.filtered if is_usual else tally.bad, reason, [place])
    return None


def _write_piece(file: Path, documents: list[Document], tally: Tally, is_last: bool) -> None:
    recipe = _worker.recipe
    tokens = []
    lengths = []
    text_bytes = []
    hashes = []
    bands = []
    counts = []
    # The last token of a chat is the marker that the model stops at.
    end = np.array([] if recipe.is_chat else [_worker.tokenizer.eos_id], np.uint32)
    for document in documents:
        text = normalize(document.text, recipe.normalize)
        encoded = text.encode()
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        if recipe.format in PREFERENCES:
            # The first half decides the split: all pairs of a prompt go to one side.
            digest = hashlib.blake2b(document.prompt.encode(), digest_size=8).digest() + digest[:8]
        produced = _token_documents(document, text, digest, tally)
        ids = [sequence & ~np.uint32(NOT_A_TARGET) for sequence in produced]
        if produced and _holds_evaluation_text(text, ids):
            tally.count(tally.filtered, "holds evaluation text", [document.place])
            continue
        if not produced:
            continue
        for sequence in produced:
            tokens += [sequence, end]
            lengths.append(len(sequence) + len(end))
        text_bytes.append(
            sum(int(_worker.token_bytes[sequence].sum()) for sequence in ids) if recipe.is_chat else len(encoded)
        )
        hashes.append(digest)
        counts.append(len(produced))
        if recipe.duplicates == "near":
            bands.append(band_hashes(np.concatenate(ids)))
    tensors = {
        "doc_ends": np.cumsum(np.array(lengths, np.int64)),
        "text_bytes": np.array(text_bytes, np.int64),
        "hashes": np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, 2),
    }
    if recipe.is_chat:
        tensors["documents"] = np.array(counts, np.int64)
    if recipe.duplicates == "near":
        # Stored band by band, because bands are read one at a time.
        tensors["bands"] = np.array(bands, np.uint64).reshape(-1, BANDS).T
    tensors["tokens"] = np.concatenate([np.empty(0, np.uint32), *tokens])
    facts = {"key": _worker.key, "last": str(int(is_last)), "tally": json.dumps(vars(tally))}
    write_arrays(file, tensors, facts)


def _holds_evaluation_text(text: str, ids: list[np.ndarray]) -> bool:
    """Return whether a document holds evaluation text.

    Args:
        text: text of a document of text.
        ids: tokens of each document of a conversation.
    """
    worker = _worker
    if not worker.evaluation.runs:
        return False
    texts = [worker.tokenizer.decode(tokens) for tokens in ids] if worker.recipe.is_chat else [text]
    return any(worker.evaluation.is_in(part) for part in texts)


def _token_documents(document: Document, text: str, digest: bytes, tally: Tally) -> list[np.ndarray]:
    """Return the documents of a text, a conversation, a pair or a labelled answer; an empty list if it is filtered."""
    if _worker.recipe.format in PREFERENCES:
        return _preference(document, tally)
    if _worker.recipe.is_chat:
        return _chat(document, tally)
    return _text(document, text, digest, tally)


def _text(document: Document, text: str, digest: bytes, tally: Tally) -> list[np.ndarray]:
    """Return the ids of a text, uint32 [n], without the end token; an empty list if the text is filtered."""
    recipe = _worker.recipe
    if fault := document_fault(text, document.answer, recipe):
        tally.count(tally.filtered, fault, [document.place])
        return []
    # Held-out text is not rearranged, so that losses under different fim_rate values can be compared.
    held_out = is_held_out(np.frombuffer(digest[:8], "<u8"), recipe.held_out)[0]
    return [_worker.tokenizer.encode(text) if held_out else encode_document(text, digest, recipe, _worker.tokenizer)]


def _chat(document: Document, tally: Tally) -> list[np.ndarray]:
    """Return the tokens of each document of a conversation, uint32 [n] with the bit `NOT_A_TARGET`; an empty list if
    all are skipped."""
    recipe = _worker.recipe
    place = [document.place]
    max_tokens = cast(int, recipe.max_tokens)  # required for chats
    options = ChatOptions(recipe.history, recipe.no_reasoning)
    try:
        rendered = render(document.conversations[0], _worker.tokenizer, options)
    except BadConversation as error:
        tally.count(tally.filtered, error.reason, place)
        return []
    for event, number in rendered.counts.items():
        if event != "no target":
            tally.count(tally.noted, event, place, number)
    kept = []
    num_too_long = 0
    for ids, is_target in rendered.documents:
        if len(ids) > max_tokens:
            num_too_long += 1
            continue
        kept.append(np.where(is_target, ids, ids | np.uint32(NOT_A_TARGET)))
    if kept and num_too_long:  # a conversation without any document is counted as skipped
        tally.count(tally.noted, "documents above max_tokens left out", place, num_too_long)
    if not kept:
        tally.count(tally.filtered, "above max_tokens" if rendered.documents else "no target", place)
    return kept


def _preference(document: Document, tally: Tally) -> list[np.ndarray]:
    """Return both halves of a pair as one document, in the format of `_chat`. A labelled answer is one half, and the
    other half is its first token."""
    recipe = _worker.recipe
    place = [document.place]
    is_pair = document.label is None
    max_tokens = cast(int, recipe.max_tokens)  # required for preferences
    try:
        halves = render_pair(document.conversations, _worker.tokenizer, recipe.no_reasoning)
    except BadConversation as error:
        tally.count(tally.filtered, error.reason, place)
        return []
    if not is_pair:
        halves.append(ChatDocument(halves[0].ids[:1], np.zeros(1, bool)))
        # A desirable answer is the first half, as the chosen one of a pair is.
        halves = halves if document.label else halves[::-1]
    fault = None
    if sum(len(half.ids) for half in halves) > max_tokens:
        fault = "above max_tokens"
    elif sum(bool(half.is_target.any()) for half in halves) < len(document.conversations):
        fault = "no target in chosen or rejected" if is_pair else "no target"
    elif is_pair and np.array_equal(halves[0].ids, halves[1].ids):
        fault = EQUAL_HALVES
    if fault is not None:
        tally.count(tally.filtered, fault, place)
        return []
    if not is_pair:
        tally.count(tally.noted, "desirable" if document.label else "undesirable", [])
    return [np.concatenate([np.where(is_target, ids, ids | np.uint32(NOT_A_TARGET)) for ids, is_target in halves])]
