"""Conversations in the chat format of a tokenizer: training documents with their targets, and prompts for generation.

Special tokens are written by id, and text is encoded as text: a marker inside a message is ordinary characters, except
``/nothink`` at the end of a user's message, which is the switch of GLM-4.5 and 4.6. No token ends a turn: it ends where
the model samples the marker of the next role.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np

from glm46.storage.chats.chat_counts import conversation_counts
from glm46.storage.chats.chat_format import (
    ASSISTANT,
    BEGIN,
    CALL,
    CALL_MARKERS,
    END_CALL,
    END_KEY,
    END_RESPONSE,
    END_THINK,
    END_VALUE,
    KEY,
    MARKERS,
    NO_THINK,
    OBSERVATION,
    RESPONSE,
    SYSTEM,
    THINK,
    TOOLS_HEAD,
    USER,
    VALUE,
    ChatFormat,
    Marker,
)
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.conversation import Conversation, Message
from glm46.storage.data.tokenizer import Tokenizer

_TAGS = re.compile(f"({'|'.join(map(re.escape, CALL_MARKERS))})")


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
    counts: Counter
    """Numbers by description: skipped trailing messages, turns of weight 0, turns without a stop token, no target,
    markers of the format in text."""


def render(conversation: Conversation, tokenizer: Tokenizer, options: ChatOptions) -> Rendered:
    """Make the training documents of a conversation. Raises UserError if the tokenizer has no chat format."""
    messages = conversation.messages
    format = format_of(tokenizer)
    spans = list(pairwise([0, *_ends_of_user_turns(messages)]))
    has_reasoning = [any(message.reasoning.strip() for message in messages[start:end]) for start, end in spans]
    allows_thought = _allows_thought(options, format)
    thinks = [allows_thought or (has_thought and not format.opens_thought) for has_thought in has_reasoning]
    # Turns that look different in a later document: also a sampled empty thought, where prompts open the thought.
    is_alone = [has_thought or (format.opens_thought and allows_thought) for has_thought in has_reasoning]
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
    "last"``. The prompt is the same in both: with thinking if a half has reasoning. Raises UserError if the tokenizer
    has no chat format."""
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
    pieces = _pieces(messages, conversation.tools, thinks, format_of(tokenizer), targets, options)
    return _encode([*pieces, (OBSERVATION if messages[-1].tool_calls else USER, trained[-1] in targets)], tokenizer)


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping] = (),
    thinking: bool,
    keeps_thoughts: bool = False,
) -> list[int]:
    """Return the token ids of a prompt up to where the assistant's turn is sampled. Raises UserError if the tokenizer
    has no chat format.

    Args:
        messages: the conversation so far.
        thinking: whether the model may think before it answers.
        keeps_thoughts: past thoughts stay (``clear_thinking`` = false); only for formats that open thoughts.
    """
    options = ChatOptions("keep" if keeps_thoughts else "expand")
    pieces = [piece for piece, _ in _pieces(messages, tools, thinking, format_of(tokenizer), (), options)]
    return _ids_before_turn(pieces, tokenizer, thinking)


def chat_reply(
    tokenizer: Tokenizer, messages: Sequence[Message], *, thinking: bool, keeps_thoughts: bool = False
) -> list[int]:
    """Return the token ids between a sampled turn and the next one: the marker of the role that follows, which may
    already end the sampled turn, the messages after the turn, and the beginning of the assistant's turn. Raises
    UserError if the tokenizer has no chat format.

    Args:
        keeps_thoughts: see `chat_prompt`; for answers of other models among the messages.
    """
    options = ChatOptions("keep" if keeps_thoughts else "expand")
    pieces = _pieces(messages, (), thinking, format_of(tokenizer), (), options)[len(BEGIN) :]
    return _ids_before_turn([piece for piece, _ in pieces], tokenizer, thinking)


def _ids_before_turn(pieces: Sequence[str], tokenizer: Tokenizer, thinking: bool) -> list[int]:
    format = format_of(tokenizer)
    empty = [END_THINK] if format.opens_thought else [format.line, THINK, END_THINK]
    opening: Sequence[str] = [opened_thought(tokenizer, thinking)] if thinking else empty
    return _encode([(piece, False) for piece in (*pieces, ASSISTANT, *opening)], tokenizer).ids.tolist()


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


def _pieces(
    messages: Sequence[Message],
    tools: Sequence[Mapping],
    thinking: bool,
    format: ChatFormat,
    targets: Collection[int],
    options: ChatOptions,
) -> list[tuple[str, bool]]:
    """Return markers and texts of the messages, in order, each with whether it is a target.

    Args:
        targets: indices of the assistant messages that are sampled, together with the marker after each.
    """
    pieces = [(piece, False) for piece in (*BEGIN, *_tools(tools, format))]
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    sampled = False
    for index, message in enumerate(messages):
        previous_role = messages[index - 1].role if index else None
        sampled = sampled and previous_role == "assistant"
        if message.role == "user":
            # After calls the model samples the marker of their results: an interrupted turn has no stop token.
            pieces += [
                (USER, sampled and not messages[index - 1].tool_calls),
                *((p, False) for p in _asked(message.content, thinking, format)),
            ]
        elif message.role == "system":
            # The model cannot learn to stop here: a user or a tool follows what it samples.
            pieces += [(SYSTEM, False), (f"{format.line}{message.content}", False)]
        elif message.role == "tool":
            if previous_role != "tool":
                pieces.append((OBSERVATION, sampled and bool(messages[index - 1].tool_calls)))
            result = f"{format.line}{message.content}{format.line}"
            pieces += [(p, False) for p in (format.line, RESPONSE, result, END_RESPONSE)]
        else:
            sampled = index in targets
            keeps_thought = options.history == "keep" or index > last_user
            thought = message.reasoning if keeps_thought else ""
            # If the prompt opened the thought, the sampled text begins inside it; the thought may be empty.
            is_opened = format.opens_thought and thinking and sampled and keeps_thought
            # A template writes <think> for a thought of white space; a prompt that forbids thinking opens no thought.
            is_open = bool(thought.strip() if sampled else thought) or is_opened or not format.opens_thought
            # An empty thought that replaces a removed one was never sampled.
            may_be_empty = options.no_reasoning == "train" and is_open and not message.reasoning.strip()
            sampled_thought = sampled and (bool(thought.strip()) or may_be_empty)
            pieces.append((ASSISTANT, False))
            if is_open:
                pieces += [(p, sampled_thought and not format.opens_thought) for p in (format.line, THINK)]
            pieces += [(p, sampled_thought) for p in (thought.strip(), END_THINK)]
            pieces += [(p, sampled) for p in _answer(message, format)]
    return pieces


def _asked(content: str, thinking: bool, format: ChatFormat) -> list[str]:
    if format.opens_thought:
        return [f"{format.line}{content}"]
    # The one marker that a user may type: GLM's switch at the end of a message.
    text = content.removesuffix(NO_THINK)
    return [f"{format.line}{text}", *([] if thinking and text == content else [NO_THINK])]


def _answer(message: Message, format: ChatFormat) -> list[str]:
    text = message.content.strip()
    line = format.line
    pieces = [f"{line}{text}"] if text else []
    for call in message.tool_calls:
        pieces += [line, CALL, f"{call.name}{line}"]
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            pieces += [KEY, str(key), END_KEY, line, VALUE, text, END_VALUE, line]
        pieces.append(END_CALL)
    return pieces


def _tools(tools: Sequence[Mapping], format: ChatFormat) -> list[str]:
    if not tools:
        return []
    lines = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools)
    # The tags in the explanation are tokens, as in the calls that it explains; tags in a tool's description are text.
    tail = (Marker(part) if part in MARKERS else part for part in _TAGS.split(format.tools_tail))
    return [SYSTEM, TOOLS_HEAD + lines, *tail]


def _encode(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> ChatDocument:
    """Encode markers by id, and adjacent texts as one text, as if the whole document were one string."""
    ids = []
    flags = []
    for (is_marker, target), group in groupby(pieces, lambda piece: (isinstance(piece[0], Marker), piece[1])):
        texts = [text for text, _ in group]
        if is_marker:
            part = np.array([tokenizer.special[name] for name in texts], dtype=np.uint32)
        else:
            part = tokenizer.encode("".join(texts))
        ids.append(part)
        flags.append(np.full(len(part), target))
    return ChatDocument(np.concatenate(ids).astype(np.uint32, copy=False), np.concatenate(flags))
