"""Converts lines of chat files to rows with ``role`` and ``content``; the columns show which format a line has.

Sources of the formats: OpenAI's chat and fine-tuning files, Hugging Face chat data sets and ms-swift (``messages``),
LLaMA-Factory and axolotl (``sharegpt``), TRL (``prompt_completion``), Stanford Alpaca (``alpaca``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}
"""Role by each of its names. A "call" is a tool call in a separate message; it joins the assistant's turn."""


class BadConversation(ValueError):
    """A line that cannot be trained on. ``reason``: one of a fixed set of short texts, by which lines are counted.
    ``detail``: the value, or the place of the message in its conversation; may be empty."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def role_of(row: object) -> str | None:
    """Return the role of a message, or None if it has no known role."""
    name = row.get("role") if isinstance(row, Mapping) else None
    return _ROLES.get(name) if isinstance(name, str) else None


def columns_of(record: Mapping[str, Any]) -> str:
    """Describe the columns of a line, and the format that they match, for error messages."""
    format = _format_of(record)
    description = f"columns {', '.join(map(str, [*record][:12])) or 'none'}"
    return description if format is None else f'{description}: those of format = "{format}"'


def chat_rows(record: Mapping[str, Any], format: str) -> list[Any]:
    """Return the messages of a line in a chat format; for "chat" the columns of the line decide the format. Raises
    BadConversation, with the columns of the line, if it lacks one."""
    format_name = _format_of(record) if format == "chat" else format
    if format_name is None:
        raise BadConversation("columns of no chat format", columns_of(record))
    if missing := [column for column in COLUMNS[format_name] if record.get(column) is None]:
        missing_name = "messages" if format_name in ("messages", "sharegpt") else missing[0]
        raise BadConversation(f"no {missing_name}", columns_of(record))
    return ROWS[format_name](record)


def _format_of(record: Mapping[str, Any]) -> str | None:
    return next(
        (name for name, columns in COLUMNS.items() if all(record.get(column) is not None for column in columns)), None
    )


def untrained(rows: Sequence[object]) -> list[Any]:
    """Mark messages as not trained: an answer inside a prompt is input, not a target."""
    return [{**row, "weight": 0} if isinstance(row, Mapping) else row for row in rows]


def message_list(value: object) -> list[Any]:
    """Return the rows of a list that is not empty, or of one that is stored as JSON text.

    ``from`` and ``value``, the names in ShareGPT, become ``role`` and ``content``.

    Raises:
        BadConversation: there is no such list.
    """
    if isinstance(value, str) and value.strip():
        value = decoded(value, "messages are text, not JSON")
    if not isinstance(value, list) or not value:
        raise BadConversation("no messages")
    return [
        {**row, "role": row["from"], "content": row.get("value")}
        if isinstance(row, Mapping) and "from" in row and "role" not in row
        else row
        for row in value
    ]


def decoded(value: object, reason: str) -> object:
    """Return the value of a JSON text, or a value unchanged if JSON can hold it.

    Raises:
        BadConversation: with ``reason``.
    """
    try:
        if isinstance(value, str):
            return json.loads(value)
        json.dumps(value)  # a Parquet file can hold dates and bytes
    except (TypeError, ValueError, RecursionError) as error:
        raise BadConversation(reason, str(error)) from error
    return value


def text_or_messages(value: object) -> object:
    """Return the messages if a value is a text that holds messages as JSON, else the value.

    Parquet files store lists as text if their messages have fields of different types. A text stays a text unless all
    of it is a list of messages with known roles, or one such message.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError):
        return value
    rows = messages if isinstance(messages, list) else [messages]
    return rows if rows and all(_is_message(row) for row in rows) else value


def _is_message(row: object) -> bool:
    """Return whether a value has a known role and a content or calls."""
    if not isinstance(row, Mapping):
        return False
    name = row.get("role", row.get("from"))
    has_content = not {"content", "value", "tool_calls", "function_call"}.isdisjoint(row)
    return isinstance(name, str) and name in _ROLES and has_content


def _prompt_completion_rows(record: Mapping[str, Any]) -> list[Any]:
    prompt = text_or_messages(record.get("prompt"))
    completion = text_or_messages(record.get("completion"))
    prompt = untrained(message_list(prompt)) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if not isinstance(completion, list):
        return [*prompt, {"role": "assistant", "content": completion}]
    return prompt + message_list(completion)


def asked_rows(record: Mapping[str, Any]) -> list[Any]:
    """Return the messages that an assistant shall answer, from the usual columns of data sets; empty if there is no
    prompt."""
    prompt = text_or_messages(record.get("prompt"))
    if isinstance(prompt, list):
        return message_list(prompt) if prompt else []
    rows = next((message_list(record[key]) for key in ("messages", "conversations") if record.get(key)), [])
    question = record.get("question") if prompt is None else prompt
    if not rows and question is None and record.get("instruction") is not None:
        return _instruction_rows(record)
    rows = [{"role": "user", "content": question}] if question is not None and not rows else rows
    return _system_row(record) + rows if rows else []


def _instruction_rows(record: Mapping[str, Any]) -> list[Any]:
    rows = _system_row(record)
    history = record.get("history") or []
    if isinstance(history, str):
        history = decoded(history, "history is not a list of pairs")
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise BadConversation("history is not a list of pairs")
    for question, answer in history:
        rows += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    instruction = record.get("instruction")
    extra = record.get("input")
    if extra:
        instruction = f"{text_of(instruction, 'user')}\n{text_of(extra, 'user')}"
    return [*rows, {"role": "user", "content": instruction}]


COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
"""Columns that each line of a format has; they identify the format."""
ROWS: dict[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    "messages": lambda record: message_list(record["messages"]),
    "sharegpt": lambda record: _system_row(record) + message_list(record["conversations"]),
    "prompt_completion": _prompt_completion_rows,
    "alpaca": lambda record: [*_instruction_rows(record), {"role": "assistant", "content": record["output"]}],
}


def _system_row(record: Mapping[str, Any]) -> list[Any]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def text_of(content: object, role: str) -> str:
    """Return the text of a message: its content, or the concatenated parts of it. An assistant that only calls tools,
    and a tool without a result, may have no text."""
    if isinstance(content, str):
        return content
    if content is None and role in ("assistant", "tool"):
        return ""
    if not isinstance(content, list):
        raise BadConversation("content is neither text nor a list of text", type(content).__name__)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else part
        if isinstance(kind, str) and kind != "text":
            raise BadConversation("image, audio or other part that is not text", kind)
        if not isinstance(text, str):
            raise BadConversation("content is neither text nor a list of text", f"list of {type(text).__name__}")
        texts.append(text)
    return "".join(texts)
