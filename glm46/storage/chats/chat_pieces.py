"""The markers and texts of which a chat format makes a document or a prompt, in order."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from glm46.storage.chats.chat_format import (
    ASSISTANT,
    BEGIN,
    CALL,
    CALL_MARKERS,
    END_CALL,
    END_KEY,
    END_RESPONSE,
    END_THINK,
    END_VALUE,
    KEY,
    MARKERS,
    NO_THINK,
    OBSERVATION,
    RESPONSE,
    SYSTEM,
    THINK,
    TOOLS_HEAD,
    USER,
    VALUE,
    ChatFormat,
    Marker,
)
from glm46.storage.chats.chat_rows import BadConversation
from glm46.storage.chats.conversation import Message, function_of

EFFORTS = {"": "Max", "max": "Max", "high": "High"}
"""Reasoning efforts, as the formats that state them write them."""

_TAGS = re.compile(f"({'|'.join(map(re.escape, CALL_MARKERS))})")
_HIDDEN_KEYS = ("defer_loading", "strict")
"""Keys of a function that servers read and the model is not shown."""


class ChatPiece(NamedTuple):
    """A marker or a part of a text."""

    text: str
    """A `Marker`, or characters."""
    is_target: bool = False
    """Whether the model samples it."""


def opening_pieces(
    format: ChatFormat, tools: Sequence[Mapping[str, Any]], *, thinking: bool, effort: str
) -> list[ChatPiece]:
    """Return the pieces before the first message. Raises BadConversation if the format states efforts, but not this
    one.

    Args:
        thinking: whether the document or prompt allows thinking.
        effort: a key of `EFFORTS`; formats that state no effort ignore it.
    """
    pieces = [*map(ChatPiece, BEGIN)]
    if format.states_effort and thinking:
        if effort not in EFFORTS:
            raise BadConversation("reasoning_effort is neither high nor max", repr(effort)[:60])
        pieces += [ChatPiece(SYSTEM), ChatPiece(f"Reasoning Effort: {EFFORTS[effort]}")]
    if tools:
        # The tags in the explanation are tokens, as in the calls that it explains; tags in a tool's description are
        # text.
        tail = (Marker(part) if part in MARKERS else part for part in _TAGS.split(format.tools_tail))
        pieces += [*map(ChatPiece, (SYSTEM, TOOLS_HEAD + listed_tools(format, tools), *tail))]
    return pieces


def listed_tools(format: ChatFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the descriptions of the tools that a prompt lists, one per line."""
    if not format.defers_tools:
        return "".join(f"{_json(tool)}\n" for tool in tools)
    functions = map(function_of, tools)
    return "".join(_description(function) for function in functions if not function.get("defer_loading"))


def _description(function: Mapping[str, Any]) -> str:
    keys = (f'"{key}": {_json(value)}' for key, value in function.items() if key not in _HIDDEN_KEYS)
    return f"{{{', '.join(keys)}}}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class MessagePieces:
    """Writes the messages of a conversation in a format."""

    format: ChatFormat
    thinking: bool
    """Whether the document or prompt allows thinking."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Descriptions of the tools, to which results may refer."""
    keeps_thoughts: bool = False
    """Thoughts before the last user message stay; only for formats that open thoughts."""
    trains_empty_thoughts: bool = False
    """An empty thought of a sampled turn is a target."""

    def write(self, messages: Sequence[Message], targets: Collection[int] = ()) -> list[ChatPiece]:
        """Return the pieces of messages.

        Args:
            targets: indices of the assistant messages that are sampled, together with the marker after each.

        Raises:
            BadConversation: a result refers to a deferred tool, which the format does not have.
        """
        pieces = []
        last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        turn_has_thought = False
        sampled = False
        for index, message in enumerate(messages):
            previous_role = messages[index - 1].role if index else None
            sampled = sampled and previous_role == "assistant"
            if message.role == "user":
                turn_has_thought = _has_thought(messages[index + 1 :])
                # After calls the model samples the marker of their results: an interrupted turn has no stop token.
                pieces.append(ChatPiece(USER, sampled and not messages[index - 1].tool_calls))
                pieces += map(ChatPiece, self._asked(message.content))
            elif message.role == "system":
                # The model cannot learn to stop here: a user or a tool follows what it samples.
                pieces += [ChatPiece(SYSTEM), ChatPiece(f"{self.format.line}{message.content}")]
            elif message.role == "tool":
                if previous_role != "tool":
                    pieces.append(ChatPiece(OBSERVATION, sampled and bool(messages[index - 1].tool_calls)))
                result = f"{self.format.line}{self._result(message)}{self.format.line}"
                pieces += map(ChatPiece, (self.format.line, RESPONSE, result, END_RESPONSE))
            else:
                sampled = index in targets
                pieces.append(ChatPiece(ASSISTANT))
                pieces += self._thought(
                    message, is_sampled=sampled, is_recent=index > last_user, turn_has_thought=turn_has_thought
                )
                pieces += (ChatPiece(text, sampled) for text in self._answer(message))
        return pieces

    def _asked(self, content: str) -> list[str]:
        if self.format.opens_thought:
            return [f"{self.format.line}{content}"]
        # The one marker that a user may type: GLM's switch at the end of a message.
        text = content.removesuffix(NO_THINK)
        return [f"{self.format.line}{text}", *([] if self.thinking and text == content else [NO_THINK])]

    def _result(self, message: Message) -> str:
        if not message.loaded_tools:
            return message.content
        if not self.format.defers_tools:
            raise BadConversation("tool_reference in a chat format without deferred tools", self.format.name)
        functions = [*map(function_of, self.tools)]
        named = (function for name in message.loaded_tools for function in functions if function.get("name") == name)
        return f"<tools>\n{''.join(map(_description, named))}</tools>"

    def _thought(
        self, message: Message, *, is_sampled: bool, is_recent: bool, turn_has_thought: bool
    ) -> list[ChatPiece]:
        """Return the thought of a turn with its tags.

        Args:
            is_recent: whether the turn is after the last user message.
            turn_has_thought: whether an answer to the same user message has a thought, which may be empty.
        """
        format = self.format
        is_kept = self.keeps_thoughts or is_recent
        thought = _written_thought(message, format) if is_kept else None
        # A template writes <think> for a thought of white space; a prompt that forbids thinking opens no thought.
        if is_sampled and not (thought or "").strip():
            thought = None
        # If the prompt opened the thought, the sampled text begins inside it; the thought may be empty.
        is_opened = format.opens_thought and self.thinking and is_sampled
        has_tags = (
            thought is not None
            or format.tags_empty_thoughts
            or (is_opened and (is_recent or (is_kept and self.trains_empty_thoughts)))
            or (format.tags_recent_thoughts and is_kept and (self.thinking if is_recent else turn_has_thought))
        )
        # An empty thought that replaces a removed one was never sampled.
        may_be_empty = self.trains_empty_thoughts and has_tags and not message.reasoning.strip()
        is_target = is_sampled and (thought is not None or may_be_empty)
        text = thought or ""
        tags = (format.line, THINK) if has_tags else ()
        return [
            *(ChatPiece(tag, is_target and not format.opens_thought) for tag in tags),
            ChatPiece(text.strip() if format.strips_thoughts else text, is_target),
            ChatPiece(END_THINK, is_target),
        ]

    def _answer(self, message: Message) -> list[str]:
        text = message.content.strip()
        line = self.format.line
        pieces = [f"{line}{text}"] if text else []
        for call in message.tool_calls:
            pieces += [line, CALL, f"{call.name}{line}"]
            for key, value in call.arguments.items():
                text = value if isinstance(value, str) else _json(value)
                pieces += [KEY, str(key), END_KEY, line, VALUE, text, END_VALUE, line]
            pieces.append(END_CALL)
        return pieces


def _written_thought(message: Message, format: ChatFormat) -> str | None:
    """Return the thought as a format writes it; None if it writes no tags for it."""
    if format.strips_thoughts or message.written_reasoning is None:
        return message.reasoning or None
    return message.written_reasoning


def _has_thought(messages: Sequence[Message]) -> bool:
    """Return whether an answer before the next user message has a thought, which may be empty."""
    for message in messages:
        if message.role == "user":
            return False
        if message.role == "assistant" and (message.reasoning or message.written_reasoning is not None):
            return True
    return False
