"""Lines of chat files as rows with ``role`` and ``content``, whatever format the file has, which its columns tell.

Sources of the formats: OpenAI's chat and fine-tuning files, Hugging Face chat data sets and ms-swift (``messages``),
LLaMA-Factory and axolotl (``sharegpt``), TRL (``prompt_completion``), Stanford Alpaca (``alpaca``).
"""

from collections.abc import Mapping, Sequence

_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
"""Our role by each name of it. A "call" is a tool call in a message of its own; it joins the assistant's turn."""


class BadConversation(ValueError):
    """A line that cannot be trained on: the reason, one of a fixed set of short texts to count lines by; and the value,
    or the place of the message in its conversation, which may be empty."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def role_of(row: object) -> str | None:
    """Our name of the role of a message; None if it has no role that is known."""
    name = row.get("role") if isinstance(row, Mapping) else None
    return _ROLES.get(name) if isinstance(name, str) else None


def columns_of(record: Mapping) -> str:
    """The columns of a line, for messages, and the format that they are those of."""
    format, found = _format_of(record), f"columns {', '.join(map(str, [*record][:12])) or 'none'}"
    return found if format is None else f'{found}: those of format = "{format}"'


def chat_rows(record: Mapping, format: str) -> list:
    """The messages of a line of a chat format; of "chat" its columns tell which. Raises BadConversation if it lacks a
    column, with those that it has."""
    known = _format_of(record) if format == "chat" else format
    if known is None:
        raise BadConversation("columns of no chat format", columns_of(record))
    if absent := [column for column in COLUMNS[known] if record.get(column) is None]:
        what = "messages" if known in ("messages", "sharegpt") else absent[0]
        raise BadConversation(f"no {what}", columns_of(record))
    return ROWS[known](record)


def _format_of(record: Mapping) -> str | None:
    return next((name for name, of in COLUMNS.items() if all(record.get(column) is not None for column in of)), None)


def untrained(rows: Sequence[object]) -> list:
    """Messages of which none is a target: an answer inside a prompt was given, not asked for."""
    return [{**row, "weight": 0} if isinstance(row, Mapping) else row for row in rows]


def message_list(value: object) -> list:
    """The rows of a list that is not empty; ``from`` and ``value`` of ShareGPT are names of role and content."""
    if not isinstance(value, list) or not value:
        raise BadConversation("no messages")
    return [
        {**row, "role": row["from"], "content": row.get("value")}
        if isinstance(row, Mapping) and "from" in row and "role" not in row
        else row
        for row in value
    ]


def _prompt_completion_rows(record: Mapping) -> list:
    prompt, completion = record.get("prompt"), record.get("completion")
    prompt = untrained(message_list(prompt)) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if not isinstance(completion, list):
        return [*prompt, {"role": "assistant", "content": completion}]
    return prompt + message_list(completion)


def asked_rows(record: Mapping) -> list:
    """The messages that an assistant is to answer, in the columns that data sets have for them; empty without one."""
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        return message_list(prompt) if prompt else []
    rows = next((message_list(record[key]) for key in ("messages", "conversations") if record.get(key)), [])
    question = record.get("question") if prompt is None else prompt
    if not rows and question is None and record.get("instruction") is not None:
        return _instruction_rows(record)
    rows = [{"role": "user", "content": question}] if question is not None and not rows else rows
    return _system_row(record) + rows if rows else []


def _instruction_rows(record: Mapping) -> list:
    rows = _system_row(record)
    history = record.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise BadConversation("history is not a list of pairs")
    for question, answer in history:
        rows += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    instruction, extra = record.get("instruction"), record.get("input")
    if extra:
        instruction = f"{text_of(instruction, 'user')}\n{text_of(extra, 'user')}"
    return [*rows, {"role": "user", "content": instruction}]


COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",), "sharegpt": ("conversations",), "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}  # fmt: skip
"""Columns that each line of a format has, and by which it is told."""
ROWS = {
    "messages": lambda record: message_list(record["messages"]),
    "sharegpt": lambda record: _system_row(record) + message_list(record["conversations"]),
    "prompt_completion": _prompt_completion_rows,
    "alpaca": lambda record: [*_instruction_rows(record), {"role": "assistant", "content": record["output"]}],
}


def _system_row(record: Mapping) -> list:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def text_of(content: object, role: str) -> str:
    """The text of a message: its content, or the parts of it put together."""
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
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
