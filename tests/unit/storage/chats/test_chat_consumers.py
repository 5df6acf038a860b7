"""One parser and one format: whoever reads a conversation gives the same tokens, those of GLM-4.5's own template."""

import base64
import datetime
import decimal
import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.config.rl import RLConfig
from glm46.config.rl_data import PromptsConfig
from glm46.config.rollout import RolloutConfig
from glm46.config.text_recipe import TextRecipe
from glm46.operate.models import generate_prompts
from glm46.storage.chats.chat import ChatOptions, chat_prompt, render
from glm46.storage.chats.chat_format import GLM_45, GLM_47
from glm46.storage.chats.chat_template import chat_template, rendered
from glm46.storage.chats.conversation import BadConversation, Conversation, parse_prompt, parse_tools
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.prepare.pipeline import prepare_text
from glm46.storage.prepare.readers import file_rows
from glm46.storage.prepare.rows import Fields, read_row
from glm46.tasks.rl.conversations import Conversations
from glm46.tasks.rl.prompts import Prompt, read_prompts
from glm46.tasks.rl.rewards.answer import Answer, RewardRule, well_formed
from glm46.tasks.rl.rewards.function_pool import FunctionPool
from glm46.tasks.rl.rollout.records import Completion, SamplingRules
from glm46.tasks.rl.sampling import Sampler
from tests.builders import call_here
from tests.unit.commands.test_terminal_chat import talk
from tests.unit.storage.chats import original_templates
from tests.unit.storage.chats.samples import CONVERSATIONS, RESULTS, STEP, TOOLS, calls, user
from tests.unit.tasks.rl.samples import InRounds

TOKENIZER = load_tokenizer("builtin")


ANSWER = {"role": "assistant", "content": "Sunny.", "reasoning_content": "so"}
REJECTED = ANSWER | {"content": "No."}


def as_text(value):
    """The same conversation with arguments as JSON text."""
    for message in value:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return value


def as_parts(messages):
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        elif message["content"]:  # the results of a tool: a column has one type
            message["content"] = [one if isinstance(one, dict) else {"output": one} for one in message["content"]]
    return messages


def with_thoughts_in_content(messages):
    for message in messages:
        if thought := message.pop("reasoning_content", None):
            message["content"] = f"<think>{thought}</think>{message['content'] or ''}"
    return messages


def as_lists(messages):
    for message in messages:
        content = message["content"]
        message["content"] = [content] if isinstance(content, str) else content and [
            one if isinstance(one, str) else one["output"] for one in content
        ]  # fmt: skip
    return messages


def as_texts(messages):
    """A message for each result of a tool, so that each content is text, and a single call without a function."""
    made = []
    for message in messages:
        content, called = message["content"], message.get("tool_calls")
        if called and len(called) == 1:
            message["tool_calls"] = [called[0]["function"]]
        results = content if isinstance(content, list) else [content]
        made += [{**message, "content": one["output"] if isinstance(one, dict) else one} for one in results]
    return made


def retyped(type_, *, text=None, to_list=None, more=()):
    """A type of Arrow with other texts and lists, and with more fields in each message."""
    import pyarrow
    from pyarrow import types

    again = {"text": text, "to_list": to_list, "more": more}
    if types.is_struct(type_):
        fields = [(field.name, retyped(field.type, **again)) for field in type_]
        return pyarrow.struct([*fields, *(more if any(name == "role" for name, _ in fields) else ())])
    if types.is_list(type_):
        return (to_list or pyarrow.list_)(retyped(type_.value_type, **again))
    return text if text and types.is_string(type_) else type_


def absent(pyarrow):
    """Fields of a message that other rows of a data set have."""
    call = pyarrow.struct([("name", pyarrow.string()), ("arguments", pyarrow.string())])
    return {"more": [("weight", pyarrow.float64()), ("function_call", call), ("loss", pyarrow.null())]}


JSON_FORMS = {
    "jsonl": lambda messages: messages, "json text": as_text, "parts": as_parts, "thoughts": with_thoughts_in_content
}  # fmt: skip
PARQUET_FORMS = {
    "as written": (as_lists, lambda arrow: {}),
    "thoughts in content": (lambda messages: with_thoughts_in_content(as_texts(messages)), lambda arrow: {}),
    "arguments as text": (lambda messages: as_texts(as_text(messages)), lambda arrow: {}),
    "absent fields of parts": (as_parts, absent),
    "absent fields": (as_texts, absent),
    "large": (as_texts, lambda arrow: {"text": arrow.large_string(), "to_list": arrow.large_list}),
    "views": (as_texts, lambda arrow: {"text": arrow.string_view(), "to_list": arrow.list_view}),
    "large views": (as_parts, lambda arrow: {"to_list": arrow.large_list_view}),
    "dictionary": (as_texts, lambda arrow: {"text": arrow.dictionary(arrow.int32(), arrow.string())}),
}  # fmt: skip
"""Of each: what the messages become, and the types of Arrow that the writer states."""


def write_parquet(file, rows, options_of):
    """Write rows as another program would: values of plain types, beside the types of its own schema. Pyarrow does not
    write each type that it reads."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    options = options_of(pyarrow)
    written = pyarrow.Table.from_pylist(rows)
    written = pyarrow.Table.from_pylist(
        rows, pyarrow.schema([(one.name, retyped(one.type, more=options.get("more", ()))) for one in written.schema])
    )
    stated = pyarrow.schema([(one.name, retyped(one.type, **{**options, "more": ()})) for one in written.schema])
    with parquet.ParquetWriter(file, written.schema, store_schema=False) as writer:
        writer.write_table(written)
        writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(stated.serialize().to_pybytes()).decode()})
    assert parquet.read_schema(file).types == stated.types


@pytest.fixture(scope="module", params=[*JSON_FORMS, *PARQUET_FORMS])
def rows(request, tmp_path_factory):
    """A file of the conversations, with an answer and a worse one."""
    form, options = PARQUET_FORMS.get(request.param, (JSON_FORMS.get(request.param), None))
    made = []
    for messages, tools in CONVERSATIONS:
        prompt, good, bad = (form(json.loads(json.dumps(one))) for one in (messages, [ANSWER], [REJECTED]))
        made.append({"prompt": prompt, "messages": prompt + good, "completion": good, "chosen": good, "rejected": bad})
        made[-1]["tools"] = json.dumps(tools) if request.param == "json text" else tools
    file = tmp_path_factory.mktemp("rows") / f"rows.{'parquet' if options else 'jsonl'}"
    if options:
        write_parquet(file, made, options)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


def template_tokens(template):
    """The prompts that a template writes for the samples."""
    prompts = [
        rendered(template, messages, tools, {}) for messages, tools in original_templates.plain_samples("GLM-4.5")
    ]
    return [TOKENIZER.encode_with_special(prompt).tolist() for prompt in prompts]


WANTED = template_tokens(chat_template(GLM_45))


def test_the_prompts_are_those_of_the_original_template():
    originals = original_templates.stored()["GLM-4.5"]["samples"]
    assert [TOKENIZER.encode_with_special(prompt).tolist() for prompt in originals] == WANTED


def sampled(answer="Sunny."):
    """What a model samples behind each prompt."""
    return TOKENIZER.encode_with_special(f"\n<think>so</think>\n{answer}<|user|>").tolist()


def documents(file, format, folder):
    """The documents that `prepare` writes, without the marks of targets."""
    recipe = {"input": (str(file),), "output": str(folder / format), "processes": 1, "held_out": 0.0}
    recipe |= {"format": format, "max_tokens": 10_000}
    recipe |= {} if format == "preference" else {"history": "last"}
    manifest = prepare_text(TextRecipe(**recipe), report=lambda line: None)
    stream = TokenStream(manifest.folder, manifest.splits["train"], manifest.vocab_size, marked=True)
    tokens = np.empty(stream.length, np.int64)
    stream.read(0, tokens)
    return [one & ~NOT_A_TARGET for one in np.split(tokens, stream.doc_ends()[:-1])]


@pytest.mark.parametrize("format", ["messages", "prompt_completion", "preference"])
def test_documents_of_sft_and_of_pairs(rows, format, tmp_path, monkeypatch):
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
    halves = [sampled(), sampled("No.")] if format == "preference" else [sampled()]
    wanted = [[token for half in halves for token in prompt + half] for prompt in WANTED]
    assert sorted(one.tolist() for one in documents(rows, format, tmp_path)) == sorted(wanted)


def test_prompts_of_rl(rows):
    keys = PromptsConfig(file=str(rows), thinking=True)
    found = read_prompts(rows, keys, TOKENIZER, most_tokens=10_000, needs_label=False)
    assert [prompt.tokens for prompt in found] == WANTED


def parsed(rows):
    """Messages and tools of each conversation, with its tokens. Who types or samples gives no files of messages."""
    for (_, row), wanted in zip(file_rows(rows, "prompt"), WANTED, strict=True):
        tools = parse_tools(row.get("tools"))
        yield parse_prompt(row["prompt"], tools), tools, wanted


def turn_of(messages, tools):
    """The last message as a model samples it, with the stop token: the last target of fine-tuning."""
    options = ChatOptions(history="last", no_reasoning="train")
    ids, is_target = render(Conversation(tuple(messages), tools), TOKENIZER, options).documents[-1]
    return ids[np.flatnonzero(~is_target)[-1] + 1 :].tolist()


def roles_of(messages):
    return [message.role for message in messages]


def test_prompts_of_generate(rows):
    seen, shape = 0, SimpleNamespace(max_position_embeddings=10_000, num_nextn_predict_layers=0)
    for messages, tools, wanted in parsed(rows):
        if roles_of(messages) not in (["user"], ["system", "user"]):
            continue
        system = messages[0].content if len(messages) > 1 else None
        given = Namespace(chat=True, prompt=[messages[-1].content], system=system, tools=tools, thinking=True)
        given.keep_thoughts, given.speculative, given.max_new_tokens, given.stop_token = False, False, 8, []
        given.reasoning_effort = None
        assert generate_prompts.read_prompts(given, TOKENIZER, shape)[0] == [wanted]
        seen += 1
    assert seen == 2


def test_prompts_of_a_chat_in_the_terminal(rows, monkeypatch):
    seen = 0
    for messages, tools, wanted in parsed(rows):
        rest = messages[messages[0].role == "system" :]
        if "system" in roles_of(rest):
            continue
        typed = [one.content for one in rest if one.role != "assistant"]
        turns = [turn_of(messages[: n + 1], tools) for n, one in enumerate(messages) if one.role == "assistant"]
        system = messages[0].content if messages[0].role == "system" else None
        written = [(turn, "stop") for turn in (*turns, sampled())]
        asked = talk(typed, written, monkeypatch, system=system, tools=tools, thinks=True)
        assert asked[-1] == wanted
        seen += 1
    assert seen == 10


class Scripted(InRounds):
    """An engine that gives one turn for each request, and what it was asked."""

    def __init__(self, turns):
        self._turns, self.asked = iter(turns), []

    def generate(self, requests, rules):
        self.asked += requests
        turn = next(self._turns)
        return [Completion(turn, [0.0] * len(turn), "stop", [7] * len(turn), None, (), 0, 0) for _ in requests]


def converse(tokenizer, engine, rules, prompt, reply, thinking=True):
    """Sample one conversation for a prompt, whose replies a function gives."""
    config = RLConfig.model_validate({
        "prompts_per_rollout": 1, "group_size": 1, "prompts": {"file": "p.jsonl", "thinking": thinking},
        "rewards": [{"name": "exact"}],
        "environment": {"function": "a:b", "max_turns": 9},
    }).resolved()  # fmt: skip
    section, scorer = RolloutConfig.model_validate({"max_new_tokens": 5000}), FunctionPool([RewardRule("exact")])
    pool = SimpleNamespace(reply=reply, close=lambda: None)
    environment = Conversations(pool, tokenizer, rules.stop, thinking, 9, ThreadPoolExecutor(1))
    Sampler(config, section, tokenizer, engine, [], rules, 0, scorer, environment).generate({0: prompt}, rules)


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_requests_of_a_conversation_with_an_environment(rows, one_rank):
    """A reply is one message, and what was sampled stays: a thought too, which the template removes from old turns."""
    seen = 0
    for messages, tools, wanted in parsed(rows):
        roles = roles_of(messages)
        last_user = len(roles) - 1 - roles[::-1].index("user")
        first = last_user if any(one.reasoning for one in messages[:last_user]) else 0
        start = roles.index("assistant", first) if "assistant" in roles[first:] else len(roles)
        if {*roles[start::2]} != {"assistant"} or {*roles[start + 1 :: 2]} & {"assistant", "system"}:
            continue
        turns = [turn_of(messages[: n + 1], tools) for n in range(start, len(messages), 2)]
        replies = iter([one.content for one in messages[start + 1 :: 2]] + [None])
        engine, rules = Scripted([*turns, sampled()]), SamplingRules(1.0, frozenset(), TOKENIZER.vocab_size)
        prompt = Prompt(chat_prompt(TOKENIZER, messages[:start], tools=tools, thinking=True), "?", None)
        converse(TOKENIZER, engine, rules, prompt, lambda answer, replies=replies: (next(replies), ""))
        assert engine.asked[-1].prompt == wanted and len(engine.asked) == len(turns) + 1
        seen += 1
    assert seen == 5


def test_messages_of_evaluation(rows):
    pytest.importorskip("lm_eval", reason="not installed; pip install '.[eval]'")
    from glm46.engine.evaluation.lm_eval_model import LmEvalModel

    model, seen = LmEvalModel(None, TOKENIZER, 10_000, thinking=True), 0
    for (_, row), wanted in zip(file_rows(rows, "prompt"), WANTED, strict=True):
        if not parse_tools(row.get("tools")):
            assert model.tok_encode(model.apply_chat_template(row["prompt"])) == wanted
            seen += 1
    assert seen == 6


REFUSED = {
    "tool call as text": [user(), {"role": "assistant", "content": '{"name": "now", "arguments": {}}'}, user()],
    "unknown role": [{"role": "critic", "content": "x"}, user()],
    "tool message not behind a tool call": [user(), STEP, {"role": "tool", "content": ["rain", "noon"]}],
    "content is neither text nor a list of text": [user(), STEP, {"role": "tool", "content": {"output": "rain"}}],
    "assistant with neither content nor call": [user(), {"role": "assistant", "content": ""}, user()],
    "message is not an object": [None, user()],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_every_reader_refuses_the_same_for_the_same_reason(reason, tmp_path):
    messages = REFUSED[reason]
    rows = {
        "messages": {"messages": [*messages, ANSWER]},
        "prompt_completion": {"prompt": messages, "completion": [ANSWER]},
        "preference": {"prompt": messages, "chosen": [ANSWER], "rejected": [ANSWER | {"content": "No."}]},
    }
    for format, row in rows.items():
        assert read_row(row | {"tools": TOOLS}, "", Fields("", None, format)).args[0] == reason
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": messages, "tools": TOOLS}))
    with pytest.raises(UserError, match=f"rl.prompts.prompt_key.: {reason}"):
        keys = PromptsConfig(file=str(tmp_path / "rows.jsonl"))
        read_prompts(tmp_path / "rows.jsonl", keys, TOKENIZER, most_tokens=10_000, needs_label=False)
    with pytest.raises(BadConversation, match=reason):
        parse_prompt(messages, parse_tools(TOOLS))


def test_nulls_that_are_stated_stay_and_those_of_arrow_go(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def prompt_of(file):
        keys = PromptsConfig(file=str(file), thinking=True)
        found = read_prompts(file, keys, TOKENIZER, most_tokens=10_000, needs_label=False)
        return TOKENIZER.decode(found[0].tokens)

    stated = {"zone": None, "of": [None, "x"]}
    step = STEP | {"tool_calls": calls(("now", stated))}
    row = {"prompt": [user(), step, RESULTS[0]]}
    other = {"prompt": [user(), STEP | {"tool_calls": calls(("weather", {"city": "Rome"}))}, RESULTS[0]]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    kept = "<arg_key>zone</arg_key>\n<arg_value>null</arg_value>"
    assert kept in prompt_of(tmp_path / "rows.jsonl")
    parquet.write_table(pyarrow.Table.from_pylist([row, other]), tmp_path / "rows.parquet")
    aligned = prompt_of(tmp_path / "rows.parquet")
    assert "city" not in aligned and "zone" not in aligned and '[null, "x"]' in aligned
    table = pyarrow.Table.from_pylist(
        [{"prompt": as_text(json.loads(json.dumps(one["prompt"])))} for one in (row, other)]
    )
    parquet.write_table(table, tmp_path / "text.parquet")
    assert kept in prompt_of(tmp_path / "text.parquet")
    # The keys of a map are those of its row, so its nulls are stated.
    mapped = pyarrow.struct({"name": pyarrow.string(), "arguments": pyarrow.map_(pyarrow.string(), pyarrow.string())})
    message = pyarrow.struct({
        "role": pyarrow.string(), "content": pyarrow.string(), "tool_calls": pyarrow.list_(mapped)
    })  # fmt: skip
    called = {"role": "assistant", "tool_calls": [{"name": "now", "arguments": [("zone", None)]}]}
    table = pyarrow.table({"prompt": pyarrow.array([[user(), called, RESULTS[0]]], pyarrow.list_(message))})
    parquet.write_table(table, tmp_path / "map.parquet")
    assert kept in prompt_of(tmp_path / "map.parquet")


def test_nulls_of_extension_types_and_values_that_json_lacks(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    class Message(pyarrow.ExtensionType):
        def __init__(self):
            super().__init__(pyarrow.struct([("role", pyarrow.string()), ("text", pyarrow.string())]), "tests.message")

        def __arrow_ext_serialize__(self):
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage, serialized):
            return cls()

    pyarrow.register_extension_type(Message())
    try:
        stored = pyarrow.array([{"role": "user", "text": None}], Message().storage_type)
        parquet.write_table(
            pyarrow.table({"m": pyarrow.ExtensionArray.from_storage(Message(), stored)}), tmp_path / "extension.parquet"
        )
        assert [row for _, row in file_rows(tmp_path / "extension.parquet", "m")] == [{"m": {"role": "user"}}]
    finally:
        pyarrow.unregister_extension_type("tests.message")

    for number, value in enumerate((datetime.date(2026, 1, 1), b"x", decimal.Decimal("1.5"))):
        prompt = [user(), STEP | {"tool_calls": calls(("now", {"zone": value}))}, RESULTS[0]]
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{"prompt": prompt, "messages": [*prompt, ANSWER]}]), file)
        ((_, row),) = file_rows(file, "prompt")
        reason = "arguments are not JSON"
        assert read_row(row, "", Fields("", None, "messages")).args[0] == reason
        with pytest.raises(UserError, match=f"row 0: 'prompt' .*{reason}"):
            read_prompts(file, PromptsConfig(file=str(file)), TOKENIZER, most_tokens=10_000, needs_label=False)


OF_47 = load_tokenizer("builtin", "GLM-4.7")
"""The tokenizer of a model whose prompts open the thought."""


def text_of_47(messages, tools, **options):
    plain = [{**one, "role": one["role"].replace("developer", "system")} for one in messages]
    return rendered(chat_template(GLM_47), plain, tools or (), options)


@pytest.mark.parametrize("thinking", [True, False])
def test_prompts_of_rl_and_of_evaluation_in_the_format_of_glm_47(thinking, tmp_path):
    pytest.importorskip("lm_eval", reason="not installed; pip install '.[eval]'")
    from glm46.engine.evaluation.lm_eval_model import LmEvalModel

    file, options = tmp_path / "rows.jsonl", {} if thinking else {"enable_thinking": False}
    rows = [{"prompt": messages, "tools": tools} for messages, tools in CONVERSATIONS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = PromptsConfig(file=str(file), thinking=thinking)
    found = read_prompts(file, keys, OF_47, most_tokens=10_000, needs_label=False)
    wanted = [text_of_47(*row, **options) for row in CONVERSATIONS]
    assert [OF_47.decode(prompt.tokens) for prompt in found] == wanted
    model = LmEvalModel(None, OF_47, 10_000, thinking=thinking)
    assert [model.apply_chat_template(m) for m, tools in CONVERSATIONS if not tools] == [
        text for text, (_, tools) in zip(wanted, CONVERSATIONS, strict=True) if not tools
    ]
    # A begun answer stands behind an ended thought, as the template writes it.
    begun = model.apply_chat_template(
        [user("Hi"), {"role": "assistant", "content": " A "}], add_generation_prompt=False
    )
    assert begun == "[gMASK]<sop><|user|>Hi<|assistant|></think>A"


def test_a_chat_in_the_terminal_in_the_format_of_glm_47(monkeypatch, capsys):
    """Two turns, with a thought and with one that the model ends at once; and a chat without thinking."""
    texts = ("why</think>Hello<|user|>", "</think>B<|user|>", "C<|user|>")
    turns = [(OF_47.encode_with_special(text).tolist(), "stop") for text in texts]
    prompts = talk(["Hi", "And?"], turns[:2], monkeypatch, OF_47, thinks=True)
    prompts += talk(["No?"], turns[2:], monkeypatch, OF_47)
    first = "[gMASK]<sop><|user|>Hi<|assistant|>"
    second = f"{first}</think>Hello<|user|>And?<|assistant|>"
    expected = [f"{first}<think>", f"{second}<think>", "[gMASK]<sop><|user|>No?<|assistant|></think>"]
    assert [OF_47.decode(prompt) for prompt in prompts] == expected
    assert capsys.readouterr().out == "why\nHello\nB\nC\n"


@pytest.mark.parametrize("thinking", [True, False])
def test_a_conversation_of_rl_goes_on_behind_what_was_sampled(thinking, one_rank):
    """An ended thought without text stays ``<think></think>``, which the template would write ``</think>``. Rewards
    read whole turns, with the tag that the prompt holds."""
    texts = ["</think>A<|user|>", "why</think>B<|user|>"] if thinking else ["A<|user|>", "B<|user|>"]
    engine = Scripted([OF_47.encode_with_special(text).tolist() for text in texts])
    replies, seen = iter(["And?", None]), []

    def reply(answer):
        seen.append(answer)
        return next(replies), ""

    rules = SamplingRules(1.0, frozenset({OF_47.special["<|user|>"]}), OF_47.vocab_size)
    prompt = Prompt(chat_prompt(OF_47, parse_prompt("Hi"), thinking=thinking), "Hi", None)
    converse(OF_47, engine, rules, prompt, reply, thinking)
    opening, opened = ("<think>", "<think>") if thinking else ("</think>", "")
    asked = f"[gMASK]<sop><|user|>Hi<|assistant|>{opening}{texts[0]}And?<|assistant|>{opening}"
    assert OF_47.decode(engine.asked[-1].prompt) == asked
    turns = [opened + text.removesuffix("<|user|>") for text in texts]
    assert [one.text for one in seen] == turns and seen[0].spoken == "A" and seen[1].spoken == "B"
    assert seen[1].history == (turns[0], f"And?<|assistant|>{opening.removesuffix(opened) if opened else opening}")
    assert seen[1].thinking == thinking and well_formed(seen[1], {}) == 1.0


def test_a_second_tag_in_an_opened_thought_is_malformed():
    texts = {"<think>why</think>A": 1.0, "<think><think>why</think>A": 0.0, "<think>why": 0.0}
    assert [well_formed(Answer("", text, None, True, 9, True), {}) for text in texts] == [*texts.values()]
