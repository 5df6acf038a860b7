"""Orders of roles that interrupted agents and several agents send. The expected texts are the outputs of the chat
templates of GLM-4.5 and GLM-4.7."""

import pytest

from glm46.storage.chats.chat import ChatOptions, chat_prompt, render
from glm46.storage.chats.conversation import BadConversation, parse_conversation, parse_prompt
from glm46.storage.data.tokenizer import load_tokenizer

TOKENIZERS = {"GLM-4.6": load_tokenizer("builtin", "GLM-4.6"), "GLM-4.7": load_tokenizer("builtin", "GLM-4.7")}
USER = {"role": "user", "content": "Q"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": {"zone": "CET"}}]}
RESULT = {"role": "tool", "content": "noon"}
CALL_46 = "<tool_call>now\n<arg_key>zone</arg_key>\n<arg_value>CET</arg_value>\n</tool_call>"
CALL_47 = "<tool_call>now<arg_key>zone</arg_key><arg_value>CET</arg_value></tool_call>"
ASKED_46 = f"<|user|>\nQ<|assistant|>\n<think></think>\n{CALL_46}"
ASKED_47 = f"<|user|>Q<|assistant|></think>{CALL_47}"
NOON_46 = "<|observation|>\n<tool_response>\nnoon\n</tool_response>"
NOON_47 = "<|observation|><tool_response>noon</tool_response>"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


ORDERS = {
    "user after a result": (
        [USER, CALL, RESULT, user("Brief.")],
        f"{ASKED_46}{NOON_46}<|user|>\nBrief.",
        f"{ASKED_47}{NOON_47}<|user|>Brief.",
    ),
    "user after a call": ([USER, CALL, user("Stop.")], f"{ASKED_46}<|user|>\nStop.", f"{ASKED_47}<|user|>Stop."),
    "system after a result": (
        [USER, CALL, RESULT, system("Two left.")],
        f"{ASKED_46}{NOON_46}<|system|>\nTwo left.",
        f"{ASKED_47}{NOON_47}<|system|>Two left.",
    ),
    "system between a call and its result": (
        [USER, CALL, system("Wait."), RESULT],
        f"{ASKED_46}<|system|>\nWait.{NOON_46}",
        f"{ASKED_47}<|system|>Wait.{NOON_47}",
    ),
    "answer after a call": (
        [USER, CALL, answer("late"), user("Q2")],
        f"{ASKED_46}<|assistant|>\n<think></think>\nlate<|user|>\nQ2",
        f"{ASKED_47}<|assistant|></think>late<|user|>Q2",
    ),
    "two answers": (
        [USER, answer("one"), answer("two"), user("Q2")],
        "<|user|>\nQ<|assistant|>\n<think></think>\none<|assistant|>\n<think></think>\ntwo<|user|>\nQ2",
        "<|user|>Q<|assistant|></think>one<|assistant|></think>two<|user|>Q2",
    ),
    "an answer first": (
        [answer("Hello"), USER],
        "<|assistant|>\n<think></think>\nHello<|user|>\nQ",
        "<|assistant|></think>Hello<|user|>Q",
    ),
    "an answer last": (
        [USER, answer("one")],
        "<|user|>\nQ<|assistant|>\n<think></think>\none",
        "<|user|>Q<|assistant|></think>one",
    ),
    "no user": ([system("Be brief.")], "<|system|>\nBe brief.", "<|system|>Be brief."),
}


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
        ([answer("Hello"), USER, answer("A")], ["\nHello<|user|>", "\nA<|user|>"], 0),
        ([USER, answer("one"), answer("two")], ["\none", "\ntwo<|user|>"], 1),
        ([USER, CALL, RESULT, user("Q2"), answer("A")], [f"\n{CALL_46}<|observation|>", "\nA<|user|>"], 0),
        # The model ends a turn with calls by <|observation|>, not by the marker of a user who interrupts it.
        ([USER, CALL, user("Stop."), answer("A")], [f"\n{CALL_46}", "\nA<|user|>"], 1),
        ([USER, CALL, answer("late"), RESULT, answer("A")], [f"\n{CALL_46}", "\nlate", "\nA<|user|>"], 2),
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


TWO_CALLS = {
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
        [USER, TWO_CALLS, SECOND, FIRST],
        [USER, TWO_CALLS, FIRST, SECOND, answer("A"), USER, TWO_CALLS, SECOND, FIRST],
        [USER, TWO_CALLS, user("And?"), SECOND, FIRST],
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
        contents = [message.content for message in parse_prompt([USER, TWO_CALLS, *results])[2:]]
        assert contents == [result["content"] for result in results]
    with pytest.raises(BadConversation, match="tool_call_id 'c3'"):
        parse_prompt([USER, TWO_CALLS, FIRST, SECOND | {"tool_call_id": "c3"}])
    same = {**TWO_CALLS, "tool_calls": [call | {"id": "c"} for call in TWO_CALLS["tool_calls"]]}
    rows = [USER, same, SECOND | {"tool_call_id": "c"}, FIRST | {"tool_call_id": "c"}]
    assert [message.content for message in parse_prompt(rows)[2:]] == ["14:05", "22 C"]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_tool_may_give_nothing(content):
    assert parse_prompt([USER, CALL, {"role": "tool", **content}])[-1].content == ""
