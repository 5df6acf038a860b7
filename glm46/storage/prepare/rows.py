"""Rows of a file as documents: a row holds a text, a conversation, a pair or a labelled answer."""

import json
from collections.abc import Container
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import NamedTuple

from glm46.config.text_recipe import LABELLED, PAIRS, Recipe
from glm46.storage.chats.conversation import BadConversation, Conversation, parse_conversation
from glm46.storage.chats.pairs import parse_labelled, parse_pair

# The reason of a document that holds only white space.
EMPTY = "empty"

_CHAT_FIELDS = {
    "messages": "messages", "sharegpt": "conversations", "prompt_completion": "prompt", "alpaca": "instruction",
    PAIRS: "chosen",
}  # fmt: skip
"""A field that each row of a format has; rows of the other formats have one of those of chats."""


class BadDocument(Exception):
    """A document that cannot be read. Arguments: the reason that it is counted under, and its place."""


@dataclass(frozen=True)
class Document:
    """One text, one conversation, one pair, or one labelled answer."""

    text: str
    """The text. Of conversations their identity: all that was parsed, as JSON."""
    place: str
    """Its place in the input."""
    answer: str | None = None
    """Its known result, if `Fields` names one."""
    conversations: tuple[Conversation, ...] = ()
    """The conversation, or both halves of the pair."""
    label: bool | None = None
    """Of a labelled answer: whether it is desirable."""

    @property
    def prompt(self) -> str:
        """Of a pair what both halves begin with, and what a labelled answer answers, as JSON; else empty. Those of one
        prompt are in one split."""
        messages = self.conversations[0].messages if self.conversations else ()
        if self.label is not None:
            asked = max(place for place, message in enumerate(messages) if message.role == "user")
            shared = [asdict(message) for message in messages[: asked + 1]]
        else:
            pairs = zip(messages, *(half.messages for half in self.conversations[1:]), strict=False)
            shared = [asdict(one) for one, *other in takewhile(lambda pair: [pair[0]] == [*pair[1:]], pairs)]
        return json.dumps(shared, ensure_ascii=False) if shared else ""


class Fields(NamedTuple):
    """Fields of a row of a JSON file, or columns of a Parquet file."""

    text: str
    """That of the text; of conversations one that each row has."""
    answer: str | None = None
    """That of the known result. A row without it, and a text file, give no result."""
    format: str = "text"
    """As `Recipe.format`."""
    json_is_text: bool = False
    """True if a .json file without rows is one text."""
    others: tuple[str, ...] = ()
    """Further fields, of which a row has one if it lacks ``text``."""

    @property
    def named(self) -> str:
        """For messages."""
        return " or ".join(f"'{name}'" for name in (self.text, *self.others))

    def are_in(self, names: Container[str]) -> bool:
        """True if a row with these names of fields holds the text."""
        return any(name in names for name in (self.text, *self.others))

    @classmethod
    def of(cls, recipe: Recipe) -> "Fields":
        """The fields of a recipe's input."""
        if recipe.is_chat:
            own = _CHAT_FIELDS.get(recipe.format)
            names = [*_CHAT_FIELDS.values()][:-1] if own is None else [own]
            return cls(names[0], None, recipe.format, others=tuple(names[1:]))
        answer = recipe.answer_key if recipe.verify in ("maths", "steps") else None
        return cls(recipe.text_key, answer, json_is_text=recipe.verify == "json")


def read_row(row: object, place: str, fields: Fields) -> Document | BadDocument:
    """Read one row, as JSON or Parquet gives it; a `BadDocument` if it cannot be read."""
    if fields.format != "text":
        return _chat(row, place, fields.format)
    row = row if isinstance(row, dict) else {}
    text, answer = row.get(fields.text), row.get(fields.answer)
    if not isinstance(text, str):
        return BadDocument(f"no text in field '{fields.text}'", place)
    if not _is_utf8(text):
        return BadDocument("not UTF-8", place)
    # Results are often stored as numbers; bool is an int in Python, but not a result.
    answer = str(answer) if isinstance(answer, (str, int, float)) and not isinstance(answer, bool) else None
    return Document(text, place, answer) if text.strip() else BadDocument(EMPTY, place)


def _chat(row: object, place: str, format: str) -> Document | BadDocument:
    try:
        conversations, label = _parsed(row, format)
        text = "\n".join(json.dumps(asdict(conversation), ensure_ascii=False) for conversation in conversations)
    except BadConversation as error:
        return BadDocument(error.reason, f"{place} ({error.detail})" if error.detail else place)
    text = text if label is None else f"{text}\n{label}"
    return Document(text, place, None, conversations, label) if _is_utf8(text) else BadDocument("not UTF-8", place)


def _parsed(row: object, format: str) -> tuple[tuple[Conversation, ...], bool | None]:
    """The conversations of a row, and its label."""
    if format == PAIRS:
        return parse_pair(row), None
    if format == LABELLED:
        conversation, label = parse_labelled(row)
        return (conversation,), label
    return (parse_conversation(row, format),), None


def _is_utf8(text: str) -> bool:
    # JSON can hold one half of a surrogate pair, which has no UTF-8 encoding.
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)
