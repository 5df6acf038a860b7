"""OpenAI's chat API: parses or refuses requests, and formats answers."""

import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from glm46.storage.chats.conversation import Message, parse_prompt, parse_tools
from glm46.tasks.rl.rollout.session import Turn

_READ = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        # The following keys do not affect the answer.
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Keys of a request that are read, or that do not affect the answer."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "ignore_eos": (False,),
    "add_generation_prompt": (True,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
}
"""Values of keys without effect that request nothing, so that the log does not mention them."""
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "tool_choice": ("auto", "none"),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "continue_final_message": (False,),
    "previous_response_id": (),
    "echo": (False,),
}
"""Keys that would change how samples are generated, and the values other than null that change nothing."""


class RefusedRequest(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code


class ChatRequest(NamedTuple):
    """A request for a turn of the policy."""

    table: Mapping[str, Any]
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    silent: tuple[str, ...]
    """Keys of the table that have no effect."""


def parsed(body: bytes) -> ChatRequest:
    """Read a request.

    Raises:
        RefusedRequest: the body is not a request, or requests something that the policy cannot do.
    """
    try:
        table = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, f"the body is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise RefusedRequest(400, "the body is not an object")
    present = {name: value for name, value in table.items() if value is not None}
    for name, allowed in _REFUSED.items():
        if name in present and present[name] not in allowed:
            raise RefusedRequest(
                400, f"{name}: not possible, because samples are of the policy itself; remove it", name
            )
    silent = [name for name in present if name not in _READ and name not in _REFUSED]
    silent = [name for name in silent if present[name] not in _NEUTRAL.get(name, ())]
    for name in ("messages", "tools"):
        if not isinstance(present.get(name, []), list):
            raise RefusedRequest(400, f"{name}: not a list", name)
    max_tokens = present.get("max_completion_tokens", present.get("max_tokens"))
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise RefusedRequest(400, f"max_tokens: {max_tokens!r:.40} is not a number of tokens")
    try:
        tools = parse_tools(present.get("tools"))
        messages = parse_prompt(present.get("messages", []), tools, is_sampled=True)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, f"messages, tools: {error}") from error
    return ChatRequest(table, messages, tools, max_tokens, tuple(silent))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no value of JSON")


def completion_response(table: Mapping[str, Any], turn: Turn, name: str) -> tuple[str, str]:
    """Format the answer of a turn, whole or as a stream of events; return it with its content type."""
    answer = turn.answer
    completion = turn.completion
    # The policy may call a tool although the request forbids it; the program then gets only the text.
    tool_calls = () if table.get("tool_choice") == "none" else answer.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
    calls = [
        {
            "index": number,
            "id": f"call_{name.rpartition('-')[2]}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for number, call in enumerate(tool_calls)
    ]
    message |= {"tool_calls": calls} if calls else {}
    finish = "tool_calls" if calls and completion.finish == "stop" else completion.finish
    prompt = turn.length
    generated = len(completion.tokens)
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
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
