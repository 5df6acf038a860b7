"""Lines of chat files: formats, orders of roles and results of tools are read, or refused with the reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.text_recipe import CHAT_FORMATS
from glm46.storage.chats.chat import ChatOptions, chat_prompt, render
from glm46.storage.chats.conversation import (
    BadConversation,
    Conversation,
    Message,
    ToolCall,
    parse_conversation,
    parse_prompt,
)
from glm46.storage.chats.format_as_text import CALL_AS_TEXT, MARKER_AS_TEXT, OPEN_THOUGHT
from glm46.storage.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("builtin")
BAD_LINES = json.loads(Path(__file__).with_name("bad_lines.json").read_text(encoding="utf-8"))

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
HELLO = (Message("user", "Hi"), Message("assistant", "Hello"))
TOOL = {"type": "function", "function": {"name": "weather"}}


def parse(*messages, **others):
    return parse_conversation({"messages": list(messages), **others}, "messages")


def test_openai_messages_with_tools_and_reasoning():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    conversation = parse(
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, "brief."]},
        {"role": "user", "content": "Rome?", "reasoning_content": "of a user is nobody's"},
        {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [call, {"name": "now"}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "function", "content": "noon"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": None, "weight": None},
        tools=[TOOL],
    )
    calls = (ToolCall("weather", {"city": "Rome", "days": 2}), ToolCall("now", {}))
    assert conversation == Conversation(
        (
            Message("system", "Be brief."),
            Message("user", "Rome?"),
            Message("assistant", "", "look", calls),
            Message("tool", "sunny"),
            Message("tool", "noon"),
            Message("assistant", "Sunny."),
        ),
        (TOOL,),
    )


@pytest.mark.parametrize("format, record", [
    ("messages", {"messages": [USER, ANSWER]}),
    ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}),
    ("prompt_completion", {"prompt": "Hi", "completion": "Hello"}),
    ("prompt_completion", {"prompt": [USER], "completion": [ANSWER]}),
    ("alpaca", {"instruction": "Hi", "input": "", "output": "Hello"}),
])  # fmt: skip
def test_formats_give_the_same_messages(format, record):
    assert parse_conversation(record, format) == Conversation(HELLO)


def test_sharegpt_with_tools():
    rows = [("human", "Rome?"), ("gpt", "<think>look</think>\nWait."), ("function_call", '{"name": "weather"}')]
    rows += [("function_call", '[{"name": "now", "arguments": {"zone": 1}}]'), ("observation", "sunny")]
    rows += [("function_call", '<think>again</think>{"name": "now"}'), ("tool", "noon"), ("gpt", "Sunny.")]
    record = {"conversations": [{"from": role, "value": value} for role, value in rows]}
    got = parse_conversation(record | {"system": "Be brief.", "tools": json.dumps([TOOL])}, "sharegpt")
    assert got.tools == (TOOL,)
    assert got.messages == (
        Message("system", "Be brief."),
        Message("user", "Rome?"),
        Message("assistant", "Wait.", "look", (ToolCall("weather"), ToolCall("now", {"zone": 1}))),
        Message("tool", "sunny"),
        Message("assistant", "", "again", (ToolCall("now"),)),
        Message("tool", "noon"),
        Message("assistant", "Sunny."),
    )


def test_answers_of_a_prompt_are_not_trained_and_alpaca_has_history():
    prompt = [USER, ANSWER, {"role": "user", "content": "And?"}]
    got = parse_conversation({"prompt": prompt, "completion": "So."}, "prompt_completion").messages
    assert [message.is_trained for message in got if message.role == "assistant"] == [False, True]
    record = {"system": "S", "instruction": "Add", "input": "1 2", "output": "3", "history": [["Hi", "Hello"]]}
    assert parse_conversation(record, "alpaca").messages == (
        Message("system", "S"), *HELLO, Message("user", "Add\n1 2"), Message("assistant", "3"),
    )  # fmt: skip


@pytest.mark.parametrize("key", ["weight", "loss", "train"])
@pytest.mark.parametrize("value", [0, 1, False, True, 0.0, None])
def test_weights_of_messages(key, value):
    got = parse(USER, ANSWER | {key: value}).messages[-1]
    assert got.is_trained is (value is None or bool(value))


@pytest.mark.parametrize("off", [1, 2])
def test_a_turn_is_trained_if_none_of_its_messages_says_no(off):
    rows = [{"role": "user", "content": "x"}, ANSWER, {"role": "tool_call", "content": {"name": "now"}}]
    assert parse(*rows).messages[-1].is_trained
    rows[off] = rows[off] | {"weight": 0}
    assert not parse(*rows).messages[-1].is_trained


@pytest.mark.parametrize("content, reasoning, answer", [
    ("<think>\nwhy</think>\n\nSo", "why", "So"), ("lost <think>why</think>lost</think>So", "why", "So"),
    ("why</think>So", "why", "So"),
])  # fmt: skip
def test_thinking_inside_the_content(content, reasoning, answer):
    assert parse(USER, ANSWER | {"content": content}).messages[-1] == Message("assistant", answer, reasoning)
    # Reasoning of its own, empty too, leaves the content alone, which then may not begin with a tag.
    beside = ANSWER | {"content": content, "reasoning_content": ""}
    if not content.startswith("<think>"):
        assert parse(USER, beside).messages[-1] == Message("assistant", content)
        return
    with pytest.raises(BadConversation, match="thought"):
        parse(USER, beside)


def test_old_function_calls_and_names_of_reasoning():
    old = {"role": "assistant", "function_call": {"name": "now", "arguments": ""}, "content": None}
    assert parse(USER, old, {"role": "function", "content": "noon"}, ANSWER).messages[1].tool_calls == (
        ToolCall("now"),
    )
    for key in ("reasoning", "thinking"):
        assert parse(USER, ANSWER | {key: "why"}).messages[-1].reasoning == "why"


@pytest.mark.parametrize("rest", [[USER], [{"role": "system", "content": "x"}, USER]])
def test_messages_behind_the_last_answer_are_left_out_and_counted(rest):
    assert parse(USER, ANSWER, *rest) == Conversation(HELLO, num_dropped=len(rest))


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
TWO_CALLS = CALL | {"tool_calls": CALL["tool_calls"] * 2}
RESULT = {"role": "tool", "content": "noon"}


def calling(**function):
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    "reason, messages",
    BAD_LINES["messages"]
    + [
        ("arguments are not JSON", [USER, calling(name="now", arguments="[" * 100_000)]),
    ],
)
def test_bad_lines_are_refused_with_their_reason(reason, messages):
    with pytest.raises(BadConversation) as refused:
        parse(*messages)
    assert refused.value.reason == reason


HERMES = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
GLM = "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>now<\uff5ctool\u2581calls\u2581end\uff5c>"


@pytest.mark.parametrize("before", ["", "I look it up.\n", "```python\nx = 1\n```\n", "`a` and "])
@pytest.mark.parametrize("reason, text", [
    (OPEN_THOUGHT, "\n<think>never closed, cut at the limit"), (OPEN_THOUGHT, "\n\u25c1think\u25b7let me see"),
    (CALL_AS_TEXT, HERMES), (CALL_AS_TEXT, GLM), (CALL_AS_TEXT, "<tool_call>" + HERMES[12:-12]),
    (CALL_AS_TEXT, '<function=now>{"zone": 1}</function>'), (CALL_AS_TEXT, '[TOOL_CALLS] [{"name": "now"}]'),
    (CALL_AS_TEXT, '[TOOL_CALLS]now{"zone": 1}'), (CALL_AS_TEXT, "\n<|python_tag|>now.call()"),
    (CALL_AS_TEXT, '<function_calls>\n<invoke name="now">\n</invoke>'), (CALL_AS_TEXT, "\n<tool_call>\nnow"),
    (CALL_AS_TEXT, "\n<|tool_calls_section_begin|><|tool_call_begin|>now"), (MARKER_AS_TEXT, DEEPSEEK),
    (MARKER_AS_TEXT, "Done.<|user|>"), (MARKER_AS_TEXT, "Done.<|im_end|>"), (MARKER_AS_TEXT, "\n<|user|>\nAnd you?"),
    (MARKER_AS_TEXT, "\n[INST] And you?"), (MARKER_AS_TEXT, "<|begin_of_box|>42<|end_of_box|>"),
    (OPEN_THOUGHT, "Sure. <think>never closed, cut"), (OPEN_THOUGHT, "\n<thinking>as another model</thinking>So."),
    (CALL_AS_TEXT, "\n<start_function_call>call:now{}"), (CALL_AS_TEXT, 'functools[{"name": "now"}]'),
    (MARKER_AS_TEXT, "\n[gMASK]<sop>"), (MARKER_AS_TEXT, "Done.</s>"), (MARKER_AS_TEXT, "\n<<SYS>>"),
    (MARKER_AS_TEXT, "Done.<eos>"),
])  # fmt: skip
def test_a_format_that_the_assistant_writes_as_text_is_refused_by_cause(before, reason, text):
    for turn in (
        {"content": before + text},
        {"content": before + text, "weight": 0},
        {"content": [{"type": "text", "text": before}, text]},
        {"content": f"<think>{before}{text}</think>So." if reason != OPEN_THOUGHT else f"why</think>{before}{text}"},
        {"content": "So.", "reasoning_content": before + text},
    ):
        with pytest.raises(BadConversation) as refused:
            parse(USER, {"role": "assistant"} | turn, USER)
        assert refused.value.reason == reason and "message 1" in refused.value.detail
    with pytest.raises(BadConversation, match=reason):
        parse_prompt([USER, ANSWER | {"content": before + text}, USER])


@pytest.mark.parametrize("content", [
    '{"name": "weather", "parameters": {"city": "Rome"}}', '[{"name": "weather", "arguments": {}}]',
])  # fmt: skip
def test_an_answer_that_is_the_json_of_a_call_is_refused_where_the_tool_is_known(content):
    with pytest.raises(BadConversation, match=CALL_AS_TEXT):
        parse(USER, ANSWER | {"content": content}, tools=[TOOL])
    for kept in ([], [{"name": "now"}]):
        assert parse(USER, ANSWER | {"content": content}, tools=kept).messages[-1].content == content


@pytest.mark.parametrize("text", [
    HERMES, "<think>open", "What does <|user|> mean?", DEEPSEEK, "Done.<|im_end|>", "</tool_response>",
])  # fmt: skip
def test_markers_are_words_in_what_others_write_and_where_the_assistant_speaks_of_them(text):
    told = [
        f"In code:\n```xml\n{text}\n```\nSo.", f"~~~\n{text}", "A `<think>` and a <think> tag, <|user|> too.", "a<b>c",
        "The <s>old</s> new.",
    ]  # fmt: skip
    result = {"role": "tool", "content": text}
    for answer in told:
        got = parse({"role": "system", "content": text}, {"role": "user", "content": text}, CALL, result, {
            "role": "assistant", "content": answer})  # fmt: skip
        assert got.messages[-1].content == answer and got.messages[1].content == text == got.messages[3].content


@pytest.mark.parametrize("reason, format, record", BAD_LINES["other_formats"])
def test_bad_lines_of_other_formats(reason, format, record):
    with pytest.raises(BadConversation) as refused:
        parse_conversation(record, format)
    assert refused.value.reason == reason


TURNS = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello!"}]
ASKED = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello!"}]
BY_COLUMNS = {
    "messages": {"messages": ASKED},
    "sharegpt": {"conversations": TURNS},
    "alpaca": {"instruction": "Hello?", "input": "", "output": "Hello!"},
    "prompt_completion": {"prompt": "Hello?", "completion": "Hello!"},
    "messages of ShareGPT": {"messages": TURNS},
    "conversations of roles": {"conversations": ASKED},
    "prompt of turns": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "columns of Parquet": {"messages": None, "conversations": TURNS, "instruction": None, "output": None},
    "others beside them": {"id": 7, "source": "x", "instruction": "Hello?", "output": "Hello!", "text": "x"},
}


@pytest.mark.parametrize("record", BY_COLUMNS.values(), ids=BY_COLUMNS)
def test_the_columns_of_a_line_tell_its_format(record):
    assert parse_conversation(record, "chat").messages == parse(*ASKED).messages


@pytest.mark.parametrize("format, record, said", BAD_LINES["columns"])
def test_a_line_of_other_columns_is_refused_with_those_that_it_has(format, record, said):
    with pytest.raises(BadConversation, match=said):
        parse_conversation(record, format)


KEYS = ["messages", "conversations", "prompt", "completion", "instruction", "output", "history", "system", "tools"]
KEYS += ["role", "content", "from", "value", "tool_calls", "function_call", "function", "name", "arguments", "type"]
KEYS += ["text", "weight", "reasoning_content"]
TEXTS = st.sampled_from(["user", "assistant", "tool", "tool_call", "text", "x", "", "{}", '[{"name": "f"}]', "\ud800"])
SCALARS = st.none() | st.booleans() | st.integers(-1, 2) | st.floats() | TEXTS
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)
MESSAGES = st.lists(
    st.sampled_from([USER, ANSWER, CALL, RESULT]) | st.fixed_dictionaries({"role": TEXTS, "content": ANYTHING}),
    max_size=4,
)
RECORDS = ANYTHING | st.dictionaries(st.sampled_from(KEYS[:9]), ANYTHING | MESSAGES, max_size=4)


@settings(max_examples=150)
@given(record=RECORDS, format=st.sampled_from(CHAT_FORMATS))
def test_any_line_is_a_conversation_that_can_be_rendered_or_refused(record, format):
    try:
        conversation = parse_conversation(record, format)
    except BadConversation as refused:
        assert len(refused.reason) < 60
        return
    for document in render(conversation, TOKENIZER, ChatOptions()).documents:
        assert document.is_target.any() and not document.is_target[:3].any()


TOOL_CALL = {"function": {"name": "weather", "arguments": {"town": 1, "days": None}}}
AS_VALUES = [
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}]},
    {"messages": [USER, {"role": "assistant", "content": None, "function_call": TOOL_CALL["function"]}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"prompt": [USER], "completion": [{"role": "assistant", "content": "Hello"}]},
    {"instruction": "Go", "output": "Gone", "history": [["a", "b"]]},
]


@pytest.mark.parametrize("record", AS_VALUES)
def test_columns_that_are_stored_as_json_text_are_read(record):
    """Parquet has no type for lists whose entries have fields of different types."""
    stored = {key: value if isinstance(value, str) else json.dumps(value) for key, value in record.items()}
    assert stored != record and parse_conversation(stored, "chat") == parse_conversation(record, "chat")


def test_calls_that_are_stored_as_json_text_are_read():
    turn = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    for key, value in (("tool_calls", [TOOL_CALL]), ("function_call", TOOL_CALL["function"])):
        stored = {"role": "assistant", "content": None, key: json.dumps(value)}
        assert parse(USER, stored) == parse(USER, turn)
        assert parse(USER, ANSWER | {key: "null"}) == parse(USER, ANSWER)


@pytest.mark.parametrize("text", [
    "[1, 2, 3]", '[{"role": "admin", "content": "x"}]', '{"role": "user"}', '[{"role": "user"', "[]",
    'Is this JSON? [{"role": "user", "content": "x"}]',
])  # fmt: skip
def test_a_text_that_is_no_list_of_messages_stays_a_text(text):
    conversation = parse_conversation({"prompt": text, "completion": text}, "prompt_completion")
    assert [message.content for message in conversation.messages] == [text, text]


def test_messages_that_are_a_text_but_no_json_are_refused_with_the_reason():
    with pytest.raises(BadConversation, match="messages are text, not JSON"):
        parse_conversation({"messages": "Hi there"}, "messages")


TOKENIZERS = {"GLM-4.6": load_tokenizer("builtin", "GLM-4.6"), "GLM-4.7": load_tokenizer("builtin", "GLM-4.7")}
QUESTION = {"role": "user", "content": "Q"}
ZONE_CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": {"zone": "CET"}}]}
CALL_46 = "<tool_call>now\n<arg_key>zone</arg_key>\n<arg_value>CET</arg_value>\n</tool_call>"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


ORDERS = json.loads(Path(__file__).with_name("orders_of_roles.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ORDERS)
def test_prompts_are_what_the_templates_write(name):
    rows, *texts = ORDERS[name]
    endings = ("<|assistant|>", "<|assistant|><think>")
    for tokenizer, text, ending in zip(TOKENIZERS.values(), texts, endings, strict=True):
        ids = chat_prompt(tokenizer, parse_prompt(rows, is_sampled=True), thinking=True)
        assert tokenizer.decode(ids) == f"[gMASK]<sop>{text}{ending}"
    if rows[-1]["role"] == "assistant":
        with pytest.raises(BadConversation, match="the last message is neither"):
            parse_prompt(rows)


@pytest.mark.parametrize(
    ("rows", "targets", "unstopped"),
    [
        ([answer("Hello"), QUESTION, answer("A")], ["\nHello<|user|>", "\nA<|user|>"], 0),
        ([QUESTION, answer("one"), answer("two")], ["\none", "\ntwo<|user|>"], 1),
        ([QUESTION, ZONE_CALL, RESULT, user("Q2"), answer("A")], [f"\n{CALL_46}<|observation|>", "\nA<|user|>"], 0),
        # The model ends a turn with calls by <|observation|>, not by the marker of a user who interrupts it.
        ([QUESTION, ZONE_CALL, user("Stop."), answer("A")], [f"\n{CALL_46}", "\nA<|user|>"], 1),
        ([QUESTION, ZONE_CALL, answer("late"), RESULT, answer("A")], [f"\n{CALL_46}", "\nlate", "\nA<|user|>"], 2),
    ],
)
def test_targets_end_where_the_model_would_stop(rows, targets, unstopped):
    tokenizer = TOKENIZERS["GLM-4.6"]
    conversation = parse_conversation({"messages": rows}, "messages")
    documents, counts = render(conversation, tokenizer, ChatOptions("all"))
    (document,) = documents
    runs, was_target = [], False
    for token, is_target in zip(document.ids.tolist(), document.is_target.tolist(), strict=True):
        if is_target and not was_target:
            runs.append([])
        if is_target:
            runs[-1].append(token)
        was_target = is_target
    assert [tokenizer.decode(run) for run in runs] == targets
    assert counts["turns without a stop token"] == unstopped


CALLS_WITH_IDS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ],
}
FIRST = {"role": "tool", "tool_call_id": "c1", "content": "22 C"}
SECOND = {"role": "tool", "tool_call_id": "c2", "content": "14:05"}


@pytest.mark.parametrize(
    "rows",
    [
        [QUESTION, CALLS_WITH_IDS, SECOND, FIRST],
        [QUESTION, CALLS_WITH_IDS, FIRST, SECOND, answer("A"), QUESTION, CALLS_WITH_IDS, SECOND, FIRST],
        [QUESTION, CALLS_WITH_IDS, user("And?"), SECOND, FIRST],
    ],
)
def test_results_take_the_order_of_their_calls(rows):
    for messages in (
        parse_prompt(rows),
        parse_conversation({"messages": [*rows, answer("A")]}, "messages").messages[:-1],
    ):
        assert [message.content for message in messages[-2:]] == ["22 C", "14:05"]


def test_results_without_ids_keep_their_places_and_unknown_ids_are_refused():
    without_id = {"role": "tool", "content": "no id"}
    for results in ([SECOND, without_id], [without_id, without_id | {"content": "other"}]):
        contents = [message.content for message in parse_prompt([QUESTION, CALLS_WITH_IDS, *results])[2:]]
        assert contents == [result["content"] for result in results]
    with pytest.raises(BadConversation, match="tool_call_id 'c3'"):
        parse_prompt([QUESTION, CALLS_WITH_IDS, FIRST, SECOND | {"tool_call_id": "c3"}])
    same = {**CALLS_WITH_IDS, "tool_calls": [call | {"id": "c"} for call in CALLS_WITH_IDS["tool_calls"]]}
    rows = [QUESTION, same, SECOND | {"tool_call_id": "c"}, FIRST | {"tool_call_id": "c"}]
    assert [message.content for message in parse_prompt(rows)[2:]] == ["14:05", "22 C"]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_tool_may_give_nothing(content):
    assert parse_prompt([QUESTION, ZONE_CALL, {"role": "tool", **content}])[-1].content == ""
