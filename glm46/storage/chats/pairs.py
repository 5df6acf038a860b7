"""Pairs of a better and a worse answer to one prompt, in the fields of TRL's preference data: ``chosen``, ``rejected``
and, unless both begin with it, ``prompt``.

A pair is one document of a source: the chosen conversation, then the rejected one. So packing, splits and epochs keep
it in one piece. Each half begins with `BEGIN`, which no other place of a document holds, because text is never encoded
as a marker.
"""

from collections.abc import Mapping
from typing import Any

from glm46.storage.chats.chat_rows import BadConversation, role_of, untrained
from glm46.storage.chats.conversation import Conversation, parse_conversation

BEGIN = "[gMASK]"
"""The special token that each half of a pair begins with."""

EQUAL_HALVES = "chosen equals rejected"
"""The reason of a pair that teaches nothing. Data sets have them: two answers of one score."""

_KEYS = ("chosen", "rejected")


def parse_pair(record: object) -> tuple[Conversation, Conversation]:
    """Read one line of a file of pairs. Raises BadConversation if the line is not a pair.

    Args:
        record: the line as Python values. ``prompt`` is a text of the user or a list of messages; ``chosen`` and
            ``rejected`` are texts, or lists of messages that follow the prompt, or begin with it in its place.

    Returns:
        The prompt with the chosen completion, and with the rejected one. Nothing of the prompt is a target.
    """
    if not isinstance(record, Mapping):
        raise BadConversation("line is not an object", type(record).__name__)
    given: list[Any] = [record.get(key) for key in _KEYS]
    for key, half in zip(_KEYS, given, strict=True):
        if not isinstance(half, str | list) or not half:
            raise BadConversation(f"no {key}")
    if given[0] == given[1]:
        raise BadConversation(EQUAL_HALVES)
    halves = [[{"role": "assistant", "content": half}] if isinstance(half, str) else half for half in given]
    prompt = record.get("prompt")
    if all(isinstance(half, list) and role_of(half[0]) not in ("assistant", "call") for half in given):
        prompt, halves = _shared_prompt(*halves)  # a prompt beside it repeats it, as a text
    elif isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise BadConversation("no prompt")
    for key, half in zip(_KEYS, halves, strict=True):
        roles = [role_of(row) for row in half]
        if {"user", "system"} & {*roles} or roles[-1] == "tool":
            raise BadConversation("chosen or rejected is not one turn of the assistant", key)
    tools, prompt = record.get("tools"), untrained(prompt)
    chosen, rejected = (parse_conversation({"messages": prompt + half, "tools": tools}, "messages") for half in halves)
    return chosen, rejected


def _shared_prompt(chosen: list, rejected: list) -> tuple[list, list[list]]:
    """The messages with which both begin, and the rest of each."""
    shared = next((i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    if shared is None:
        raise BadConversation("chosen or rejected is not one turn of the assistant", "one begins with all of the other")
    if not shared or {role_of(chosen[shared]), role_of(rejected[shared])} & {"user", "system"}:
        raise BadConversation("chosen and rejected have different prompts", f"message {shared}")
    return chosen[:shared], [chosen[shared:], rejected[shared:]]
