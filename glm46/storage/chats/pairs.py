"""Preferences: pairs of a better and a worse answer to one prompt, and answers that are labelled desirable or not, in
the columns that data sets have for them.

A pair is one document of a source: the chosen conversation, then the rejected one. A labelled answer is a pair of which
the other half is its first token alone. So packing, splits and epochs keep it in one piece. Each half begins with
`BEGIN`, which no other place of a document holds, because text is never encoded as a marker.
"""

import re
from collections.abc import Mapping

from glm46.storage.chats.chat_rows import BadConversation, asked_rows, columns_of, message_list, role_of, untrained
from glm46.storage.chats.conversation import Conversation, parse_conversation

BEGIN = "[gMASK]"
"""The special token that each half of a pair begins with."""

EQUAL_HALVES = "chosen equals rejected"
"""The reason of a pair that teaches nothing. Data sets have them: two answers of one score."""

SIDES = ("chosen", "rejected")
"""The halves of a pair, and its columns."""
_LABELS = ("label", "kto_tag")
"""Columns of TRL and ms-swift, and of LLaMA-Factory."""
_SPEAKER = re.compile(r"(?:\n\n|^)(Human|Assistant): ?")
"""Begin of a turn in transcripts, such as those of Anthropic's HH-RLHF."""


def parse_pair(record: object) -> tuple[Conversation, Conversation]:
    """Read one line of a file of pairs. Raises BadConversation if the line is not a pair.

    Args:
        record: the line as Python values. ``chosen`` and ``rejected`` are texts, messages or lists of messages, which
            follow the prompt, or begin with it in its place. Texts are answers, or transcripts of "Human:" and
            "Assistant:". The prompt is a text of the user or a list of messages in ``prompt``, or else what
            `asked_rows` finds.

    Returns:
        The prompt with the chosen completion, and with the rejected one. Nothing of the prompt is a target.
    """
    if not isinstance(record, Mapping):
        raise BadConversation("line is not an object", type(record).__name__)
    given = [record.get(key) for key in SIDES]
    for key, half in zip(SIDES, given, strict=True):
        if not isinstance(half, str | list | Mapping) or not half:
            raise BadConversation(f"no {key}", columns_of(record))
    if given[0] == given[1]:
        raise BadConversation(EQUAL_HALVES)
    halves = [_turns(half, may_be_transcript=record.get("prompt") is None) for half in given]
    if all(role_of(half[0]) not in ("assistant", "call") for half in halves):
        prompt, halves = _shared_prompt(*halves)  # a prompt beside it repeats it, as a text
    else:
        prompt = asked_rows(record)
    if not prompt:
        raise BadConversation("no prompt", columns_of(record))
    for key, half in zip(SIDES, halves, strict=True):
        roles = [role_of(row) for row in half]
        if {"user", "system"} & {*roles} or roles[-1] == "tool":
            raise BadConversation("chosen or rejected is not one turn of the assistant", key)
    tools, prompt = record.get("tools"), untrained(prompt)
    chosen, rejected = (parse_conversation({"messages": prompt + half, "tools": tools}, "messages") for half in halves)
    return chosen, rejected


def parse_labelled(record: object) -> tuple[Conversation, bool]:
    """Read one line of a file of labelled answers: a conversation of any chat format, whose last turn is the answer,
    and True if it is desirable. Raises BadConversation if the line is something else."""
    conversation = parse_conversation(record, "chat")
    assert isinstance(record, Mapping), "others are refused"
    labels = [record[key] for key in _LABELS if record.get(key) is not None]
    if not labels:
        raise BadConversation("no label", columns_of(record))
    if labels[0] not in (0, 1):
        raise BadConversation("label is neither true nor false", repr(labels[0]))
    return conversation, bool(labels[0])


def _turns(half: object, *, may_be_transcript: bool) -> list:
    """The messages of a half."""
    if not isinstance(half, str):
        return message_list(half if isinstance(half, list) else [half])
    _, *turns = _SPEAKER.split(half) if may_be_transcript and half.lstrip().startswith("Human:") else [half]
    roles = {"Human": "user", "Assistant": "assistant"}
    said = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": roles[who], "content": text} for who, text in said] or [{"role": "assistant", "content": half}]


def _shared_prompt(chosen: list, rejected: list) -> tuple[list, list[list]]:
    """The messages with which both begin, and the rest of each."""
    shared = next((i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    if shared is None:
        raise BadConversation("chosen or rejected is not one turn of the assistant", "one begins with all of the other")
    if not shared or {role_of(chosen[shared]), role_of(rejected[shared])} & {"user", "system"}:
        raise BadConversation("chosen and rejected have different prompts", f"message {shared}")
    return chosen[:shared], [chosen[shared:], rejected[shared:]]
