"""Conversations: one line of a chat file as checked messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from glm46.storage.chats.chat_rows import BadConversation, chat_rows, message_list, role_of, text_of
from glm46.storage.chats.format_as_text import CALL_AS_TEXT, format_as_text, is_bare_call

_MAY_FOLLOW: dict[str, set[str | None]] = {
    "system": {None, "system", "user", "assistant"},
    "user": {None, "system", "user", "assistant"},
    "assistant": {"system", "user", "tool"},
    "tool": {"assistant", "tool"},
}
"""Roles directly before a role; None: the conversation begins with it."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the assistant."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Message:
    """One message. Consecutive messages of the role "tool" answer the calls of one turn."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    reasoning: str = ""
    """The assistant's thinking, without its tags."""
    tool_calls: tuple[ToolCall, ...] = ()
    is_trained: bool = True
    """True if an assistant's turn may be a target."""


@dataclass(frozen=True)
class Conversation:
    """Messages in an order that `parse_conversation` has checked; the last one is the assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """Descriptions of the tools, printed to the model as they are."""
    num_dropped: int = 0
    """Messages behind the last one of the assistant, which were left out."""


def parse_conversation(record: object, format: str) -> Conversation:
    """Read one line of a chat file. Raises BadConversation if the line is not a conversation of this format that an
    assistant takes part in.

    Args:
        record: the line as Python values, such as `json.loads` or `glm46.storage.prepare.parquet_rows` give them.
        format: one of `glm46.config.text_recipe.CHAT_FORMATS`.
    """
    if not isinstance(record, Mapping):
        raise BadConversation("line is not an object", type(record).__name__)
    rows = _joined(chat_rows(record, format))
    end = max((i for i, message in enumerate(rows, start=1) if message.role == "assistant"), default=0)
    if not end:
        raise BadConversation("no assistant")
    messages = tuple(rows[:end])
    _raise_for_order(messages)
    tools = parse_tools(record.get("tools"))
    _raise_for_bare_calls(messages, tools)
    return Conversation(messages, tools, len(rows) - end)


def parse_prompt(value: object, tools: Sequence[Mapping] = (), *, is_sampled: bool = False) -> tuple[Message, ...]:
    """Read what an assistant is asked to answer: a text of the user, or a list of messages as in ``messages``.

    Args:
        tools: as `parse_tools` gives them.
        is_sampled: answers in it are the policy's own, with whatever faults: they may be empty, or hold a chat format
            as text.

    Raises:
        BadConversation: it is neither, or no answer may follow: `parse_conversation` refuses the same with one.
    """
    rows = [{"role": "user", "content": value}] if isinstance(value, str) else message_list(value)
    messages = _joined(rows, is_sampled=is_sampled)
    if messages[-1].role == "assistant":
        raise BadConversation("the last message is neither the user's nor a tool's", "assistant")
    _raise_for_order([*messages, Message("assistant")])
    if not is_sampled:
        _raise_for_bare_calls(messages, tools)
    return tuple(messages)


def _joined(rows: Sequence[object], *, is_sampled: bool = False) -> list[Message]:
    """The messages of rows. LLaMA-Factory and ms-swift write each call as a message of its own: it joins the turn."""
    messages: list[Message] = []
    for index, row in ((number, result) for number, given in enumerate(rows) for result in _results(given)):
        message = _message(row, index, is_sampled=is_sampled)
        if message.role == "call" and messages and messages[-1].role == "assistant":
            turn = messages.pop()
            calls = turn.tool_calls + message.tool_calls
            trained = turn.is_trained and message.is_trained
            message = replace(turn, tool_calls=calls, is_trained=trained)
        elif message.role == "call":
            message = replace(message, role="assistant")
        messages.append(message)
    return messages


def _results(row: object) -> list:
    """A row; of a tool message with a list of results, as GLM's template takes them, a row for each result. A list of
    parts with a type is one text."""
    if not isinstance(row, Mapping) or role_of(row) != "tool" or not isinstance(row.get("content"), list):
        return [row]
    results = [one["output"] if isinstance(one, Mapping) and "output" in one else one for one in row["content"]]
    if not results or any(not isinstance(one, str) for one in results):
        return [row]
    return [{**row, "content": one} for one in results]


def split_thinking(content: str) -> tuple[str, str]:
    """Split an assistant's text into (thinking, answer) as GLM's chat template does.

    The thinking ends at the first ``</think>`` and begins behind the last ``<think>`` before it; the answer begins
    behind the last ``</think>``. Text before the thinking and between two ``</think>`` is left out.
    """
    if "</think>" not in content:
        return "", content
    thinking = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return thinking, content.split("</think>")[-1].lstrip("\n")


def _message(row: object, index: int, *, is_sampled: bool) -> Message:
    if not isinstance(row, Mapping):
        raise BadConversation("message is not an object", f"message {index}")
    role = role_of(row)
    if role is None:
        raise BadConversation("unknown role", repr(row.get("role")))
    trained = _is_trained(row)
    if role == "call":
        value = row.get("content")
        reasoning, value = split_thinking(value) if isinstance(value, str) else ("", value)
        _raise_for_format(reasoning, index)
        return Message(role, "", reasoning, _calls(_decoded(value, "tool call is not JSON")), trained)
    content = text_of(row.get("content"), role)
    if role != "assistant":
        return Message(role, content)
    # Hugging Face and ms-swift; vLLM; data sets of gpt-oss.
    given = [row[key] for key in ("reasoning_content", "reasoning", "thinking") if row.get(key) is not None]
    if any(not isinstance(reasoning, str) for reasoning in given):
        raise BadConversation("reasoning is not text", f"message {index}")
    reasoning, content = (given[0], content) if given else split_thinking(content)
    for text in () if is_sampled else (reasoning, content):
        _raise_for_format(text, index)
    old_form = row.get("function_call")
    calls = _calls(row.get("tool_calls") or ([old_form] if old_form else []))
    if not content.strip() and not calls and not is_sampled:
        raise BadConversation("assistant with neither content nor call", f"message {index}")
    return Message(role, content, reasoning, calls, trained)


def _raise_for_format(text: str, index: int) -> None:
    """Raise BadConversation if a text of the assistant holds a chat format as characters."""
    if found := format_as_text(text):
        raise BadConversation(found[0], f"{found[1]!r}, message {index}")


def _is_trained(row: Mapping) -> bool:
    given = [row[key] for key in ("weight", "loss", "train") if row.get(key) is not None]
    if any(value not in (0, 1) for value in given):
        raise BadConversation("weight is neither 0 nor 1", repr(given))
    return all(given)


def _calls(value: object) -> tuple[ToolCall, ...]:
    rows = [value] if isinstance(value, Mapping) else value
    if not isinstance(rows, list) or any(not isinstance(row, Mapping) for row in rows):
        raise BadConversation("tool calls are not a list of objects", type(value).__name__)
    calls = []
    for row in rows:
        function = row.get("function") or row
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise BadConversation("tool call without a name")
        arguments = _decoded(function.get("arguments") or {}, "arguments are not JSON")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise BadConversation("arguments are not an object", f"{name}: {type(arguments).__name__}")
        calls.append(ToolCall(name, arguments))
    return tuple(calls)


def parse_tools(value: object) -> tuple[Mapping, ...]:
    """Descriptions of tools: a list of objects, or its JSON text. Raises BadConversation if it is something else."""
    tools = _decoded(value or [], "tools are not JSON")
    tools = [] if tools is None else tools  # the text "null"
    if not isinstance(tools, list) or any(not isinstance(tool, Mapping) for tool in tools):
        raise BadConversation("tools are not a list of objects", type(tools).__name__)
    return tuple(tools)


def _decoded(value: object, reason: str) -> object:
    """The value of a JSON text, or a value that JSON has."""
    try:
        if isinstance(value, str):
            return json.loads(value)
        json.dumps(value)  # a Parquet file can hold dates and bytes
    except (TypeError, ValueError, RecursionError) as error:
        raise BadConversation(reason, str(error)) from error
    return value


def _raise_for_bare_calls(messages: Sequence[Message], tools: Sequence[Mapping]) -> None:
    for index, message in enumerate(messages):
        if message.role == "assistant" and is_bare_call(message.content, tools):
            raise BadConversation(CALL_AS_TEXT, f"JSON, message {index}")


def _raise_for_order(messages: Sequence[Message]) -> None:
    """Raise BadConversation where a role cannot follow: GLM's next role marker is what ends an assistant's turn."""
    last: Message | None = None
    unanswered = 0
    user_spoke = False
    for index, message in enumerate(messages):
        if message.role == "tool":
            if not unanswered:
                raise BadConversation("tool message not behind a tool call", f"message {index}")
            unanswered -= 1
        else:
            before = None if last is None else last.role
            open_call = last is not None and bool(last.tool_calls)
            early = message.role == "assistant" and not user_spoke
            if before not in _MAY_FOLLOW[message.role] or open_call or early:
                place = f"behind {before}" if before else "at the beginning"
                raise BadConversation("roles out of order", f"{message.role} {place}, message {index}")
            unanswered = len(message.tool_calls)
        user_spoke |= message.role == "user"
        last = message
