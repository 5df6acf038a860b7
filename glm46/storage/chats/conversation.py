"""Parses a line of a chat file into a conversation of checked messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

from glm46.storage.chats.chat_rows import BadConversation, chat_rows, decoded, message_list, role_of, text_of
from glm46.storage.chats.format_as_text import CALL_AS_TEXT, format_as_text, is_bare_call

EFFORT_KEY = "reasoning_effort"
"""Column of chats and prompts with the reasoning effort."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by the assistant."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = field(default="", compare=False)
    """Name by which a result refers to the call; empty if there is none."""


@dataclass(frozen=True)
class Message:
    """One message. Consecutive messages of the role "tool" answer the calls of one turn, in the order of the calls."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    reasoning: str = ""
    """The assistant's thinking, without its tags, and without the line ends around a thought inside the content."""
    tool_calls: tuple[ToolCall, ...] = ()
    is_trained: bool = True
    """True if an assistant's turn may be a target."""
    call_id: str = field(default="", compare=False)
    """For the role "tool", the id of the call that it answers; empty if there is none."""
    loaded_tools: tuple[str, ...] = ()
    """For the role "tool", the names of the deferred tools that it refers to (``tool_reference``); its content is
    empty."""
    written_reasoning: str | None = field(default=None, compare=False)
    """The thinking with all white space around it, for formats that keep it; None if the message was not read from a
    row, or has no thought, not even an empty one."""


@dataclass(frozen=True)
class Conversation:
    """Messages in an order that `parse_conversation` has checked; the last one is the assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """Descriptions of the tools, printed to the model unchanged."""
    num_dropped: int = 0
    """Messages after the last assistant message; they were skipped."""
    effort: str = ""
    """Reasoning effort, for formats that state it; empty for their default."""


def parse_conversation(record: object, format: str) -> Conversation:
    """Read one line of a chat file. Raises BadConversation if the line is not a conversation of this format that an
    assistant takes part in.

    Args:
        record: the line as Python values, for example from `json.loads` or `glm46.storage.prepare.parquet_rows`.
        format: one of `glm46.config.text_recipe.CHAT_FORMATS`.
    """
    if not isinstance(record, Mapping):
        raise BadConversation("line is not an object", type(record).__name__)
    rows = _in_order_of_calls(_joined(chat_rows(record, format)))
    end = max((i for i, message in enumerate(rows, start=1) if message.role == "assistant"), default=0)
    if not end:
        raise BadConversation("no assistant")
    messages = tuple(rows[:end])
    _raise_for_order(messages)
    tools = parse_tools(record.get("tools"))
    _raise_for_references(messages, tools)
    _raise_for_bare_calls(messages, tools)
    effort = record.get(EFFORT_KEY)
    return Conversation(messages, tools, len(rows) - end, "" if effort is None else str(effort))


def parse_prompt(
    value: object, tools: Sequence[Mapping[str, Any]] = (), *, is_sampled: bool = False
) -> tuple[Message, ...]:
    """Read a prompt that an assistant shall answer: a text of the user, or a list of messages as in ``messages``.

    Args:
        tools: as returned by `parse_tools`.
        is_sampled: answers in it were sampled by the policy and may have faults: they may be empty, or hold a chat
            format as text. The last message may be such an answer, which another one follows.

    Raises:
        BadConversation: it is neither, or it is refused by the checks of `parse_conversation`, so no answer can follow.
    """
    rows = [{"role": "user", "content": value}] if isinstance(value, str) else message_list(value)
    messages = _in_order_of_calls(_joined(rows, is_sampled=is_sampled))
    if messages[-1].role == "assistant" and not is_sampled:
        raise BadConversation("the last message is neither the user's nor a tool's", "assistant")
    _raise_for_order(messages)
    _raise_for_references(messages, tools)
    if not is_sampled:
        _raise_for_bare_calls(messages, tools)
    return tuple(messages)


def _joined(rows: Sequence[object], *, is_sampled: bool = False) -> list[Message]:
    """Convert rows to messages. LLaMA-Factory and ms-swift write each call as a separate message: it joins the turn."""
    messages: list[Message] = []
    for index, row in (
        (number, result) for number, row_or_results in enumerate(rows) for result in _results(row_or_results)
    ):
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


def _in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with consecutive tool results in the order of their calls, if both have ids.

    The format has no ids: the position of a result binds it to its call. Clients that run calls at the same time send
    the results in the order in which they end.

    Raises:
        BadConversation: a result names a call that does not exist.
    """
    ordered: list[Message] = []
    places: dict[str, int] = {}
    count = 0
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        run = list(group)
        ordered += _in_order_of_places(run, places) if is_result else run
        for call in chain.from_iterable(message.tool_calls for message in run):
            # Some programs restart the ids in each turn: the latest call with an id counts.
            places |= {call.id: count} if call.id else {}
            count += 1
    return ordered


def _in_order_of_places(results: list[Message], places: Mapping[str, int]) -> list[Message]:
    """Sort results by the positions of their calls; unchanged if ids are missing."""
    if not places or not all(result.call_id for result in results):
        return results
    for result in results:
        if result.call_id not in places:
            raise BadConversation("tool result of a call that is not there", f"tool_call_id {result.call_id!r:.60}")
    return sorted(results, key=lambda result: places[result.call_id])


def _id_of(value: object) -> str:
    return str(value) if isinstance(value, str | int) else ""


def _results(row: object) -> list[Any]:
    """Return a row as a list. A tool message with a list of results, as GLM's template accepts them, becomes a row for
    each result. A list of parts with a type is one text."""
    if not isinstance(row, Mapping) or role_of(row) != "tool" or not isinstance(row.get("content"), list):
        return [row]
    results = [
        result["output"] if isinstance(result, Mapping) and "output" in result else result for result in row["content"]
    ]
    if not results or any(not isinstance(result, str) for result in results):
        return [row]
    return [{**row, "content": result} for result in results]


def split_thinking(content: str) -> tuple[str | None, str]:
    """Split an assistant's text into (thinking, answer) as GLM's chat template does; the thinking is None if there is
    no ``</think>``.

    The thinking ends at the first ``</think>`` and begins after the last ``<think>`` before it; the answer begins after
    the last ``</think>``. Text before the thinking and between two ``</think>`` is dropped.
    """
    if "</think>" not in content:
        return None, content
    thinking = content.split("</think>")[0].split("<think>")[-1]
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
        thinking, value = split_thinking(value) if isinstance(value, str) else (None, value)
        reasoning = (thinking or "").strip("\n")
        _raise_for_format(reasoning, index)
        return Message(role, "", reasoning, _calls(value), trained, written_reasoning=thinking)
    if role == "tool":
        call_id = _id_of(row.get("tool_call_id"))
        if names := _loaded_tools(row.get("content")):
            return Message(role, call_id=call_id, loaded_tools=names)
        return Message(role, text_of(row.get("content"), role), call_id=call_id)
    content = text_of(row.get("content"), role)
    if role != "assistant":
        return Message(role, content)
    # Keys of Hugging Face and ms-swift, of vLLM, and of data sets of gpt-oss.
    reasonings = [row[key] for key in ("reasoning_content", "reasoning", "thinking") if row.get(key) is not None]
    if any(not isinstance(reasoning, str) for reasoning in reasonings):
        raise BadConversation("reasoning is not text", f"message {index}")
    if reasonings:
        reasoning = reasonings[0]
        thinking = reasoning
    else:
        thinking, content = split_thinking(content)
        reasoning = (thinking or "").strip("\n")
    for text in () if is_sampled else (reasoning, content):
        _raise_for_format(text, index)
    stored = row.get("tool_calls") or row.get("function_call") or []
    calls = () if stored == "null" else _calls(stored)
    if not content.strip() and not calls and not is_sampled:
        raise BadConversation("assistant with neither content nor call", f"message {index}")
    return Message(role, content, reasoning, calls, trained, written_reasoning=thinking)


def _loaded_tools(content: object) -> tuple[str, ...]:
    """Return the names of the tools that a result refers to; empty if it is no list of references."""
    parts = content if isinstance(content, list) else []
    is_reference = [isinstance(part, Mapping) and part.get("type") == "tool_reference" for part in parts]
    if not any(is_reference):
        return ()
    names = [part.get("name") for part in parts if isinstance(part, Mapping)]
    if not all(is_reference) or not all(isinstance(name, str) and name for name in names):
        raise BadConversation("tool_reference without a name, or beside other parts")
    return tuple(map(str, names))


def _raise_for_format(text: str, index: int) -> None:
    """Raise BadConversation if a text of the assistant holds a chat format as characters."""
    if match := format_as_text(text):
        raise BadConversation(match[0], f"{match[1]!r}, message {index}")


def _is_trained(row: Mapping[str, Any]) -> bool:
    weights = [row[key] for key in ("weight", "loss", "train") if row.get(key) is not None]
    if any(value not in (0, 1) for value in weights):
        raise BadConversation("weight is neither 0 nor 1", repr(weights))
    return all(weights)


def _calls(value: object) -> tuple[ToolCall, ...]:
    """Return the calls of one turn: a list, one call, or JSON text of them."""
    if isinstance(value, str):
        value = decoded(value, "tool call is not JSON")
    rows = [value] if isinstance(value, Mapping) else value
    if not isinstance(rows, list) or any(not isinstance(row, Mapping) for row in rows):
        raise BadConversation("tool calls are not a list of objects", type(value).__name__)
    calls = []
    for row in rows:
        function = row.get("function") or row
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise BadConversation("tool call without a name")
        arguments = decoded(function.get("arguments") or {}, "arguments are not JSON")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise BadConversation("arguments are not an object", f"{name}: {type(arguments).__name__}")
        calls.append(ToolCall(name, arguments, _id_of(row.get("id"))))
    return tuple(calls)


def parse_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Parse descriptions of tools: a list of objects, or its JSON text. Raises BadConversation if it is something
    else."""
    tools = decoded(value or [], "tools are not JSON")
    tools = [] if tools is None else tools  # the text "null"
    if not isinstance(tools, list) or any(not isinstance(tool, Mapping) for tool in tools):
        raise BadConversation("tools are not a list of objects", type(tools).__name__)
    return tuple(tools)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function that a tool describes: the tool itself, or its ``function``."""
    function = tool.get("function") or tool
    return function if isinstance(function, Mapping) else tool


def _raise_for_references(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    names = [function_of(tool).get("name") for tool in tools]
    for index, message in enumerate(messages):
        if absent := [name for name in message.loaded_tools if name not in names]:
            raise BadConversation(
                "tool_reference to a tool that is not described", f"{absent[0]!r:.60}, message {index}"
            )


def _raise_for_bare_calls(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    for index, message in enumerate(messages):
        if message.role == "assistant" and is_bare_call(message.content, tools):
            raise BadConversation(CALL_AS_TEXT, f"JSON, message {index}")


def _raise_for_order(messages: Sequence[Message]) -> None:
    """Raise BadConversation for a result without a call. GLM's template can write all other orders of roles."""
    unanswered = 0
    for index, message in enumerate(messages):
        if message.tool_calls:
            unanswered = len(message.tool_calls)
        if message.role == "tool":
            if not unanswered:
                raise BadConversation("tool message not behind a tool call", f"message {index}")
            unanswered -= 1
