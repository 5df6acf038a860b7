"""Joins the completions of a session's turns to samples, and bounds the length of its prompts."""

from collections.abc import Sequence

import numpy as np

from glm46.storage.chats.conversation import Message
from glm46.tasks.rl.rollout.records import Completion


def without_marker(completion: Completion) -> list[int]:
    """Return the tokens of a turn without its end marker."""
    return completion.tokens[: len(completion.tokens) - (completion.finish == "stop")]


def as_reply(completion: Completion) -> Completion:
    """Mark all tokens of a completion as untrained, because another sample trains them."""
    length = len(completion.tokens)
    return completion._replace(logprobs=[0.0] * length, replies=((0, length),), drafted=0, accepted=0)


def joined(whole: Completion, new: list[int], turn: Completion) -> Completion:
    """Append the next turn of a path to a completion.

    Args:
        new: tokens between the two; the first is the marker that `whole` ends with, or the marker of another role.
    """
    contradicted = whole.contradicted
    is_ended = whole.finish == "stop"
    last = len(whole.tokens) - 1
    if is_ended and new[0] != whole.tokens[last]:
        contradicted += ((last, new[0]),)
    result = whole.extended(new[is_ended:], turn._replace(routes=None))
    start = len(result.tokens) - len(turn.tokens)
    replies = (*result.replies, *((start + first, start + end) for first, end in turn.replies))
    routes = turn.routes if whole.routes is None else np.concatenate([whole.routes, turn.routes])
    return result._replace(contradicted=contradicted, replies=replies, routes=routes)


def min_tokens(messages: Sequence[Message], descriptions: str, *, longest_token: int, keeps_thoughts: bool) -> int:
    """Return a lower bound of the tokens of a prompt. Text that the format may remove is not counted.

    Args:
        descriptions: the tools that the prompt lists, as it does.
        longest_token: characters of the longest token, markers excluded.
    """
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    characters = len(descriptions)
    markers = 0
    for index, message in enumerate(messages):
        markers += 1 + len(message.tool_calls)
        characters += len(message.content.strip() if message.role == "assistant" else message.content)
        if keeps_thoughts or index > last_user:
            characters += len(message.reasoning.strip())
        for call in message.tool_calls:
            markers += 4 * len(call.arguments)
            characters += len(call.name)
            for key, value in call.arguments.items():
                characters += len(str(key)) + len(str(value))
    return markers + characters // longest_token
