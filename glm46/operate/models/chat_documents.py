"""Formats documents of chats as a model reads them, with targets in colour or in brackets."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.text import Text

from glm46.config.faults import counted
from glm46.config.printable import printable
from glm46.config.text_recipe import PAIRS, PREFERENCES
from glm46.storage.chats.chat_format import made_in
from glm46.storage.chats.pairs import BEGIN, SIDES
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.mixing import permute
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.data.tokenizer import Tokenizer


class ChatPart(NamedTuple):
    """The document of a conversation, or one half of a pair."""

    title: str
    ids: np.ndarray
    """Token ids, int64 [n]."""
    is_target: np.ndarray
    """True for tokens that are targets, bool [n]."""


def sampled_parts(manifest: Manifest, tokenizer: Tokenizer, *, rows: int) -> Iterator[ChatPart]:
    """Yield the parts of randomly chosen documents in a source's training split.

    Args:
        rows: number of documents.
    """
    stream = TokenStream(manifest.folder, manifest.splits["train"], manifest.vocab_size, marked=True)
    starts = np.concatenate([[0], stream.doc_ends()])
    count = len(starts) - 1
    chat_format = made_in(manifest.settings)
    for number in permute(np.arange(min(rows, count)), count, "inspect 0"):
        tokens = np.empty(starts[number + 1] - starts[number], np.int64)
        stream.read(int(starts[number]), tokens)
        yield from _parts(f"{number} of {count}", tokens, manifest.format, tokenizer, chat_format)


def _parts(
    name: str, tokens: np.ndarray, row_format: str, tokenizer: Tokenizer, chat_format: str
) -> Iterator[ChatPart]:
    """Yield the document of a conversation, both halves of a pair, or the labelled answer.

    Args:
        row_format: format of the rows, as in the recipe.
        chat_format: name of the chat format.
    """
    is_target = tokens < NOT_A_TARGET
    ids = tokens.astype(np.int64) & ~NOT_A_TARGET
    if row_format not in PREFERENCES:
        yield ChatPart(f"document {name}: {_amounts(is_target)}, chat format of {chat_format}", ids, is_target)
        return
    begins = np.flatnonzero(ids == tokenizer.special[BEGIN])[1:]
    names = SIDES if row_format == PAIRS else ("desirable", "undesirable")
    for side, half in zip(names, np.split(np.arange(len(ids)), begins), strict=False):
        if len(half) > 1:
            what = f"pair {name}, {side}" if row_format == PAIRS else f"{side} answer {name}"
            title = f"{what}: {_amounts(is_target[half])}, chat format of {chat_format}"
            yield ChatPart(title, ids[half], is_target[half])


def _amounts(is_target: np.ndarray) -> str:
    return f"{counted(len(is_target), 'token')}, {counted(int(is_target.sum()), 'target')}"


def shown_text(part: ChatPart, tokenizer: Tokenizer, *, max_tokens: int, brackets: bool) -> Text:
    """Format a part for a terminal: targets in colour and, with ``brackets``, in [[ ]]."""
    ids = part.ids[:max_tokens]
    is_target = part.is_target[:max_tokens]
    changes = np.flatnonzero(np.diff(is_target)) + 1
    shown = Text()
    for run_ids, run_targets in zip(np.split(ids, changes), np.split(is_target, changes), strict=True):
        text = printable(tokenizer.decode(run_ids))
        if not run_targets.any():
            shown.append(text)
        else:
            shown.append(f"[[{text}]]" if brackets else text, "bold green")
    if len(part.ids) > max_tokens:
        shown.append(f"\n… {len(part.ids) - max_tokens} more tokens", "dim")
    return shown
