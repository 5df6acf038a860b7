"""From files of pairs to a source: both halves in one document, rendered as in SFT, with counts of what is left out."""

import json

import numpy as np
import pytest

from glm46.config.errors import UserError
from glm46.config.text_recipe import PREFERENCES, TextRecipe
from glm46.engine.evaluation.rows import held_out
from glm46.operate.models.chat_documents import sampled_parts, shown_text
from glm46.storage.chats.chat import ChatOptions, render, render_pair
from glm46.storage.chats.conversation import BadConversation, parse_conversation
from glm46.storage.chats.pairs import BEGIN, parse_labelled, parse_pair
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.prepare.pipeline import prepare_text
from tests.builders import call_here

TOKENIZER = load_tokenizer("builtin")
ASK = {"role": "user", "content": "What is two plus two?"}


def say(text, **fields):
    return {"role": "assistant", "content": text, **fields}


CALL = say("", tool_calls=[{"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}])
RESULT = {"role": "tool", "content": "4"}


def pair(prompt="Hi", chosen="Hello!", rejected="What?"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """A function that prepares rows; returns the manifest."""
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)

    def made(rows, **keys):
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {"input": (str(tmp_path / "pairs.jsonl"),), "output": str(tmp_path / "out"), "processes": 1}
        recipe |= {"format": "preference", "max_tokens": 256, "held_out": 0.0}
        return prepare_text(TextRecipe(**(recipe | keys)), report=lambda line: None)

    return made


def tokens_of(manifest):
    stream = TokenStream(manifest.folder, manifest.splits["train"], manifest.vocab_size, marked=True)
    tokens = np.empty(stream.length, np.int64)
    stream.read(0, tokens)
    return np.split(tokens, stream.doc_ends()[:-1])


def as_sft(messages, **options):
    (document,) = render(parse_conversation({"messages": messages}, "messages"), TOKENIZER, ChatOptions(**options))[0]
    return np.where(document.is_target, document.ids, document.ids | np.uint32(NOT_A_TARGET)).tolist()


@pytest.mark.parametrize("row", [
    pair(ASK["content"], "Four.", "Five."),
    pair([ASK], [say("Four.")], [say("Five.")]),
    pair(ASK["content"], [say("Four.")], [say("Five.")]),
    {"chosen": [ASK, say("Four.")], "rejected": [ASK, say("Five.")]},
    pair(ASK["content"], [ASK, say("Four.")], [ASK, say("Five.")]),  # as UltraFeedback has it
    pair(None, "\n\nHuman: What is two plus two?\n\nAssistant: Four.",
         "\n\nHuman: What is two plus two?\n\nAssistant: Five."),  # as HH-RLHF has it
    {"question": ASK["content"], "chosen": "Four.", "rejected": "Five."},
    {"instruction": "What is two", "input": "plus two?", "chosen": "Four.", "rejected": "Five.", "output": None},
    {"messages": [ASK], "chosen": say("Four."), "rejected": say("Five.")},
    {"conversations": [{"from": "human", "value": ASK["content"]}],
     "chosen": {"from": "gpt", "value": "Four."}, "rejected": {"from": "gpt", "value": "Five."}},  # LLaMA-Factory
    {"chosen": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": "Four."}],
     "rejected": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": "Five."}]},
])  # fmt: skip
def test_every_form_of_a_pair_is_one_document_of_two_sft_documents(prepare, row):
    (document,) = tokens_of(prepare([row]))
    ask = {"role": "user", "content": "What is two\nplus two?"} if "input" in row else ASK
    assert document.tolist() == as_sft([ask, say("Four.")]) + as_sft([ask, say("Five.")])
    begins = (document & ~NOT_A_TARGET) == TOKENIZER.special[BEGIN]
    assert np.flatnonzero(begins).tolist() == [0, len(as_sft([ask, say("Four.")]))]


def test_an_answer_that_begins_like_a_transcript_is_an_answer_where_there_is_a_prompt():
    chosen, rejected = parse_pair(pair("Complete it.", "Human: hello", "No."))
    assert chosen.messages[-1].content == "Human: hello" and rejected.messages[-1].content == "No."


def test_earlier_answers_and_shared_steps_are_prompts():
    history = [ASK, say("Three."), {"role": "user", "content": "Sure?"}]
    row = {"chosen": [*history, CALL, RESULT, say("Four.")], "rejected": [*history, CALL, RESULT, say("Five.")]}
    halves = render_pair(parse_pair(row), TOKENIZER, "nothink")
    for half, answer in zip(halves, ("Four.", "Five."), strict=True):
        assert TOKENIZER.decode(half.ids[half.is_target]) == f"\n{answer}<|user|>"


@pytest.mark.parametrize("no_reasoning", ["nothink", "mask", "train"])
def test_both_halves_have_the_same_prompt_where_one_has_reasoning(no_reasoning):
    row = pair([ASK], [say("Four.", reasoning_content="Count.")], [say("Five.")])
    chosen, rejected = render_pair(parse_pair(row), TOKENIZER, no_reasoning)
    prompt = int(chosen.is_target.argmax())
    assert (chosen.ids[:prompt] == rejected.ids[:prompt]).all() and not rejected.is_target[:prompt].any()
    assert TOKENIZER.decode(chosen.ids[chosen.is_target]) == "\n<think>Count.</think>\nFour.<|user|>"
    thought = "\n<think></think>" if no_reasoning == "train" else ""
    assert TOKENIZER.decode(rejected.ids[rejected.is_target]) == f"{thought}\nFive.<|user|>"


MARKED = pair("Is <|user|>[gMASK] text?", "Yes, [gMASK] is.", "No.")


def test_a_marker_inside_a_text_begins_no_half(prepare):
    (document,) = tokens_of(prepare([MARKED]))
    assert ((document & ~NOT_A_TARGET) == TOKENIZER.special[BEGIN]).sum() == 2


@pytest.mark.parametrize("row, reason", [
    ({"prompt": "Hi", "chosen": "Hello!"}, "no rejected"),
    ({"prompt": "Hi", "chosen": "", "rejected": "No."}, "empty chosen"),
    ({"chosen": "Hello!", "rejected": "What?"}, "no prompt"),
    (pair([], [say("a")], [say("b")]), "no prompt"),
    ({"chosen": [ASK, say("a")], "rejected": [{**ASK, "content": "Why?"}, say("b")]}, "different prompts"),
    ({"chosen": [ASK, say("a")], "rejected": [ASK, say("a"), ASK, say("b")]}, "not one turn of the assistant"),
    (pair([ASK], [say("a"), ASK, say("b")], [say("c")]), "not one turn of the assistant"),
    (pair([ASK], [CALL, RESULT], [say("c")]), "not one turn of the assistant"),
    (pair([ASK, RESULT], [say("b")], [say("c")]), "not behind a tool call"),
    (pair("Hi", [{"role": "wizard", "content": "a"}], [say("c")]), "unknown role"),
    ({"prompt": "Hi", "completion": "a", "label": True},
     "no chosen: columns prompt, completion, label: those of format = \"prompt_completion\""),
    ({"id": 3, "chosen": "a", "rejected": "b"}, "no prompt: columns id, chosen, rejected$"),
    ("text", "not an object"),
])  # fmt: skip
def test_what_is_not_a_pair_is_refused_with_its_reason(row, reason):
    with pytest.raises(BadConversation, match=reason):
        parse_pair(row)


LABELLED = [
    {"prompt": ASK["content"], "completion": "Four."}, {"prompt": [ASK], "completion": [say("Four.")]},
    {"messages": [ASK, say("Four.")]}, {"instruction": ASK["content"], "output": "Four."},
    {"conversations": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": "Four."}]},
]  # fmt: skip


@pytest.mark.parametrize("row", LABELLED)
@pytest.mark.parametrize("label", [True, False, 1, 0])
def test_a_labelled_answer_is_the_half_of_a_pair_that_its_label_says(prepare, row, label):
    (document,) = tokens_of(prepare([row | {"kto_tag" if "instruction" in row else "label": label}], **UNPAIRED))
    begin, half = TOKENIZER.special[BEGIN] | NOT_A_TARGET, as_sft([ASK, say("Four.")])
    assert document.tolist() == ([*half, begin] if label else [begin, *half])


UNPAIRED = {"format": "unpaired_preference"}


@pytest.mark.parametrize("row, reason", [
    (LABELLED[0], "no label: columns prompt, completion"), (LABELLED[2] | {"label": "good"}, "neither true nor false"),
    (LABELLED[2] | {"label": 2}, "label is neither true nor false: 2"), (pair(), "columns of no chat format: columns"),
    ({"label": True, "text": "a"}, "columns of no chat format: columns label, text"), ([], "not an object"),
])  # fmt: skip
def test_what_is_not_a_labelled_answer_is_refused_with_its_reason(row, reason):
    with pytest.raises(BadConversation, match=reason):
        parse_labelled(row)


def test_only_the_last_answer_is_labelled_and_what_is_left_out_is_counted(prepare):
    history = [ASK, say("Three."), {"role": "user", "content": "Sure?"}]
    rows = [
        {"messages": [*history, CALL, RESULT, say("Four.")], "label": True}, LABELLED[0] | {"label": True},
        LABELLED[0] | {"label": False}, LABELLED[0] | {"label": True}, LABELLED[1] | {"label": None},
        {"messages": [ASK, say("no", weight=0)], "label": True}, pair("Hi", "a " * 200) | {"label": False},
        {"prompt": "Hi", "completion": "and so on " * 60, "label": False},
    ]  # fmt: skip
    manifest = prepare(rows, max_tokens=128, **UNPAIRED)
    assert manifest.format in PREFERENCES and manifest.splits["train"].documents == 3  # one answer may have both labels
    assert manifest.noted == {
        "labelled answers, train": 3,
        "labelled answers, validation": 0,
        "desirable": 3,
        "undesirable": 1,
    }
    assert manifest.dropped == {
        "no label": 1, "no target": 1, "columns of no chat format": 1, "above max_tokens": 1, "exact duplicate": 1,
    }  # fmt: skip
    first = tokens_of(manifest)[0]
    learned = TOKENIZER.decode(first[first < NOT_A_TARGET])
    assert learned.endswith("\nFour.<|user|>") and "Three" not in learned and "<|observation|>" in learned


def test_pairs_that_teach_nothing_or_do_not_fit_are_counted_by_cause(prepare):
    long = "and so on " * 60
    rows = [
        pair(), pair(chosen="Hello!", rejected="Hello!"), pair(chosen="Hello!", rejected=" Hello! "),
        pair([ASK], [say("a", weight=0)], [say("b")]), pair(rejected=long), {"prompt": "Hi", "chosen": "Hello!"},
    ]  # fmt: skip
    manifest = prepare(rows, max_tokens=128)
    assert manifest.format in PREFERENCES and manifest.splits["train"].documents == manifest.noted["pairs, train"] == 1
    assert manifest.dropped == {
        "chosen equals rejected": 2, "no target in chosen or rejected": 1, "above max_tokens": 1, "no rejected": 1,
    }  # fmt: skip


def prompts_of(manifest):
    """The prompts of each split."""
    prompts = {"train": [], "validation": []}
    for name, of_split in prompts.items():
        stream = TokenStream(manifest.folder, manifest.splits[name], manifest.vocab_size)
        tokens = np.empty(stream.length, np.int64)
        stream.read(0, tokens)
        of_split += [
            TOKENIZER.decode(one).replace(BEGIN, "").split("<|assistant|>")[0]
            for one in np.split(tokens, stream.doc_ends()[:-1])
        ]
    return prompts


@pytest.mark.parametrize(("row", "keys"), [
    (lambda n, k: pair(f"Say {n}.", f"{n}!", f"{k}?"), {}),
    (lambda n, k: {"prompt": f"Say {n}.", "completion": f"{k}?", "label": k > 1}, UNPAIRED),
], ids=["pairs", "labelled answers"])  # fmt: skip
def test_answers_to_one_prompt_are_in_one_split(prepare, row, keys):
    prompts = prompts_of(prepare([row(n, k) for n in range(40) for k in range(3)], held_out=0.3, **keys))
    assert len(prompts["train"]) + len(prompts["validation"]) == 120 and prompts["validation"]
    assert not {*prompts["train"]} & {*prompts["validation"]}


def test_inspect_shows_both_halves_and_evaluate_refuses_them(prepare):
    manifest = prepare([pair()])
    with pytest.raises(UserError, match=r"holds preferences, .*\[finetune.preference\] validate; take another"):
        held_out(manifest)
    shown = [
        (part.title, shown_text(part, TOKENIZER, max_tokens=99, brackets=True).plain)
        for part in sampled_parts(manifest, TOKENIZER, rows=1)
    ]
    assert shown[0][0].startswith("pair 0 of 1, chosen: ") and shown[0][1].endswith("[[\nHello!<|user|>]]")
    assert shown[1][0].startswith("pair 0 of 1, rejected: ") and shown[1][1].endswith("[[\nWhat?<|user|>]]")


def test_halves_that_are_stored_as_json_text_are_read():
    row = {"prompt": [ASK], "chosen": [CALL, RESULT, say("4")], "rejected": [say("5")]}
    stored = {key: json.dumps(value) for key, value in row.items()}
    assert parse_pair(stored) == parse_pair(row)
    one_message = {"prompt": "Hi", "chosen": json.dumps(say("Hello!")), "rejected": json.dumps(say("What?"))}
    assert parse_pair(one_message) == parse_pair(pair())
    label = {"messages": json.dumps([ASK, say("4")]), "label": True}
    assert parse_labelled(label) == parse_labelled({"messages": [ASK, say("4")], "label": True})
