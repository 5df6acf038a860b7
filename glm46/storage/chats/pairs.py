"""Preferences: pairs of a better and a worse answer to one prompt, and answers labelled desirable or not, read from the
usual columns of data sets.

A pair is one document of a source: the chosen conversation, then the rejected one. A labelled answer is stored as a
pair whose other half is only its first token. So packing, splits and epochs keep it in one piece. Each half begins with
`BEGIN`, which occurs nowhere else in a document, because text is never encoded as a marker.
"""

import re
from collections.abc import Mapping
from typing import Any

from glm46.storage.chats.chat_rows import (
    BadConversation,
    asked_rows,
    columns_of,
    message_list,
    role_of,
    text_or_messages,
    untrained,
)
from glm46.storage.chats.conversation import EFFORT_KEY, Conversation, parse_conversation

BEGIN = "[gMASK]"
"""The special token that each half of a pair begins with."""

EQUAL_HALVES = "chosen equals rejected"
"""Reason for a pair that teaches nothing. Data sets contain them, for example two answers with the same score."""

SIDES = ("chosen", "rejected")
"""The halves of a pair, which are also its columns."""
_LABELS = ("label", "kto_tag")
"""Columns of TRL and ms-swift, and of LLaMA-Factory."""
_SPEAKER = re.compile(r"(?:\n\n|^)(Human|Assistant): ?")
"""Beginning of a turn in transcripts, such as those of Anthropic's HH-RLHF."""


def parse_pair(record: object) -> tuple[Conversation, Conversation]:
    """Read one line of a file of pairs. Raises BadConversation if the line is not a pair.

    Args:
        record: the line as Python values. ``chosen`` and ``rejected`` are texts, messages or lists of messages; they
            follow the prompt, or begin with it. Texts are answers, or transcripts of "Human:" and "Assistant:". The
            prompt is a text of the user or a list of messages in ``prompt``, or else the result of `asked_rows`.

    Returns:
        The prompt with the chosen completion, and with the rejected one. No part of the prompt is a target.
    """
    if not isinstance(record, Mapping):
        raise BadConversation("line is not an object", type(record).__name__)
    values = [text_or_messages(record.get(key)) for key in SIDES]
    for key, half in zip(SIDES, values, strict=True):
        if not isinstance(half, str | list | Mapping) or not half:
            raise BadConversation(f"{'empty' if half in ('', []) else 'no'} {key}", columns_of(record))
    if values[0] == values[1]:
        raise BadConversation(EQUAL_HALVES)
    halves = [_turns(half, may_be_transcript=record.get("prompt") is None) for half in values]
    if all(role_of(half[0]) not in ("assistant", "call") for half in halves):
        prompt, halves = _shared_prompt(*halves)  # a separate prompt column repeats it, as a text
    else:
        prompt = asked_rows(record)
    if not prompt:
        raise BadConversation("no prompt", columns_of(record))
    for key, half in zip(SIDES, halves, strict=True):
        roles = [role_of(row) for row in half]
        if {"user", "system"} & {*roles} or roles[-1] == "tool":
            raise BadConversation("chosen or rejected is not one turn of the assistant", key)
    shared = {"tools": record.get("tools"), EFFORT_KEY: record.get(EFFORT_KEY)}
    prompt = untrained(prompt)
    chosen, rejected = (parse_conversation({"messages": prompt + half, **shared}, "messages") for half in halves)
    return chosen, rejected


def parse_labelled(record: object) -> tuple[Conversation, bool]:
    """Read one line of a file of labelled answers: a conversation of any chat format, whose last turn is the answer,
    and whether the answer is desirable. Raises BadConversation if the line is something else."""
    conversation = parse_conversation(record, "chat")
    assert isinstance(record, Mapping), "others are refused"
    labels = [record[key] for key in _LABELS if record.get(key) is not None]
    if not labels:
        raise BadConversation("no label", columns_of(record))
    if labels[0] not in (0, 1):
        raise BadConversation("label is neither true nor false", repr(labels[0]))
    return conversation, bool(labels[0])


def _turns(half: object, *, may_be_transcript: bool) -> list[Any]:
    """Return the messages of a half."""
    if not isinstance(half, str):
        return message_list(half if isinstance(half, list) else [half])
    _, *turns = _SPEAKER.split(half) if may_be_transcript and half.lstrip().startswith("Human:") else [half]
    roles = {"Human": "user", "Assistant": "assistant"}
    speaker_texts = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": roles[speaker], "content": text} for speaker, text in speaker_texts] or [
        {"role": "assistant", "content": half}
    ]


def _shared_prompt(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Return the messages with which both begin, and the rest of each."""
    shared = next((i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    if shared is None:
        raise BadConversation("chosen or rejected is not one turn of the assistant", "one begins with all of the other")
    if not shared or {role_of(chosen[shared]), role_of(rejected[shared])} & {"user", "system"}:
        raise BadConversation("chosen and rejected have different prompts", f"message {shared}")
    return chosen[:shared], [chosen[shared:], rejected[shared:]]
