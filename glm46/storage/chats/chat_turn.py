"""Splits an assistant's turn into thought, answer and tool calls while it is sampled; the inverse of the format."""

from typing import Literal, NamedTuple

from glm46.storage.chats.chat_format import (
    CALL,
    CALL_MARKERS,
    END_CALL,
    END_KEY,
    END_THINK,
    END_VALUE,
    KEY,
    THINK,
    VALUE,
)
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.conversation import Message, ToolCall
from glm46.storage.data.tokenizer import Tokenizer

Kind = Literal["thought", "answer", "call"]
_KINDS: dict[str, Kind] = {THINK: "thought", END_THINK: "answer", CALL: "call"}
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes in UTF-8, and so the maximum number of tokens per character."""


class Part(NamedTuple):
    """The part of a turn that a token adds to."""

    kind: Kind
    text: str
    """New text of the part; for a call ``name(key=value, ...)``."""


class TurnReader:
    """Reads the ids of a turn one by one. The format's markers count as special tokens only: as text they are text.

    Args:
        tokenizer: tells the chat format. White space around a thought stays where the format keeps it.
        in_thought: whether the prompt has opened the thought.
    """

    def __init__(self, tokenizer: Tokenizer, *, in_thought: bool = False):
        self._tokenizer = tokenizer
        self._strips_thoughts = format_of(tokenizer).strips_thoughts
        self._names = {tokenizer.special[name]: name for name in (THINK, END_THINK, *CALL_MARKERS)}
        self._kind: Kind = "thought" if in_thought else "answer"
        self._ids: list[int] = []
        """Ids of an incomplete character, or of the open call."""
        self._texts = {"thought": "", "answer": ""}
        self._calls: list[ToolCall] = []

    def read(self, token: int) -> Part | None:
        """Take the next id; returns the text that it completes."""
        name = self._names.get(token)
        if self._kind == "call":
            if name != END_CALL:
                self._ids.append(token)
                return None
            return self._end_call()
        # A call inside a thought is not run: it stays text of the thought.
        if name in (THINK, END_THINK) or (name == CALL and self._kind == "answer"):
            part = self._flush()
            if name != CALL:
                # The answer is the text after the last thought, as in GLM's template.
                self._texts["answer"] = ""
                self._calls.clear()
            self._kind = _KINDS[name]
            return part
        self._ids.append(token)
        is_open = self._tokenizer.decode(self._ids).endswith(_REPLACEMENT) and len(self._ids) < _LONGEST_CHARACTER
        return None if is_open else self._flush()

    @property
    def in_thought(self) -> bool:
        """True while the thought is open."""
        return self._kind == "thought"

    def end(self) -> tuple[Part | None, Message]:
        """Return the text that was held back, and the turn as a message of the conversation.

        A truncated or malformed call is text of the answer.
        """
        part = self._keep_as_text(CALL) if self._kind == "call" else self._flush()
        thought = self._texts["thought"]
        reasoning = thought.strip() if self._strips_thoughts else thought
        return part, Message("assistant", self._texts["answer"].strip(), reasoning, tuple(self._calls))

    def _flush(self) -> Part | None:
        text = self._tokenizer.decode(self._ids)
        self._ids = []
        return self._add(text)

    def _add(self, text: str) -> Part | None:
        if not self._texts[self._kind] and (self._kind == "answer" or self._strips_thoughts):
            text = text.lstrip("\n")
        self._texts[self._kind] += text
        return Part(self._kind, text) if text else None

    def _end_call(self) -> Part | None:
        call = self._call()
        if call is None:
            return self._keep_as_text(CALL, END_CALL)
        self._kind = "answer"
        self._ids = []
        self._calls.append(call)
        return Part("call", f"{call.name}({', '.join(f'{key}={value}' for key, value in call.arguments.items())})")

    def _keep_as_text(self, begin: str, end: str = "") -> Part | None:
        text = self._tokenizer.decode(self._ids)
        self._ids = []
        self._kind = "answer"
        return self._add(f"{begin}{text}{end}")

    def _call(self) -> ToolCall | None:
        """Return the open call; None if it is not in the format."""
        markers: list[str] = []
        texts: list[list[int]] = [[]]
        for token in self._ids:
            if token in self._names:
                markers.append(self._names[token])
                texts.append([])
            else:
                texts[-1].append(token)
        if markers != [KEY, END_KEY, VALUE, END_VALUE] * (len(markers) // 4):
            return None
        name, *argument_texts = map(self._tokenizer.decode, texts)
        if not name.strip():
            return None
        # After the name: a key, a line end, a value, a line end, and so on.
        return ToolCall(name.strip(), dict(zip(argument_texts[::4], argument_texts[2::4], strict=True)))
