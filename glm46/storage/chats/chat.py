"""The chat format of GLM-4.5 and 4.6: training documents with their targets, and prompts of generation.

Source of the format: GLM-4.6's chat template, as in llama.cpp's models/templates/GLM-4.6.jinja; the tests compare the
ids. Special tokens are written by id, and text is encoded as text: a marker inside a message is ordinary characters,
except for ``/nothink`` at the end of a user's message, which is GLM's switch.

The format has no token that ends a turn: a turn ends where the model samples the marker of the next role.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np

from glm46.config.errors import UserError
from glm46.storage.chats.conversation import Conversation, Message
from glm46.storage.data.tokenizer import Tokenizer

TOOLS_HEAD = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
TOOLS_TAIL = """</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
<arg_key>{arg-key-2}</arg_key>
<arg_value>{arg-value-2}</arg_value>
...
</tool_call>"""
"""What the model reads before and behind the descriptions of its tools, one a line. Its tags are special tokens."""


class _Marker(str):
    """The name of a special token, where other strings are text."""


_BEGIN = (_Marker("[gMASK]"), _Marker("<sop>"))
_SYSTEM, _USER, _ASSISTANT, _OBSERVATION = map(_Marker, ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"))
THINK, END_THINK, _NO_THINK = _Marker("<think>"), _Marker("</think>"), _Marker("/nothink")
_RESPONSE, _END_RESPONSE = _Marker("<tool_response>"), _Marker("</tool_response>")
CALL_MARKERS = tuple(_Marker(f"<{end}{name}>") for name in ("tool_call", "arg_key", "arg_value") for end in ("", "/"))
CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE = CALL_MARKERS
_MARKERS = frozenset((*_BEGIN, _SYSTEM, _USER, _ASSISTANT, _OBSERVATION, THINK, END_THINK, _NO_THINK, *CALL_MARKERS))
_MARKERS |= {_RESPONSE, _END_RESPONSE}
_AS_TEXT = re.compile("|".join(map(re.escape, _MARKERS - {_NO_THINK})))
_TAGS = re.compile(f"({'|'.join(map(re.escape, CALL_MARKERS))})")


@dataclass(frozen=True)
class ChatOptions:
    """Options by which conversations become documents."""

    history: Literal["expand", "last", "all"] = "expand"
    """The format removes reasoning from turns before the last user message. expand: a document for each user turn with
    reasoning, so that every turn is a target as it was sampled. last: only the last user turn is a target. all: one
    document in which every turn is a target, behind an empty thought where its reasoning was removed."""
    no_reasoning: Literal["nothink", "mask", "train"] = "nothink"
    """Turns without reasoning. nothink: as answers to a prompt that forbids thinking. mask: an empty thought that is
    not a target. train: an empty thought that is a target; the model may stop thinking."""


class ChatDocument(NamedTuple):
    """One training document. It begins with ``[gMASK]<sop>`` and ends with the role marker behind its last turn."""

    ids: np.ndarray
    """uint32 [n]."""
    is_target: np.ndarray
    """bool [n]: whether the model samples the token. The loss of position i - 1 counts iff ``is_target[i]``."""


class Rendered(NamedTuple):
    """The documents of a conversation, and what happened to it."""

    documents: list[ChatDocument]
    """Each has a target; empty if no turn of the conversation is one."""
    counts: Counter
    """Number by what: trailing messages left out, turns of weight 0, turns without a stop token, no target, markers of
    the format that are text."""


def render(conversation: Conversation, tokenizer: Tokenizer, options: ChatOptions) -> Rendered:
    """Make the training documents of a conversation. Raises UserError if the tokenizer lacks one of GLM's special
    tokens."""
    messages = conversation.messages
    spans = list(pairwise([0, *_ends_of_user_turns(messages)]))
    has_reasoning = [any(message.reasoning.strip() for message in messages[start:end]) for start, end in spans]
    thinks = [reasoned or options.no_reasoning != "nothink" for reasoned in has_reasoning]
    last = len(spans) - 1
    # Each document is the last user turn in it, and the turns that are targets.
    groups: list[tuple[int, list[int]]] = [(last, list(range(last + 1)) if options.history == "all" else [last])]
    if options.history == "all":
        thinks[last] = any(thinks)
    elif options.history == "expand":
        # Turns without reasoning read the same in every later document of their mode, so they share one.
        groups, open_ = [], {True: list[int](), False: list[int]()}
        for k in range(last + 1):
            open_[thinks[k]].append(k)
            if has_reasoning[k] or thinks[k] not in thinks[k + 1 :]:
                groups.append((k, open_[thinks[k]]))
                open_[thinks[k]] = []
    documents = []
    for k, turns in groups:
        trained = [index for turn in turns for index in range(*spans[turn])]
        document = _document(conversation, trained, tokenizer, thinks[k], options.no_reasoning == "train")
        if document.is_target.any():
            documents.append(document)
    return Rendered(documents, _counts(conversation, documents))


def render_pair(
    halves: Sequence[Conversation], tokenizer: Tokenizer, no_reasoning: Literal["nothink", "mask", "train"]
) -> list[ChatDocument]:
    """Make a document of each half of a pair, with the targets of its last user turn, as `render` does with ``history =
    "last"``. The prompt is the same in both: with thinking if a half has reasoning. Raises UserError if the tokenizer
    lacks one of GLM's special tokens."""
    turns = [(half, range([0, *_ends_of_user_turns(half.messages)][-2], len(half.messages))) for half in halves]
    reasons = any(half.messages[i].reasoning.strip() for half, turn in turns for i in turn)
    thinks = reasons or no_reasoning != "nothink"
    return [_document(half, turn, tokenizer, thinks, no_reasoning == "train") for half, turn in turns]


def _document(
    conversation: Conversation, trained: Sequence[int], tokenizer: Tokenizer, thinks: bool, train_empty_thought: bool
) -> ChatDocument:
    """The document that ends with the last of the ``trained`` messages, which are in their order."""
    messages = conversation.messages[: trained[-1] + 1]
    targets = {index for index in trained if messages[index].is_trained}
    pieces = _pieces(messages, conversation.tools, thinks, targets, train_empty_thought)
    stop = _OBSERVATION if messages[-1].tool_calls else _USER
    return _encode([*pieces, (stop, trained[-1] in targets)], tokenizer)


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Sequence[Mapping] = (), thinking: bool
) -> list[int]:
    """Return the token ids of a prompt up to where the assistant's turn is sampled. Raises UserError if the tokenizer
    lacks one of GLM's special tokens.

    Args:
        messages: the conversation so far; the last one is the user's, or a tool's.
        thinking: whether the model may think before it answers.
    """
    return _ids_before_turn([piece for piece, _ in _pieces(messages, tools, thinking)], tokenizer, thinking)


def chat_reply(tokenizer: Tokenizer, content: str, *, from_tool: bool, thinking: bool) -> list[int]:
    """Return the token ids between a sampled turn, whose last token is the marker of the next role, and the next turn:
    the response of a tool or the user's message, and the begin of the assistant's turn. Raises UserError if the
    tokenizer lacks one of GLM's special tokens."""
    pieces = _response(content) if from_tool else _asked(content, thinking)
    return _ids_before_turn(pieces, tokenizer, thinking)


def _ids_before_turn(pieces: Sequence[str], tokenizer: Tokenizer, thinking: bool) -> list[int]:
    turn = [_ASSISTANT] if thinking else [_ASSISTANT, "\n", THINK, END_THINK]
    return _encode([(piece, False) for piece in (*pieces, *turn)], tokenizer).ids.tolist()


def missing_markers(tokenizer: Tokenizer) -> list[str]:
    """Special tokens of the chat format that a tokenizer lacks."""
    return sorted(_MARKERS - tokenizer.special.keys())


def raise_for_markers(tokenizer: Tokenizer) -> None:
    """Raise UserError if a tokenizer lacks one of the special tokens of the chat format."""
    if missing := missing_markers(tokenizer):
        raise UserError(
            f"tokenizer '{tokenizer.path}': has no {', '.join(missing)}; chats need GLM's special tokens: use the "
            "tokenizer of a GLM-4.5 or 4.6 folder, or 'builtin'"
        )


def _ends_of_user_turns(messages: Sequence[Message]) -> list[int]:
    """For each user turn, the index behind its last assistant message."""
    ends = set()
    answered = 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            answered = index + 1
        elif message.role == "user":
            ends.add(answered)
    return sorted({*ends, answered} - {0})


def _pieces(
    messages: Sequence[Message],
    tools: Sequence[Mapping],
    thinking: bool,
    targets: Collection[int] = (),
    train_empty_thought: bool = False,
) -> list[tuple[str, bool]]:
    """Markers and texts of the messages, in order, each with whether it is a target.

    Args:
        targets: indices of the assistant's messages that are sampled, with the marker behind each.
        train_empty_thought: whether the empty thought of a turn that had no reasoning is sampled too.
    """
    pieces = [(piece, False) for piece in (*_BEGIN, *_tools(tools))]
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    sampled = False
    for index, message in enumerate(messages):
        before = messages[index - 1].role if index else None
        sampled = sampled and before == "assistant"
        if message.role == "user":
            pieces += [(_USER, sampled), *((p, False) for p in _asked(message.content, thinking))]
        elif message.role == "system":
            # The model cannot be asked to stop here: only a user or a tool follows what it samples.
            pieces += [(_SYSTEM, False), (f"\n{message.content}", False)]
        elif message.role == "tool":
            if before != "tool":
                pieces.append((_OBSERVATION, sampled))
            pieces += [(p, False) for p in _response(message.content)]
        else:
            sampled = index in targets
            reasoning = message.reasoning.strip()
            thought = reasoning if index > last_user else ""
            # An empty thought in the place of a removed one was never sampled.
            sampled_thought = sampled and (bool(thought) or (train_empty_thought and not reasoning))
            pieces.append((_ASSISTANT, False))
            pieces += [(p, sampled_thought) for p in ("\n", THINK, thought, END_THINK)]
            pieces += [(p, sampled) for p in _answer(message)]
    return pieces


def _asked(content: str, thinking: bool) -> list[str]:
    # The one marker that a user may type: GLM's switch at the end of a message.
    text = content.removesuffix(_NO_THINK)
    return [f"\n{text}", *([] if thinking and text == content else [_NO_THINK])]


def _response(content: str) -> list[str]:
    return ["\n", _RESPONSE, f"\n{content}\n", _END_RESPONSE]


def _answer(message: Message) -> list[str]:
    text = message.content.strip()
    pieces = [f"\n{text}"] if text else []
    for call in message.tool_calls:
        pieces += ["\n", CALL, f"{call.name}\n"]
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            pieces += [KEY, str(key), END_KEY, "\n", VALUE, text, END_VALUE, "\n"]
        pieces.append(END_CALL)
    return pieces


def _tools(tools: Sequence[Mapping]) -> list[str]:
    if not tools:
        return []
    lines = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools)
    # The tags of the explanation are tokens, as in the calls that it explains; those of a description are text.
    tail = (_Marker(part) if part in _MARKERS else part for part in _TAGS.split(TOOLS_TAIL))
    return [_SYSTEM, TOOLS_HEAD + lines, *tail]


def _encode(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> ChatDocument:
    """Markers by id; adjacent texts as one text, as if the whole document were one string."""
    raise_for_markers(tokenizer)
    ids, flags = [], []
    for (is_marker, target), group in groupby(pieces, lambda piece: (isinstance(piece[0], _Marker), piece[1])):
        texts = [text for text, _ in group]
        if is_marker:
            part = np.array([tokenizer.special[name] for name in texts], dtype=np.uint32)
        else:
            part = tokenizer.encode("".join(texts))
        ids.append(part)
        flags.append(np.full(len(part), target))
    return ChatDocument(np.concatenate(ids).astype(np.uint32, copy=False), np.concatenate(flags))


def _counts(conversation: Conversation, documents: list[ChatDocument]) -> Counter:
    turns = [message for message in conversation.messages if message.role == "assistant"]
    followed = pairwise(conversation.messages)
    counts = Counter({
        "trailing messages left out": conversation.num_dropped,
        "turns of weight 0": sum(not turn.is_trained for turn in turns),
        "turns without a stop token": sum(
            turn.role == "assistant" and turn.is_trained and after.role == "system" for turn, after in followed
        ),
        "no target": not documents,
        "conversations with markers of the format as text": any(
            _AS_TEXT.search(text) for message in conversation.messages for text in (message.content, message.reasoning)
        ),
    })  # fmt: skip
    return +counts
