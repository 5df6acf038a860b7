"""Counts of what happens to conversations that become training documents."""

import re
from collections import Counter
from itertools import pairwise

from glm46.storage.chats.chat_format import MARKERS, NO_THINK
from glm46.storage.chats.conversation import Conversation, Message

_MARKER = re.compile("|".join(map(re.escape, MARKERS - {NO_THINK})))


def conversation_counts(conversation: Conversation, *, has_target: bool) -> Counter[str]:
    """Return the counts of one conversation by their description, without zeros.

    They become `counts` of `glm46.storage.chats.chat.Rendered`.
    """
    messages = conversation.messages
    turns = [message for message in messages if message.role == "assistant"]
    without_stop = [
        turn
        for turn, after in pairwise(messages)
        if turn.role == "assistant" and turn.is_trained and not _ends_turn(turn, after)
    ]
    texts = [text for message in messages for text in (message.content, message.reasoning)]
    counts = Counter(
        {
            "trailing messages left out": conversation.num_dropped,
            "turns of weight 0": sum(not turn.is_trained for turn in turns),
            "turns without a stop token": len(without_stop),
            "no target": not has_target,
            "conversations with markers of the format as text": any(_MARKER.search(text) for text in texts),
        }
    )
    return +counts  # drops zeros


def _ends_turn(turn: Message, after: Message) -> bool:
    """Return True if the next message begins with the marker that ends this turn: the user's, or after calls the
    tool's."""
    return after.role == ("tool" if turn.tool_calls else "user")
