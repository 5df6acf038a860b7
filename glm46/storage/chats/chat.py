"""Conversations in the chat format of a tokenizer: training documents with their targets, and prompts for generation.

Special tokens are written by id, and text is encoded as text: a marker inside a message is ordinary characters, except
``/nothink`` at the end of a user's message, which is the switch of GLM-4.5 and 4.6. No token ends a turn: it ends where
the model samples the marker of the next role.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from glm46.storage.chats.chat_counts import conversation_counts
from glm46.storage.chats.chat_format import ASSISTANT, OBSERVATION, THINK, USER, ChatFormat, Marker
from glm46.storage.chats.chat_pieces import ChatPiece, MessagePieces, opening_pieces
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.conversation import Conversation, Message
from glm46.storage.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatOptions:
    """Options by which conversations become documents."""

    history: Literal["expand", "last", "all", "keep"] = "expand"
    """The formats remove reasoning from turns before the last user message. expand: a document for each user turn with
    reasoning, so that every turn is a target as it was sampled. last: only the last user turn is a target. all: one
    document in which every turn is a target, after an empty thought where its reasoning was removed. keep: one document
    in which every turn keeps its reasoning and is a target; only for formats that open thoughts."""
    no_reasoning: Literal["nothink", "mask", "train"] = "nothink"
    """What to do with turns without reasoning. nothink: treat them as answers to a prompt that forbids thinking. mask:
    write an empty thought that is not a target; where a format opens thoughts, the same as nothink. train: write an
    empty thought that is a target; the model may stop thinking."""


class ChatDocument(NamedTuple):
    """One training document. It begins with ``[gMASK]<sop>`` and ends with the role marker after its last turn."""

    ids: np.ndarray
    """uint32 [n]: token ids."""
    is_target: np.ndarray
    """bool [n]: whether the model samples the token. The loss at position i - 1 counts iff ``is_target[i]``."""


class Rendered(NamedTuple):
    """The documents of a conversation, and what happened to it."""

    documents: list[ChatDocument]
    """Each has at least one target; empty if no turn of the conversation is a target."""
    counts: Counter[str]
    """Numbers by description: skipped trailing messages, turns of weight 0, turns without a stop token, no target,
    markers of the format in text."""


def render(conversation: Conversation, tokenizer: Tokenizer, options: ChatOptions) -> Rendered:
    """Make the training documents of a conversation.

    Raises:
        UserError: the tokenizer has no chat format.
        BadConversation: the conversation has a deferred tool or a reasoning effort that the format does not have.
    """
    messages = conversation.messages
    format = format_of(tokenizer)
    spans = list(pairwise([0, *_ends_of_user_turns(messages)]))
    has_reasoning = [any(message.reasoning.strip() for message in messages[start:end]) for start, end in spans]
    allows_thought = _allows_thought(options, format)
    thinks = [allows_thought or (has_thought and format.shows_thinking) for has_thought in has_reasoning]
    # Turns that look different in a later document: also a sampled empty thought, where its tags do not stay.
    loses_tags = allows_thought and not format.tags_empty_thoughts
    is_alone = [has_thought or loses_tags for has_thought in has_reasoning]
    last_turn = len(spans) - 1
    # For each document the last user turn in it, and the turns that are targets.
    is_one = options.history in ("all", "keep")
    groups: list[tuple[int, list[int]]] = [(last_turn, list(range(last_turn + 1)) if is_one else [last_turn])]
    if is_one:
        thinks[last_turn] = any(thinks)
    elif options.history == "expand":
        # Turns without reasoning look the same in every later document of their mode, so they share one.
        groups = []
        open_ = {True: list[int](), False: list[int]()}
        for k in range(last_turn + 1):
            open_[thinks[k]].append(k)
            if is_alone[k] or thinks[k] not in thinks[k + 1 :]:
                groups.append((k, open_[thinks[k]]))
                open_[thinks[k]] = []
    documents = []
    for k, turns in groups:
        trained = [index for turn in turns for index in range(*spans[turn])]
        document = _document(conversation, trained, tokenizer, thinks[k], options)
        if document.is_target.any():
            documents.append(document)
    return Rendered(documents, conversation_counts(conversation, has_target=bool(documents)))


def render_pair(
    halves: Sequence[Conversation], tokenizer: Tokenizer, no_reasoning: Literal["nothink", "mask", "train"]
) -> list[ChatDocument]:
    """Make a document of each half of a pair, with the targets of its last user turn, as `render` does with ``history =
    "last"``. The prompt is the same in both: with thinking if a half has reasoning. Raises the errors of `render`."""
    options = ChatOptions("last", no_reasoning)
    turns = [(half, range([0, *_ends_of_user_turns(half.messages)][-2], len(half.messages))) for half in halves]
    reasons = any(half.messages[i].reasoning.strip() for half, turn in turns for i in turn)
    thinks = reasons or _allows_thought(options, format_of(tokenizer))
    return [_document(half, turn, tokenizer, thinks, options) for half, turn in turns]


def _allows_thought(options: ChatOptions, format: ChatFormat) -> bool:
    """Return True if the prompt of a turn without reasoning allows thinking. The model must end an opened thought."""
    return options.no_reasoning == "train" or (options.no_reasoning == "mask" and not format.opens_thought)


def _document(
    conversation: Conversation, trained: Sequence[int], tokenizer: Tokenizer, thinks: bool, options: ChatOptions
) -> ChatDocument:
    """Make the document that ends with the last of the ``trained`` messages, which are in order."""
    messages = conversation.messages[: trained[-1] + 1]
    targets = {index for index in trained if messages[index].is_trained}
    format = format_of(tokenizer)
    writer = MessagePieces(
        format,
        thinks,
        conversation.tools,
        keeps_thoughts=options.history == "keep",
        trains_empty_thoughts=options.no_reasoning == "train",
    )
    pieces = opening_pieces(format, conversation.tools, thinking=thinks, effort=conversation.effort)
    pieces += writer.write(messages, targets)
    stop = OBSERVATION if messages[-1].tool_calls else USER
    return _encode([*pieces, ChatPiece(stop, trained[-1] in targets)], tokenizer)


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool,
    keeps_thoughts: bool = False,
    effort: str = "",
) -> list[int]:
    """Return the token ids of a prompt up to where the assistant's turn is sampled.

    Args:
        messages: the conversation so far.
        thinking: whether the model may think before it answers.
        keeps_thoughts: past thoughts stay (``clear_thinking`` = false); only for formats that open thoughts.
        effort: see `opening_pieces`.

    Raises:
        UserError: the tokenizer has no chat format.
        BadConversation: see `render`.
    """
    format = format_of(tokenizer)
    writer = MessagePieces(format, thinking, tools, keeps_thoughts)
    pieces = opening_pieces(format, tools, thinking=thinking, effort=effort) + writer.write(messages)
    return _ids_before_turn(pieces, tokenizer, thinking)


def chat_reply(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool,
    keeps_thoughts: bool = False,
) -> list[int]:
    """Return the token ids between a sampled turn and the next one: the marker of the role that follows, which may
    already end the sampled turn, the messages after the turn, and the beginning of the assistant's turn.

    Args:
        tools: tools of the conversation, to which results may refer.
        keeps_thoughts: see `chat_prompt`; for answers of other models among the messages.

    Raises:
        UserError: the tokenizer has no chat format.
        BadConversation: see `render`.
    """
    writer = MessagePieces(format_of(tokenizer), thinking, tools, keeps_thoughts)
    return _ids_before_turn(writer.write(messages), tokenizer, thinking)


def _ids_before_turn(pieces: Sequence[ChatPiece], tokenizer: Tokenizer, thinking: bool) -> list[int]:
    opening = [opened_thought(tokenizer, thinking)] if thinking else format_of(tokenizer).empty_thought
    ids: list[int] = _encode([*pieces, *map(ChatPiece, (ASSISTANT, *opening))], tokenizer).ids.tolist()
    return ids


def opened_thought(tokenizer: Tokenizer, thinking: bool) -> str:
    """Return the beginning of a turn that its prompt already holds. Raises UserError if the tokenizer has no chat
    format."""
    return THINK if thinking and format_of(tokenizer).opens_thought else ""


def _ends_of_user_turns(messages: Sequence[Message]) -> list[int]:
    """Return, for each user turn, the index after its last assistant message."""
    ends = set()
    end = 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            end = index + 1
        elif message.role == "user":
            ends.add(end)
    return sorted({*ends, end} - {0})


def _encode(pieces: Sequence[ChatPiece], tokenizer: Tokenizer) -> ChatDocument:
    """Encode markers by id, and adjacent texts as one text, as if the whole document were one string."""
    ids = []
    flags = []
    for (is_marker, target), group in groupby(pieces, lambda piece: (isinstance(piece.text, Marker), piece.is_target)):
        texts = [piece.text for piece in group]
        if is_marker:
            part = np.array([tokenizer.special[name] for name in texts], dtype=np.uint32)
        else:
            part = tokenizer.encode("".join(texts))
        ids.append(part)
        flags.append(np.full(len(part), target))
    return ChatDocument(np.concatenate(ids).astype(np.uint32, copy=False), np.concatenate(flags))
