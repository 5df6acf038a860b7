"""Rows of a file as documents: a row holds a text, a conversation, a pair or a labelled answer."""

import json
import re
from collections.abc import Container
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import NamedTuple

from glm46.config.text_recipe import LABELLED, PAIRS, Recipe
from glm46.storage.chats.chat_rows import BadConversation
from glm46.storage.chats.conversation import Conversation, Message, parse_conversation
from glm46.storage.chats.pairs import parse_labelled, parse_pair

# Reason for skipping a document that holds only white space.
EMPTY = "empty"
NUL = "holds NUL characters"
"""Reason for refusing a row with U+0000, which binary data contains."""
_NUL_IN_JSON = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""The escape of U+0000, but not a backslash before the word ``u0000``."""

_CHAT_FIELDS = {
    "messages": "messages",
    "sharegpt": "conversations",
    "prompt_completion": "prompt",
    "alpaca": "instruction",
    PAIRS: "chosen",
}
"""Format -> a field that each of its rows has. A row of another format has one of the fields of chats."""


class BadDocument(Exception):
    """A document that cannot be read. Arguments: the reason under which it is counted, and its place."""


@dataclass(frozen=True)
class Document:
    """One text, one conversation, one pair, or one labelled answer."""

    text: str
    """The text; for conversations everything that was parsed, as JSON, which identifies them."""
    place: str
    """Its place in the input."""
    answer: str | None = None
    """Reference answer, if `Fields` names one."""
    conversations: tuple[Conversation, ...] = ()
    """The conversation, or both halves of the pair."""
    label: bool | None = None
    """Label of a labelled answer: whether it is desirable."""

    @property
    def prompt(self) -> str:
        """Shared beginning of both halves of a pair, or the messages that a labelled answer replies to, as JSON; else
        empty. Documents with the same prompt go to the same split."""
        messages = self.conversations[0].messages if self.conversations else ()
        if self.label is not None:
            last_user = max(place for place, message in enumerate(messages) if message.role == "user")
            shared = [_as_table(message) for message in messages[: last_user + 1]]
        else:
            pairs = zip(messages, *(half.messages for half in self.conversations[1:]), strict=False)
            shared = [_as_table(first) for first, *others in takewhile(lambda pair: [pair[0]] == [*pair[1:]], pairs)]
        return json.dumps(shared, ensure_ascii=False) if shared else ""


class Fields(NamedTuple):
    """Fields of a row of a JSON file, or columns of a Parquet file."""

    text: str
    """Column with the text; for conversations, a column that every row has."""
    answer: str | None = None
    """Column with the reference answer, if there is one."""
    format: str = "text"
    """Format of the rows, see `Recipe.format`."""
    json_is_text: bool = False
    """True if a .json file without rows is one text."""
    others: tuple[str, ...] = ()
    """Alternative fields: a row without ``text`` has one of them."""

    @property
    def named(self) -> str:
        """Names of the fields, for messages."""
        return " or ".join(f"'{name}'" for name in (self.text, *self.others))

    def are_in(self, names: Container[str]) -> bool:
        """Return True if a row with these field names holds the text."""
        return any(name in names for name in (self.text, *self.others))

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Fields":
        """Return the fields of the input of a recipe."""
        if recipe.is_chat:
            field = _CHAT_FIELDS.get(recipe.format)
            names = [*_CHAT_FIELDS.values()][:-1] if field is None else [field]
            return cls(names[0], None, recipe.format, others=tuple(names[1:]))
        answer = recipe.answer_key if recipe.verify in ("maths", "steps") else None
        return cls(recipe.text_key, answer, json_is_text=recipe.verify == "json")


def read_row(row: object, place: str, fields: Fields) -> Document | BadDocument:
    """Convert one row of JSON or Parquet to a document; a `BadDocument` if it cannot be read."""
    if fields.format != "text":
        return _chat(row, place, fields.format)
    row = row if isinstance(row, dict) else {}
    text = row.get(fields.text)
    answer = row.get(fields.answer)
    if not isinstance(text, str):
        return BadDocument(f"no text in field '{fields.text}'", place)
    if fault := text_fault(text):
        return BadDocument(fault, place)
    # Answers are often stored as numbers; bool is an int in Python, but not an answer.
    answer = str(answer) if isinstance(answer, (str, int, float)) and not isinstance(answer, bool) else None
    return Document(text, place, answer) if text.strip() else BadDocument(EMPTY, place)


def _chat(row: object, place: str, format: str) -> Document | BadDocument:
    try:
        conversations, label = _parsed(row, format)
        text = "\n".join(json.dumps(_as_table(conversation), ensure_ascii=False) for conversation in conversations)
    except BadConversation as error:
        return BadDocument(error.reason, f"{place} ({error.detail})" if error.detail else place)
    if fault := strings_fault(text):
        return BadDocument(fault, place)
    text = text if label is None else f"{text}\n{label}"
    return Document(text, place, None, conversations, label)


def _as_table(part: Message | Conversation) -> dict[str, object]:
    """Return what identifies a message or a conversation. White space around thoughts does not; newer fields are left
    out if they are empty, so that conversations without them keep their hashes, and so their split."""
    return asdict(
        part,
        dict_factory=lambda fields: {
            name: value
            for name, value in fields
            if name != "written_reasoning" and (value or name not in ("loaded_tools", "effort"))
        },
    )


def _parsed(row: object, format: str) -> tuple[tuple[Conversation, ...], bool | None]:
    """Return the conversations of a row, and its label."""
    if format == PAIRS:
        return parse_pair(row), None
    if format == LABELLED:
        conversation, label = parse_labelled(row)
        return (conversation,), label
    return (parse_conversation(row, format),), None


def text_fault(text: str) -> str | None:
    """Return the reason why a text is refused: characters that no text file contains; None if it is accepted."""
    # JSON can hold one half of a surrogate pair, which has no UTF-8 encoding.
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "not UTF-8"
    return NUL if "\0" in text else None


def strings_fault(text: str) -> str | None:
    """Return the fault of the strings and keys in JSON text, which is not restricted to ASCII; see `text_fault`."""
    return NUL if _NUL_IN_JSON.search(text) else text_fault(text)
