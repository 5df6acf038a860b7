"""The formats of GLM-5, 5.1 and 5.2: conversations there and back, targets, efforts and deferred tools."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.storage.chats.chat import ChatOptions, chat_prompt, chat_reply, opened_thought, render
from glm46.storage.chats.chat_format import BEGIN, END_RESPONSE, FORMATS, GLM_52, RESPONSE, TOOLS_HEAD
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.chat_turn import TurnReader
from glm46.storage.chats.conversation import (
    BadConversation,
    Conversation,
    Message,
    ToolCall,
    parse_conversation,
    parse_prompt,
)
from glm46.storage.data.tokenizer import load_tokenizer

TOKENIZERS = {name: load_tokenizer("builtin", name) for name in ("GLM-5", "GLM-5.1", "GLM-5.2")}
ROLES = {f"<|{role}|>": role for role in ("system", "user", "assistant", "observation")}
QUESTION = Message("user", "Which tides?")


def read_back(tokenizer, document):
    """The conversation of a document: turns by the reader of sampled turns, the rest by its markers."""
    names = {tokenizer.special[name]: name for name in (*ROLES, RESPONSE, END_RESPONSE)}
    ids = document.ids.tolist()
    assert ids[: len(BEGIN)] == [tokenizer.special[name] for name in BEGIN]
    starts = [at for at, token in enumerate(ids) if names.get(token) in ROLES]
    messages, tools, effort = [], (), ""
    for start, end in zip(starts, starts[1:], strict=False):
        role = ROLES[names[ids[start]]]
        part = ids[start + 1 : end]
        text = tokenizer.decode(part)
        if role == "system" and start == len(BEGIN) and text.startswith("Reasoning Effort: "):
            effort = text.removeprefix("Reasoning Effort: ").lower()
        elif role == "system" and text.startswith(TOOLS_HEAD):
            tools = described(text.removeprefix(TOOLS_HEAD))
        elif role == "assistant":
            reader = TurnReader(tokenizer)
            for token in part:
                reader.read(token)
            messages.append(reader.end()[1])
        elif role == "observation":
            ends = [at for at, token in enumerate(part) if names.get(token) == END_RESPONSE]
            for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False):
                assert names[part[first]] == RESPONSE
                messages.append(result(tokenizer.decode(part[first + 1 : last])))
        else:
            messages.append(Message(role, text))
    return Conversation(tuple(messages), tools, effort=effort)


def described(text):
    lines, closed, _ = text.partition("</tools>")
    assert closed
    return tuple(json.loads(line) for line in lines.split("\n")[:-1])


def result(text):
    if text.startswith("<tools>\n"):
        return Message("tool", loaded_tools=tuple(tool["name"] for tool in described(text.removeprefix("<tools>\n"))))
    return Message("tool", text)


WORDS = st.text(max_size=6)
VISIBLE = st.text(min_size=1, max_size=6).filter(str.strip)
STRIPPED = VISIBLE.map(str.strip)
DESCRIPTIONS = st.fixed_dictionaries({"name": STRIPPED, "parameters": st.dictionaries(WORDS, WORDS, max_size=2)})


@st.composite
def conversations(draw, format):
    """Conversations that a document shows whole."""
    tools = tuple(draw(st.lists(DESCRIPTIONS, max_size=2, unique_by=lambda tool: tool["name"])))
    messages = [Message("system", draw(WORDS))] if draw(st.booleans()) else []
    thoughts = st.just("") | (STRIPPED if format.strips_thoughts else VISIBLE)
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(WORDS)))
        for _ in range(draw(st.integers(0, 2))):
            arguments = st.dictionaries(WORDS, WORDS, max_size=2)
            calls = draw(st.lists(st.builds(ToolCall, STRIPPED, arguments), min_size=1, max_size=2))
            content = draw(st.just("") | STRIPPED)
            messages.append(Message("assistant", content, draw(thoughts), tuple(calls)))
            for _ in calls:
                loads = format.defers_tools and tools and draw(st.booleans())
                names = tuple(tool["name"] for tool in tools[: draw(st.integers(1, 2))]) if loads else ()
                messages.append(Message("tool", loaded_tools=names) if loads else Message("tool", draw(WORDS)))
        messages.append(Message("assistant", draw(STRIPPED), draw(thoughts)))
    efforts = st.sampled_from(["max", "high"]) if format.states_effort else st.just("")
    return Conversation(tuple(messages), tools, effort=draw(efforts))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_document_reads_back_as_its_conversation(name, data):
    tokenizer = TOKENIZERS[name]
    conversation = data.draw(conversations(format_of(tokenizer)))
    (document,) = render(conversation, tokenizer, ChatOptions("keep", "train")).documents
    assert read_back(tokenizer, document) == conversation


def marked(tokenizer, document):
    """The text of a document, with its targets in [[ ]]; without ``[gMASK]<sop>``."""
    edges = np.flatnonzero(np.diff(document.is_target)) + 1
    parts = [tokenizer.decode(part) for part in np.split(document.ids, edges)]
    parts = [f"[[{part}]]" if number % 2 else part for number, part in enumerate(parts)]
    return "".join(parts).removeprefix("[gMASK]<sop>")


TARGETS = json.loads(Path(__file__).with_name("targets_of_glm_5.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name):
    flavor, row, options, wanted = TARGETS[name]
    tokenizer = TOKENIZERS[flavor]
    documents = render(parse_conversation(row, "messages"), tokenizer, ChatOptions(**options)).documents
    assert [marked(tokenizer, document) for document in documents] == wanted


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("thought", ["why", " why\n", ""])
def test_a_document_is_a_prompt_and_what_is_sampled_behind_it(name, thought):
    tokenizer = TOKENIZERS[name]
    thinking = bool(thought)
    prompt = chat_prompt(tokenizer, [QUESTION], thinking=thinking, effort="high")
    written = thought.strip() if format_of(tokenizer).strips_thoughts else thought
    sampled = f"{written}</think>None.<|user|>" if thinking else "None.<|user|>"
    conversation = Conversation((QUESTION, Message("assistant", "None.", thought)), effort="high")
    ((ids, is_target),) = render(conversation, tokenizer, ChatOptions()).documents
    assert ids.tolist() == prompt + tokenizer.encode_with_special(sampled).tolist()
    assert is_target.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    reader = TurnReader(tokenizer, in_thought=bool(opened_thought(tokenizer, thinking)))
    for token in ids[len(prompt) : -1].tolist():
        reader.read(token)
    assert reader.end()[1] == Message("assistant", "None.", written)


def test_an_effort_that_the_format_does_not_have():
    row = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "thinking": "why"}]}
    for effort in ("low", "High", 3):
        conversation = parse_conversation(row | {"reasoning_effort": effort}, "messages")
        with pytest.raises(BadConversation, match=f"reasoning_effort is neither high nor max: '{effort}'"):
            render(conversation, TOKENIZERS["GLM-5.2"], ChatOptions())
        assert render(conversation, TOKENIZERS["GLM-5.1"], ChatOptions()).documents
    default = render(parse_conversation(row, "messages"), TOKENIZERS["GLM-5.2"], ChatOptions()).documents[0]
    assert "<|system|>Reasoning Effort: Max<|user|>" in TOKENIZERS["GLM-5.2"].decode(default.ids)


SEARCH = {"role": "assistant", "content": "", "tool_calls": [{"name": "search_tools", "arguments": {}}]}
TIDES = {"name": "tides", "parameters": {}, "strict": True, "defer_loading": True}


def loading(*content):
    return [{"role": "user", "content": "Q"}, SEARCH, {"role": "tool", "content": list(content)}]


def test_a_reply_loads_a_deferred_tool():
    reference = {"type": "tool_reference", "name": "tides"}
    tools = [{"type": "function", "function": TIDES}]
    messages = parse_prompt(loading(reference), tools)
    assert messages[-1] == Message("tool", loaded_tools=("tides",))
    for name in ("GLM-5.1", "GLM-5.2"):
        tokenizer = TOKENIZERS[name]
        text = tokenizer.decode(chat_prompt(tokenizer, messages, tools=tools, thinking=True))
        loaded = '<|observation|><tool_response><tools>\n{"name": "tides", "parameters": {}}\n</tools></tool_response>'
        assert loaded in text and text.count("tides") == 1 and "<tools>\n</tools>" in text
        reply = tokenizer.decode(chat_reply(tokenizer, messages[-1:], tools=tools, thinking=True))
        assert reply == f"{loaded}<|assistant|><think>"
    for format in FORMATS[:2]:
        with pytest.raises(BadConversation, match="tool_reference in a chat format without deferred tools"):
            chat_prompt(load_tokenizer("builtin", format.name), messages, tools=tools, thinking=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "tool_reference", "name": "clock"}], "tool_reference to a tool that is not described: 'clock'"),
        ([{"type": "tool_reference"}], "tool_reference without a name"),
        ([{"type": "tool_reference", "name": "tides"}, "and more"], "tool_reference without a name, or beside other"),
    ],
)
def test_bad_references_are_refused(content, reason):
    row = {"messages": [*loading(*content), {"role": "assistant", "content": "A"}], "tools": [TIDES]}
    for refused in (lambda: parse_conversation(row, "messages"), lambda: parse_prompt(row["messages"][:-1], [TIDES])):
        with pytest.raises(BadConversation, match=reason):
            refused()


def test_no_other_format_states_an_effort():
    assert [format for format in FORMATS if format.states_effort] == [GLM_52]
