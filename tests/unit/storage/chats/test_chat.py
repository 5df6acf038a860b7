"""The chat format: which tokens are targets, documents against prompts, and turns as programs read them."""

import pytest

from glm46.config.errors import UserError
from glm46.storage.chats.chat import ChatOptions, chat_prompt, render
from glm46.storage.chats.chat_turn import TurnReader
from glm46.storage.chats.conversation import Message, parse_conversation
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.tasks.rl.rewards.answer import Answer, exact, maths

TOKENIZER = load_tokenizer("builtin")


def user(text="Hi"):
    return {"role": "user", "content": text}


def assistant(text="Hello", thought=None, calls=(), **others):
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": calls} | others


def tool(text="noon"):
    return {"role": "tool", "content": text}


def system(text="Be brief."):
    return {"role": "system", "content": text}


def rendered(*messages, tools=(), history="expand", no_reasoning="nothink"):
    conversation = parse_conversation({"messages": list(messages), "tools": list(tools)}, "messages")
    return render(conversation, TOKENIZER, ChatOptions(history, no_reasoning))


def marked(*messages, **options):
    """Each document as text, with its targets in [[ ]]; without ``[gMASK]<sop>``."""
    texts = []
    for ids, is_target in rendered(*messages, **options).documents:
        text, start = "", 0
        for i in range(1, len(ids) + 1):
            if i == len(ids) or is_target[i] != is_target[start]:
                part = TOKENIZER.decode(ids[start:i])
                text += f"[[{part}]]" if is_target[start] else part
                start = i
        assert text.startswith("[gMASK]<sop>")
        texts.append(text.removeprefix("[gMASK]<sop>"))
    return texts


def test_a_reasoned_turn_is_a_target_from_the_newline_to_the_next_role():
    assert marked(system(), user(), assistant(" Hello\n", " why ")) == [
        "<|system|>\nBe brief.<|user|>\nHi<|assistant|>[[\n<think>why</think>\nHello<|user|>]]"
    ]


def test_turns_without_reasoning_answer_a_prompt_that_forbids_thinking():
    messages = user(), assistant("A"), user("Go on/nothink"), assistant("B")
    assert marked(*messages) == [
        "<|user|>\nHi/nothink<|assistant|>\n<think></think>[[\nA<|user|>]]\nGo on/nothink"
        "<|assistant|>\n<think></think>[[\nB<|user|>]]"
    ]
    ids = rendered(*messages).documents[0].ids.tolist()
    assert ids.count(TOKENIZER.special["/nothink"]) == 2


def test_the_switch_that_a_user_types_and_a_thought_of_white_space():
    assert marked(user("Hi/nothink"), assistant("A", "x"))[0].startswith("<|user|>\nHi/nothink<|assistant|>[[\n<think>")
    ids = rendered(user("Hi/nothink"), assistant("A", "x")).documents[0].ids.tolist()
    assert ids.count(TOKENIZER.special["/nothink"]) == 1
    assert marked(user(), assistant("A", " \n")) == marked(user(), assistant("A"))


def test_an_empty_thought_is_masked_or_trained_on_request():
    assert marked(user(), assistant("A"), no_reasoning="mask") == [
        "<|user|>\nHi<|assistant|>\n<think></think>[[\nA<|user|>]]"
    ]
    assert marked(user(), assistant("A"), no_reasoning="train") == [
        "<|user|>\nHi<|assistant|>[[\n<think></think>\nA<|user|>]]"
    ]


def test_tool_calls_end_with_the_observation_marker_and_results_are_not_targets():
    calls = [("weather", {"city": "Rome", "days": 2, "deep": {"é": [True, None]}}), ("now", {})]
    steps = user(), assistant("", "look", calls), tool("sunny"), tool(), assistant("Sunny.")
    # The step without a thought belongs to a reasoned turn: its empty thought is no target, its answer is one.
    assert marked(*steps) == [
        "<|user|>\nHi<|assistant|>[[\n<think>look</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>deep</arg_key>\n"
        '<arg_value>{"é": [true, null]}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call><|observation|>]]\n'
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
        "<|assistant|>\n<think></think>[[\nSunny.<|user|>]]"
    ]


def test_data_that_ends_with_a_call_ends_with_the_observation_marker():
    (text,) = marked(user(), assistant("Wait.", "look", [("now", {})]), tool())
    assert text.endswith("Wait.\n<tool_call>now\n</tool_call><|observation|>]]")
    assert rendered(user(), assistant("", "look", [("now", {})]), tool()).counts == {"trailing messages left out": 1}


def test_tools_are_a_system_turn_of_their_own_before_the_systems():
    (text,) = marked(system(), user(), assistant("A", "b"), tools=[{"name": "é"}, {"name": "<tool_call>"}])
    head, tail = text.split("</tool_call><|system|>\nBe brief.<|user|>")
    assert head.startswith("<|system|>\n# Tools\n\nYou may call") and "[[" not in head
    assert '<tools>\n{"name": "é"}\n{"name": "<tool_call>"}\n</tools>\n\nFor each' in head
    ids = rendered(user(), assistant("A", "b"), tools=[{"name": "<tool_call>"}]).documents[0].ids.tolist()
    # Two tags of the explanation are tokens; the one inside a description is text.
    assert ids.count(TOKENIZER.special["<tool_call>"]) == 1 and ids.count(TOKENIZER.special["<arg_key>"]) == 2


THREE = user("1"), assistant("a", "x"), user("2"), assistant("b"), user("3"), assistant("c", "z")


def test_every_reasoned_turn_is_a_document_in_which_it_keeps_its_reasoning():
    assert marked(*THREE) == [
        "<|user|>\n1<|assistant|>[[\n<think>x</think>\na<|user|>]]",
        "<|user|>\n1/nothink<|assistant|>\n<think></think>\na<|user|>\n2/nothink<|assistant|>\n<think></think>"
        "[[\nb<|user|>]]",
        "<|user|>\n1<|assistant|>\n<think></think>\na<|user|>\n2<|assistant|>\n<think></think>\nb<|user|>\n3"
        "<|assistant|>[[\n<think>z</think>\nc<|user|>]]",
    ]


def test_turns_without_reasoning_share_the_next_document_of_their_mode():
    assert marked(*THREE, no_reasoning="mask") == [
        "<|user|>\n1<|assistant|>[[\n<think>x</think>\na<|user|>]]",
        "<|user|>\n1<|assistant|>\n<think></think>\na<|user|>\n2<|assistant|>\n<think></think>[[\nb<|user|>]]\n3"
        "<|assistant|>[[\n<think>z</think>\nc<|user|>]]",
    ]
    # The empty thought of the first turn was made by the format, that of the second is the data's.
    assert marked(*THREE, no_reasoning="train")[1] == (
        "<|user|>\n1<|assistant|>\n<think></think>\na<|user|>\n2<|assistant|>[[\n<think></think>\nb<|user|>]]\n3"
        "<|assistant|>[[\n<think>z</think>\nc<|user|>]]"
    )


def test_turns_without_reasoning_share_one_document_over_reasoned_ones():
    alternating = [user("0"), assistant("z"), *THREE, user("4"), assistant("d"), user("5"), assistant("e", "y")]
    found = marked(*alternating)
    assert [text.count("[[") for text in found] == [1, 1, 3, 1]
    alone = [marked(*alternating[:end], history="last")[0] for end in (2, 6, 10)]
    shared = found[2].replace("[[", "").replace("]]", "")
    for text in alone:  # each turn is a target behind the tokens that its own document would have
        prompt, target = text.replace("]]", "").split("[[")
        assert shared.startswith(prompt + target) and f"[[{target}]]" in found[2]


def test_steps_of_one_tool_loop_keep_their_reasoning_in_one_document():
    loop = user(), assistant("", "x", [("f", {})]), tool(), assistant("", "y", [("g", {})]), tool(), assistant("a", "z")
    (text,) = marked(*loop)
    assert [f"<think>{thought}</think>" in text for thought in "xyz"] == [True] * 3
    assert [thought in marked(*loop, user(), assistant("b", "w"))[1] for thought in "xyzw"] == [False] * 3 + [True]


def test_history_last_trains_the_last_user_turn_only():
    assert marked(*THREE, history="last") == marked(*THREE)[-1:]
    (text,) = marked(*THREE[2:4], user("3"), assistant("c"), history="last")
    assert text.count("[[") == 1 and text.endswith("[[\nc<|user|>]]")


def test_history_all_trains_the_emptied_turns_but_not_their_empty_thoughts():
    everything = (
        "<|user|>\n1<|assistant|>\n<think></think>[[\na<|user|>]]\n2<|assistant|>{}\nb<|user|>]]\n3"
        "<|assistant|>[[\n<think>z</think>\nc<|user|>]]"
    )
    for no_reasoning in ("nothink", "mask"):
        assert marked(*THREE, history="all", no_reasoning=no_reasoning) == [everything.format("\n<think></think>[[")]
    assert marked(*THREE, history="all", no_reasoning="train") == [everything.format("[[\n<think></think>")]
    # One turn thinks, so the prompts of the document allow it.
    assert "/nothink" not in marked(*THREE[:4], history="all")[0]
    # Nothing is thought anywhere: the mode of the whole document is that of its turns.
    assert "/nothink" in marked(*THREE[2:4], history="all")[0]


def test_turns_of_weight_0_are_no_targets_nor_is_the_marker_behind_them():
    off = user("1"), assistant("a", weight=0), user("2"), assistant("b")
    assert marked(*off) == [
        "<|user|>\n1/nothink<|assistant|>\n<think></think>\na<|user|>\n2/nothink<|assistant|>\n<think></think>"
        "[[\nb<|user|>]]"
    ]
    assert rendered(*off).counts == {"turns of weight 0": 1}
    reasoned = user("1"), assistant("a", "x", loss=False), user("2"), assistant("b", "y")
    assert len(marked(*reasoned)) == 1
    assert rendered(user(), assistant(train=False)) == ([], {"turns of weight 0": 1, "no target": 1})


def test_a_system_marker_behind_a_turn_is_no_stop_token():
    messages = user("1"), assistant("a"), system(), user("2"), assistant("b")
    assert marked(*messages) == [
        "<|user|>\n1/nothink<|assistant|>\n<think></think>[[\na]]<|system|>\nBe brief.<|user|>\n2/nothink"
        "<|assistant|>\n<think></think>[[\nb<|user|>]]"
    ]
    assert rendered(*messages).counts == {"turns without a stop token": 1}
    messages[1]["weight"] = 0
    assert rendered(*messages).counts == {"turns of weight 0": 1}


def test_several_user_messages_are_one_user_turn():
    assert len(marked(user("1"), user("2"), assistant("a", "x"))) == 1
    assert len(marked(user("1"), user("2"), assistant("a", "x"), user("3"), user("4"), assistant("b", "y"))) == 2


@pytest.mark.parametrize("bad", ["".join(TOKENIZER.special), "</arg_value>"])
@pytest.mark.parametrize("where", ["user", "system", "content", "thought", "argument", "key", "name", "result"])
def test_markers_inside_messages_are_text(where, bad):
    bad = f"of {bad} words"
    text = {name: bad if name == where else "x" for name in ("user", "system", "content", "thought", "result")}
    key, value, name = (bad if where == other else "k" for other in ("key", "argument", "name"))
    messages = (
        system(text["system"]), user(text["user"]), assistant(text["content"], text["thought"], [(name, {key: value})]),
        tool(text["result"]), assistant("end"),
    )  # fmt: skip
    ids = rendered(*messages).documents[0].ids
    assert bad in TOKENIZER.decode(ids)
    clean = rendered(system("x"), user("x"), assistant("x", "x", [("k", {"k": "k"})]), tool("x"), assistant("end"))
    counted = {"conversations with markers of the format as text": 1}
    assert rendered(*messages).counts == (
        counted if where in ("user", "system", "content", "thought", "result") else {}
    )
    special = list(TOKENIZER.special.values())
    assert [i for i in ids if i in special] == [i for i in clean.documents[0].ids if i in special]


def ids_of(*parts):
    """Ids of texts and names of special tokens."""
    return [i for part in parts for i in ([TOKENIZER.special[part]] if part in TOKENIZER.special else encoded(part))]


def encoded(text):
    return TOKENIZER.encode(text).tolist()


@pytest.mark.parametrize("thought", ["why", ""])
@pytest.mark.parametrize("name", ["now", ""])
def test_a_document_is_the_prompt_of_generate_and_what_is_sampled_behind_it(thought, name):
    prompt = chat_prompt(TOKENIZER, [Message("system", "Be."), Message("user", "Hi")], thinking=bool(thought))
    sampled = ids_of("\n", "<think>", thought, "</think>") if thought else []
    if name:
        sampled += ids_of("\nHello\n", "<tool_call>", "now\n", "</tool_call>", "<|observation|>")
    else:
        sampled += ids_of("\nHello", "<|user|>")
    answer = assistant("Hello", thought, [(name, {})] if name else [])
    ((ids, is_target),) = rendered(system("Be."), user(), answer).documents
    assert ids.tolist() == prompt + sampled
    assert is_target.tolist() == [False] * len(prompt) + [True] * len(sampled)


def test_a_tokenizer_without_the_markers_is_refused():
    special = {name: i for name, i in TOKENIZER.special.items() if name not in ("<tool_call>", "/nothink")}
    poor = Tokenizer("poor.json", TOKENIZER.pattern, TOKENIZER.ranks, special)
    with pytest.raises(UserError, match="poor.json.*/nothink, <tool_call>.*tokenizer of a GLM"):
        chat_prompt(poor, [Message("user", "Hi")], thinking=True)


NOW = "<tool_call>now\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("\n42", "42", 0),
        ("\n<think>why</think>\n42", "42", 0),
        ("\n<think>first</think>wrong</think>42", "42", 0),
        ("\n<think>a</think>b<think>c</think>d", "d", 0),
        ("\n<think>a</think></think>d", "d", 0),
        ("a</think>42", "42", 0),
        (f"\n<think>a</think>b{NOW}</think>{NOW}", "", 1),
        (f"\n<think>a</think>{NOW}<think>b</think>c", "c", 0),
    ],
)
def test_programs_and_rewards_read_the_same_answer(text, content, calls):
    reader = TurnReader(TOKENIZER)
    for token in TOKENIZER.encode_with_special(text).tolist():
        reader.read(token)
    assert not reader.in_thought
    message = reader.end()[1]
    assert (message.content, len(message.tool_calls)) == (content, calls)
    answer = Answer("6 * 7?", text, "42", True, 9, True)
    assert answer.result == content and answer.spoken.count("<tool_call>") == calls
    if content == "42":
        assert exact(answer, {}) == 1.0 and maths(answer, {}) == 1.0


@pytest.mark.parametrize("text", ["\n<think>42", "\n<think>a</think>b<think>42"])
def test_an_open_thought_is_no_answer(text):
    reader = TurnReader(TOKENIZER)
    for token in TOKENIZER.encode_with_special(text).tolist():
        reader.read(token)
    answer = Answer("6 * 7?", text, "42", True, 9, True)
    assert reader.in_thought and reader.end()[1].content == answer.result == "" and exact(answer, {}) == 0.0
