"""The parallel half of preparing text: turn one part of the input into files of tokens and facts per document.

A conversation is one unit of duplicates and of the split, and gives one or more documents; a pair gives one.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from glm46.config.errors import UserError
from glm46.config.text_recipe import PREFERENCES, TextRecipe
from glm46.files.array_file import map_arrays, write_arrays
from glm46.storage.chats.chat import ChatOptions, render, render_pair
from glm46.storage.chats.format_as_text import FORMAT_AS_TEXT
from glm46.storage.chats.pairs import EQUAL_HALVES
from glm46.storage.data.shards import NOT_A_TARGET, SHARD_REMEDY
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.prepare.documents import document_fault, encode_document, normalize
from glm46.storage.prepare.duplicates import BANDS, band_hashes, evaluation_ngrams, is_contaminated, is_held_out
from glm46.storage.prepare.input_files import find_files
from glm46.storage.prepare.readers import InputPart, parts_of, read_part, with_line
from glm46.storage.prepare.rows import EMPTY, BadDocument, Document, Fields
from glm46.storage.prepare.tally import Tally

# Text per piece: bounds the memory of a process and the work that a killed run loses.
PIECE_BYTES = 8_000_000

# Memory of a document besides its text, so that a million one-word documents are cut into pieces too.
DOCUMENT_BYTES = 500


@dataclass(frozen=True)
class _WorkerState:
    """State that a worker process keeps from part to part."""

    recipe: TextRecipe
    tokenizer: Tokenizer
    key: str
    evaluation: np.ndarray
    token_bytes: np.ndarray


_worker: _WorkerState
"""Of this process, once `start_worker` has run in it."""


def start_worker(recipe: TextRecipe, key: str, flavor: str) -> None:
    """Load the tokenizer and the evaluation text, once per process."""
    _begin(recipe, key, load_tokenizer(recipe.tokenizer, flavor))


def _begin(recipe: TextRecipe, key: str, tokenizer: Tokenizer) -> None:
    global _worker
    _worker = _WorkerState(recipe, tokenizer, key, _evaluation(recipe, tokenizer), tokenizer.token_bytes())


def first_documents(
    recipe: TextRecipe, tokenizer: Tokenizer, count: int, tally: Tally
) -> Iterator[tuple[str, np.ndarray]]:
    """The first documents of chats that a recipe would make, in the order of its files, without duplicates removed.

    Args:
        tally: counts what is left out before them.

    Returns:
        The place of the conversation of each, and its tokens, uint32 [n] with the bit `NOT_A_TARGET`.
    """
    _begin(recipe.model_copy(update={"decontaminate": ()}), "", tokenizer)
    fields, left = Fields.of(recipe), count
    parts = parts_of(find_files(recipe.input, "input"), fields) if count else []
    for one in (one for part in parts for one in read_part(part, fields)):
        if (document := _readable(one, tally)) is not None:
            for tokens in _made(document, tally)[:left]:
                left -= 1
                yield with_line(document.place), tokens
        if not left:
            return


def make_part(part: InputPart, stem: Path) -> tuple[int, Tally]:
    """Write the pieces of a part that do not exist yet.

    A piece ``<stem>-000.safetensors`` holds ``doc_ends`` I64 [d] of its documents and their ``tokens`` U32: ids, of
    text each with its end token, of chats with the bit `NOT_A_TARGET`. For each of n texts or conversations it holds
    ``text_bytes`` I64 [n], ``hashes`` U64 [n, 2], and with ``deduplicate = "near"`` also ``bands`` U64 [BANDS, n]; of
    conversations also the number of ``documents`` I64 [n]. Its metadata holds the key of the work, the tally, and
    whether it is the last piece of its part.

    Returns:
        Input bytes of the part, and its tally.
    """
    done = finished_pieces(stem, _worker.key)
    total = Tally()
    if not done or done[-1][1]["last"] != "1":
        for number, (documents, tally, is_last) in enumerate(_pieces(part, _worker.recipe)):
            if number >= len(done):
                _write_piece(piece_file(stem, number), documents, tally, is_last)
        done = finished_pieces(stem, _worker.key)
    for _, metadata in done:
        total.add(Tally(**json.loads(metadata["tally"])))
    return part.size_bytes, total


def piece_file(stem: Path, number: int) -> Path:
    """Return the file of one piece."""
    return stem.with_name(f"{stem.name}-{number:03d}.safetensors")


def finished_pieces(stem: Path, key: str) -> list[tuple[Path, dict[str, str]]]:
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
    documents, size, tally = list[Document](), 0, Tally()
    for document in read_part(part, Fields.of(recipe)):
        if size >= PIECE_BYTES:
            yield documents, tally, False
            documents, size, tally = [], 0, Tally()
        if (readable := _readable(document, tally)) is not None:
            documents.append(readable)
            size += len(readable.text) + DOCUMENT_BYTES
    yield documents, tally, True


def _readable(document: Document | BadDocument, tally: Tally) -> Document | None:
    """A document; None of one that cannot be read, which is counted."""
    if isinstance(document, Document):
        return document
    reason, place = document.args
    # Empty files, ties and cut answers are common; unreadable documents may be a mistake in the recipe.
    is_usual = reason in (EMPTY, EQUAL_HALVES, *FORMAT_AS_TEXT)
    tally.count(tally.filtered if is_usual else tally.bad, reason, [place])
    return None


def _write_piece(file: Path, documents: list[Document], tally: Tally, is_last: bool) -> None:
    recipe = _worker.recipe
    tokens, lengths, text_bytes, hashes, bands, counts = [], [], [], [], [], []
    # The last token of a chat is the marker that the model stops at.
    end = np.array([] if recipe.is_chat else [_worker.tokenizer.eos_id], np.uint32)
    for document in documents:
        text = normalize(document.text, recipe.normalize)
        encoded = text.encode()
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        if recipe.format in PREFERENCES:
            # The first half decides the split.
            digest = hashlib.blake2b(document.prompt.encode(), digest_size=8).digest() + digest[:8]
        made = _made(document, tally) if recipe.is_chat else _text(document, text, digest, tally)
        ids = [one & ~np.uint32(NOT_A_TARGET) for one in made]
        if any(is_contaminated(one, _worker.evaluation) for one in ids):
            tally.count(tally.filtered, "holds evaluation text", [document.place])
            continue
        if not made:
            continue
        for one in made:
            tokens += [one, end]
            lengths.append(len(one) + len(end))
        text_bytes.append(sum(int(_worker.token_bytes[one].sum()) for one in ids) if recipe.is_chat else len(encoded))
        hashes.append(digest)
        counts.append(len(made))
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


def _made(document: Document, tally: Tally) -> list[np.ndarray]:
    """The documents of a conversation, or that of a pair or a labelled answer."""
    return (_preference if _worker.recipe.format in PREFERENCES else _chat)(document, tally)


def _text(document: Document, text: str, digest: bytes, tally: Tally) -> list[np.ndarray]:
    """The ids of a text, uint32 [n], without the end token; empty if the text is filtered."""
    recipe = _worker.recipe
    if fault := document_fault(text, document.answer, recipe):
        tally.count(tally.filtered, fault, [document.place])
        return []
    # Held-out text is not rearranged, so that losses under different fim_rate values can be compared.
    held_out = is_held_out(np.frombuffer(digest[:8], "<u8"), recipe.held_out)[0]
    return [_worker.tokenizer.encode(text) if held_out else encode_document(text, digest, recipe, _worker.tokenizer)]


def _chat(document: Document, tally: Tally) -> list[np.ndarray]:
    """The tokens of each document of a conversation, uint32 [n] with the bit `NOT_A_TARGET`; empty if none is left."""
    recipe, place = _worker.recipe, [document.place]
    most = cast(int, recipe.max_tokens)  # required of chats
    rendered = render(document.conversations[0], _worker.tokenizer, ChatOptions(recipe.history, recipe.no_reasoning))
    for what, number in rendered.counts.items():
        if what != "no target":
            tally.count(tally.noted, what, place, number)
    kept = []
    for ids, is_target in rendered.documents:
        tokens = np.where(is_target, ids, ids | np.uint32(NOT_A_TARGET))
        if len(ids) > most:
            _raise_if_too_long(document, len(ids))
            tokens = tokens[: most if recipe.too_long == "cut" else 0]
            is_cut = bool(is_target[: len(tokens)].any())
            what = "documents cut to max_tokens" if is_cut else "documents above max_tokens left out"
            tally.count(tally.noted, what, place)
            if not is_cut:
                continue
        kept.append(tokens)
    if not kept:
        tally.count(tally.filtered, "above max_tokens" if rendered.documents else "no target", place)
    return kept


def _preference(document: Document, tally: Tally) -> list[np.ndarray]:
    """Both halves of a pair as one document, as `_chat`. A labelled answer is one of them, and the other one its first
    token."""
    recipe, place, is_pair = _worker.recipe, [document.place], document.label is None
    longest = cast(int, recipe.max_tokens)  # required of preferences
    halves = render_pair(document.conversations, _worker.tokenizer, recipe.no_reasoning)
    if not is_pair:
        halves.append(type(halves[0])(halves[0].ids[:1], np.zeros(1, bool)))
        halves = halves if document.label else halves[::-1]
    lengths = [len(half.ids) for half in halves]
    is_long = sum(lengths) > longest
    if is_long:
        _raise_if_too_long(document, sum(lengths))
        # The longer half loses more, so that the shorter one stays whole where it can.
        most = [max(longest // 2, longest - other) for other in reversed(lengths)]
        halves = [type(half)(*(part[:size] for part in half)) for half, size in zip(halves, most, strict=True)]
    fault = None
    if is_long and recipe.too_long == "drop":
        fault = "above max_tokens"
    elif sum(bool(half.is_target.any()) for half in halves) < len(document.conversations):
        fault = "above max_tokens" if is_long else "no target in chosen or rejected" if is_pair else "no target"
    elif is_pair and np.array_equal(halves[0].ids, halves[1].ids):
        fault = EQUAL_HALVES
    if fault is not None:
        tally.count(tally.filtered, fault, place)
        return []
    if is_long:
        tally.count(tally.noted, f"{'pairs' if is_pair else 'labelled answers'} cut to max_tokens", place)
    if not is_pair:
        tally.count(tally.noted, "desirable" if document.label else "undesirable", [])
    return [np.concatenate([np.where(is_target, ids, ids | np.uint32(NOT_A_TARGET)) for ids, is_target in halves])]


def _raise_if_too_long(document: Document, length: int) -> None:
    recipe = _worker.recipe
    if recipe.too_long == "error":
        raise UserError(
            f"{with_line(document.place)}: a document of {length} tokens, above max_tokens = {recipe.max_tokens}; "
            'raise max_tokens, or set too_long = "drop" or "cut"'
        )


def _evaluation(recipe: TextRecipe, tokenizer: Tokenizer) -> np.ndarray:
    """Return the n-gram hashes of the evaluation text that the recipe names."""
    if not recipe.decontaminate:
        return evaluation_ngrams([])
    fields = Fields(recipe.text_key)
    parts = parts_of(find_files(recipe.decontaminate, "decontaminate"), fields)
    texts = []
    for document in (document for part in parts for document in read_part(part, fields)):
        if isinstance(document, Document):
            texts.append(normalize(document.text, recipe.normalize))
        elif document.args[0] != EMPTY:
            reason, place = document.args
            raise UserError(
                f"decontaminate: {with_line(place)}: {reason}, so that no document would be compared with it; correct "
                f"or remove it (text_key = '{recipe.text_key}' names the field of evaluation text, too)"
            )
    return evaluation_ngrams([tokenizer.encode(text) for text in texts])
