"""OpenAI's chat API: requests that are read and refused, and answers."""

import json
import time
from collections.abc import Mapping
from typing import Any

from glm46.storage.chats.conversation import Message, parse_prompt, parse_tools
from glm46.tasks.rl.rollout.messages_api import chat_table
from glm46.tasks.rl.rollout.session import AnsweredTurn

OVERRIDDEN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "thinking",
)  # fmt: skip
"""Keys of a request that have no effect."""
_REFUSED: Mapping[str, tuple] = {
    "n": (1,), "stop": ([], ""), "response_format": ({"type": "text"},), "logprobs": (False,), "functions": ([],),
    "tool_choice": ("auto",),
}  # fmt: skip
"""Keys of a request, and the values beside null that change nothing."""


class RefusedRequest(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


def parsed(
    body: bytes, *, is_message: bool
) -> tuple[dict[str, Any], tuple[Message, ...], tuple[Mapping, ...], int | None]:
    """The table of a request, its messages, tools, and most tokens.

    Raises:
        RefusedRequest: the body is not a request, or asks for something that the policy cannot do.
    """
    try:
        table = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, f"the body is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise RefusedRequest(400, "the body is not an object")
    if is_message:
        try:
            table = chat_table(table)
        except ValueError as error:
            raise RefusedRequest(400, str(error)) from error
    if not table.get("tools") and table.get("tool_choice") == "none":
        del table["tool_choice"]  # it changes nothing
    for name, allowed in _REFUSED.items():
        if table.get(name) is not None and table[name] not in allowed:
            raise RefusedRequest(
                400, f"{name}: not possible, because samples are of the policy itself; remove it", name
            )
    most = table.get("max_completion_tokens") or table.get("max_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise RefusedRequest(400, f"max_tokens: {most!r:.40} is not a number of tokens")
    try:
        tools = parse_tools(table.get("tools"))
        return table, parse_prompt(table.get("messages") or [], tools, is_sampled=True), tools, most
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, f"messages, tools: {error}") from error


def completion_response(table: Mapping[str, Any], answered: AnsweredTurn, name: str) -> tuple[str, str]:
    """The answer of a turn, whole or as a stream of events, and its content type."""
    answer, completion = answered.answer, answered.completion
    message: dict[str, Any] = {
        "role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning
    }  # fmt: skip
    calls = [
        {
            "index": number, "id": f"call_{name.rpartition('-')[2]}_{number}", "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for number, call in enumerate(answer.tool_calls)
    ]  # fmt: skip
    message |= {"tool_calls": calls} if calls else {}
    finish = "tool_calls" if calls and completion.finish == "stop" else completion.finish
    prompt, own = answered.turn.length, len(completion.tokens)
    usage = {"prompt_tokens": prompt, "completion_tokens": own, "total_tokens": prompt + own}
    about = {"id": name, "created": int(time.time()), "model": str(table.get("model") or "policy")}
    if not table.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return json.dumps(
            about | {"object": "chat.completion", "choices": [choice], "usage": usage}
        ), "application/json"
    deltas = [{"index": 0, "delta": message, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": finish}]
    events = [about | {"object": "chat.completion.chunk", "choices": [delta]} for delta in deltas]
    options = table.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        events.append(about | {"object": "chat.completion.chunk", "choices": [], "usage": usage})
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return f"{lines}data: [DONE]\n\n", "text/event-stream"
