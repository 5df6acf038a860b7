"""Anthropic's messages API: requests in the words of OpenAI's chat API, and answers as messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm46.tasks.rl.rollout.session import AnsweredTurn

COUNT_TOKENS = "messages/count_tokens"
_KEPT = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k", "thinking")
_REFUSED = ("stop_sequences", "output_format", "mcp_servers", "container")


def chat_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """A request as one of chat/completions. A result of a tool goes to the place of its call; text beside results is
    written behind the last one, because a user cannot speak between a tool and the policy.

    Raises:
        ValueError: the body is not a request, or asks for something that the policy cannot do.
    """
    asked = {name: table.get(name) for name in _REFUSED}
    output = table.get("output_config")
    asked["output_config.format"] = output.get("format") if isinstance(output, Mapping) else output
    choice = table.get("tool_choice")
    is_void = choice == {"type": "auto"} or (choice == {"type": "none"} and not table.get("tools"))
    asked["tool_choice"] = None if is_void else choice
    for name, value in asked.items():
        if value not in (None, []):
            raise ValueError(f"{name}: not possible, because samples are of the policy itself; remove it")
    rows = [{"role": "system", "content": table["system"]}] if table.get("system") else []
    calls: list[Any] = []
    for message in _tables(table.get("messages"), "messages"):
        if message.get("role") == "assistant":
            row = _assistant_row(_blocks(message))
            calls = [call["id"] for call in row["tool_calls"]]
            rows.append(row)
        elif message.get("role") == "user":
            rows += _user_rows(_blocks(message), calls)
        else:
            rows.append(dict(message))
    tools = [_tool(tool) for tool in _tables(table.get("tools") or [], "tools")]
    return {name: table[name] for name in _KEPT if name in table} | {"messages": rows, "tools": tools}


def _tables(value: object, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or any(not isinstance(one, Mapping) for one in value):
        raise ValueError(f"{name}: not a list of objects")
    return value


def _blocks(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else _tables(content, "content")


def _assistant_row(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            calls.append({"id": block.get("id"), "name": block.get("name"), "arguments": block.get("input") or {}})
        elif kind in ("text", "thinking"):
            (texts if kind == "text" else thoughts).append(_text(block, kind))
        else:
            raise ValueError(f"content: {kind!r:.40} is no block of the policy; send its answers unchanged")
    return {
        "role": "assistant", "content": "".join(texts), "reasoning_content": "".join(thoughts), "tool_calls": calls
    }  # fmt: skip


def _user_rows(blocks: Sequence[Mapping[str, Any]], calls: Sequence[Any]) -> list[dict[str, Any]]:
    results = [block for block in blocks if block.get("type") == "tool_result"]
    # The format has no ids: the order tells which call a result is of.
    results.sort(
        key=lambda block: calls.index(block["tool_use_id"]) if block.get("tool_use_id") in calls else len(calls)
    )
    rows = [{"role": "tool", "content": "".join(_texts(block.get("content") or ""))} for block in results]
    said = [text for block in blocks if block.get("type") != "tool_result" for text in _texts([block])]
    if rows and said:
        rows[-1]["content"] += "\n" + "".join(said)
    return rows or [{"role": "user", "content": "".join(said)}]


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, "text") for block in _tables(content, "content")]


def _text(block: Mapping[str, Any], key: str) -> str:
    if block.get("type") != key or not isinstance(block.get(key), str):
        raise ValueError(f"content: {block.get('type')!r:.40} is not a block of text")
    return block[key]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), Mapping):
        raise ValueError("tools: one has no name or no input_schema; tools that the server runs are not possible")
    described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": described}


def message_response(table: Mapping[str, Any], answered: AnsweredTurn, name: str) -> tuple[str, str]:
    """The answer of a turn as a message, or as a stream of events, and its content type."""
    answer, completion = answered.answer, answered.completion
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for number, call in enumerate(answer.tool_calls):
        blocks.append(
            {"type": "tool_use", "id": f"toolu_{name}_{number}", "name": call.name, "input": dict(call.arguments)}
        )
    reason = "tool_use" if answer.tool_calls else "end_turn"
    end = {"stop_reason": reason if completion.finish == "stop" else "max_tokens", "stop_sequence": None}
    usage = {"input_tokens": answered.turn.length, "output_tokens": len(completion.tokens)}
    model = str(table.get("model") or "policy")
    message: dict[str, Any] = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model}
    if not table.get("stream"):
        return json.dumps(message | {"content": blocks, "usage": usage} | end), "application/json"
    begin = message | {"content": [], "usage": usage | {"output_tokens": 0}, "stop_reason": None, "stop_sequence": None}
    events = [
        {"type": "message_start", "message": begin}, *_events(blocks),
        {"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"},
    ]  # fmt: skip
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events), "text/event-stream"


def _events(blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, block in enumerate(blocks):
        kind = block["type"]
        key, empty = ("input", {}) if kind == "tool_use" else (kind, "")
        yield {"type": "content_block_start", "index": index, "content_block": {**block, key: empty}}
        delta = {"type": f"{kind}_delta", kind: block.get(kind)}
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
