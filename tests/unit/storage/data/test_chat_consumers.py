"""One parser and one format: whoever reads a conversation gives the same tokens, those of GLM-4.5's own template."""

import json
from pathlib import Path

import numpy as np
import pytest

from glm46.config.errors import UserError
from glm46.config.rl_data import PromptsConfig
from glm46.storage.data.chat import ChatOptions, chat_prompt, render
from glm46.storage.data.chat_template import CHAT_TEMPLATE, rendered
from glm46.storage.data.conversation import BadConversation, parse_prompt, parse_tools
from glm46.storage.data.pairs import parse_pair
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.prepare.readers import parts_of, read_part
from glm46.storage.prepare.rows import Document, Fields, read_row
from glm46.tasks.rl.prompts import read_prompts

TOKENIZER = load_tokenizer("builtin")
_ORIGINAL = Path(__file__).resolve().parents[4].parent / "shared" / "cases" / "templates" / "glm45.jinja"


def function(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "é 中", "parameters": parameters}}


def user(content="Weather in Köln? 🙂"):
    return {"role": "user", "content": content}


def calls(*pairs):
    return [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in pairs]


PARTS = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
THOUGHT = {"role": "assistant", "content": "Hello", "reasoning_content": "  why 中\n"}
STEP = {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": calls(("now", {"zone": 1}))}
TWO = STEP | {"content": "Wait.", "tool_calls": calls(("weather", {"city": "Köln", "days": [1, 2]}), ("now", {}))}
RESULTS = [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "noon"}]
TOOLS = [function("weather", city="string", days="array"), function("now", zone="integer")]
CONVERSATIONS = [
    ([user()], None),
    ([{"role": "developer", "content": "Be brief."}, user("Hi/nothink")], None),
    ([{"role": "system", "content": "S"}, user(), THOUGHT, user("And?")], []),
    ([user(), {"role": "assistant", "content": "<think>why</think>\nHello"}, user("And?")], None),
    ([user(), STEP, RESULTS[0]], TOOLS),
    ([user(), TWO, *RESULTS, {"role": "assistant", "content": "Rain."}, user("And now?"), STEP, RESULTS[1]], TOOLS[:1]),
    ([user(), {"role": "system", "content": "Be brief."}], None),
    ([user(), TWO, {"role": "tool", "content": ["rain", "noon"]}], TOOLS),
    ([user(), TWO, {"role": "tool", "content": [{"output": "rain"}, {"output": ""}]}], TOOLS),
]
ANSWER = {"role": "assistant", "content": "Sunny.", "reasoning_content": "so"}


def as_text(value):
    """The same conversation with arguments as JSON text."""
    for message in value:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return value


def large(type_):
    """A type of Arrow with 64-bit offsets, as polars and others write it."""
    import pyarrow
    from pyarrow import types

    if types.is_struct(type_):
        return pyarrow.struct([(field.name, large(field.type)) for field in type_])
    if types.is_list(type_):
        return pyarrow.large_list(large(type_.value_type))
    return pyarrow.large_string() if types.is_string(type_) else type_


@pytest.fixture(scope="module", params=["jsonl", "json text", "parts", "parquet", "large parquet"])
def rows(request, tmp_path_factory):
    """A file of the conversations, each with an answer, and the name of its form."""
    made = []
    for messages, tools in json.loads(json.dumps(CONVERSATIONS)):
        if request.param == "json text":
            messages, tools = as_text(messages), json.dumps(tools)
        if request.param == "parts":
            for message in messages:
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        made.append({"prompt": messages, "messages": [*messages, ANSWER], "tools": tools})
    file = tmp_path_factory.mktemp("rows") / f"rows.{'parquet' if 'parquet' in request.param else 'jsonl'}"
    if "parquet" in request.param:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        made = json.loads(json.dumps(made))
        for message in (message for row in made for message in (*row["prompt"], *row["messages"])):
            content = message["content"]  # a column has one type
            message["content"] = [content] if isinstance(content, str) else content and [
                one if isinstance(one, str) else one["output"] for one in content
            ]  # fmt: skip
        table = pyarrow.Table.from_pylist(made)
        if request.param == "large parquet":
            table = pyarrow.Table.from_pylist(
                made, pyarrow.schema([(one.name, large(one.type)) for one in table.schema])
            )
        parquet.write_table(table, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


def template_tokens(template):
    """The prompts of a template. The originals know no developer and no null content."""
    found = []
    for messages, tools in CONVERSATIONS:
        plain = [
            {**one, "role": one["role"].replace("developer", "system"), "content": one["content"] or ""}
            for one in messages
        ]
        text = rendered(template, plain, tools or (), {})
        found.append(TOKENIZER.encode_with_special(text).tolist())
    return found


WANTED = template_tokens(CHAT_TEMPLATE)


def test_the_prompts_are_those_of_the_original_template():
    if not _ORIGINAL.is_file():
        pytest.skip("the template of zai-org/GLM-4.5 is not at hand")
    assert template_tokens(_ORIGINAL.read_text(encoding="utf-8")) == WANTED


def test_prompts_of_rl(rows):
    keys = PromptsConfig(file=str(rows), thinking=True)
    found = read_prompts(rows, keys, TOKENIZER, most_tokens=10_000, needs_label=False)
    assert [prompt.tokens for prompt in found] == WANTED


def sampled():
    """What a model samples behind each prompt."""
    return TOKENIZER.encode_with_special("\n<think>so</think>\nSunny.<|user|>").tolist()


def documents(rows, format):
    fields = Fields("messages" if format == "messages" else "prompt", None, format)
    found = [document for part in parts_of([rows], fields) for document in read_part(part, fields)]
    assert all(isinstance(document, Document) for document in found), found
    return [document.conversations[0] for document in found]


def test_documents_of_sft(rows):
    for conversation, wanted in zip(documents(rows, "messages"), WANTED, strict=True):
        ids, is_target = render(conversation, TOKENIZER, ChatOptions()).documents[-1]
        assert ids.tolist() == wanted + sampled()
        assert np.flatnonzero(is_target).tolist()[-len(sampled()) :] == [*range(len(wanted), len(ids))]


REFUSED = {
    "tool call as text": [user(), {"role": "assistant", "content": '{"name": "now", "arguments": {}}'}, user()],
    "unknown role": [{"role": "critic", "content": "x"}, user()],
    "roles out of order": [{"role": "system", "content": "x"}],
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


def test_halves_of_pairs():
    for (messages, tools), wanted in zip(CONVERSATIONS, WANTED, strict=True):
        given = {"prompt": messages, "chosen": [ANSWER], "rejected": [ANSWER | {"content": "No."}], "tools": tools}
        ids, _ = render(parse_pair(given)[0], TOKENIZER, ChatOptions(history="last")).documents[0]
        assert ids.tolist() == wanted + sampled()


def test_messages_of_evaluation_and_of_chats():
    for (messages, tools), wanted in zip(CONVERSATIONS, WANTED, strict=True):
        assert chat_prompt(TOKENIZER, parse_prompt(messages), tools=parse_tools(tools), thinking=True) == wanted
    pytest.importorskip("lm_eval", reason="not installed; pip install '.[eval]'")
    from glm46.engine.evaluation.answers import Keys
    from glm46.engine.evaluation.lm_eval_model import LmEvalModel

    model = LmEvalModel(None, TOKENIZER, 10_000, Keys(), thinking=True)
    for (messages, tools), wanted in zip(CONVERSATIONS, WANTED, strict=True):
        if not tools:
            assert model.tok_encode(model.apply_chat_template(messages)) == wanted


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
