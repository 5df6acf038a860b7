"""The chat formats against the original templates of the releases and against `transformers`' apply_chat_template."""

import hashlib
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.storage.chats.chat import ChatOptions, chat_prompt, chat_reply, render, render_pair
from glm46.storage.chats.chat_format import FORMATS, GLM_45, GLM_47, GLM_51, GLM_52
from glm46.storage.chats.chat_template import chat_template, find_format, raise_for_model, raise_for_source, rendered
from glm46.storage.chats.conversation import Message, parse_conversation
from glm46.storage.chats.pairs import parse_pair
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.tokenizer_files import files_beside_weights
from glm46.storage.prepare.pipeline import prepare_text
from tests.builders import call_here
from tests.unit.storage.chats import original_templates
from tests.unit.storage.chats.original_templates import PROMPT, compiled, named_chats, plain_samples
from tests.unit.storage.chats.samples import Writer

TOKENIZERS = {format: load_tokenizer("builtin", format.name) for format in FORMATS}
TOKENIZER = TOKENIZERS[GLM_47]
each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


def defers(format):
    """Whether the random conversations of a format have deferred tools."""
    return format.name in original_templates.DEFERRING


def with_thoughts_apart(messages):
    """Messages whose thoughts are beside the content. In the template of GLM-5.1 a thought inside the content does not
    show that its turn has thoughts; here each does."""
    apart = []
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" and isinstance(content, list):
            content = "".join(part if isinstance(part, str) else part["text"] for part in content)
        has_text = message["role"] == "assistant" and isinstance(content, str)
        if has_text and "</think>" in content and message.get("reasoning_content") is None:
            thought, _, answer = content.removeprefix("<think>").partition("</think>")
            message = message | {"content": answer, "reasoning_content": thought}
        apart.append(message)
    return apart


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, 1000, pytest.param(10_000, marks=pytest.mark.long)])
@each_format
def test_random_conversations_read_as_the_original_template_writes_them(format, count):
    """Documents and prompts, with and without thinking. The template is our own, which is held equal to the original
    by the next test. The originals write None for a content that is null."""
    template = compiled(chat_template(format))
    tokenizer = TOKENIZERS[format]
    writer = Writer(7)
    seen = {"documents": 0, "prompts": 0}
    efforts = ({}, {"reasoning_effort": "high"}, {"reasoning_effort": "max"})
    for number in range(count):
        messages, tools = writer.deferring_conversation() if defers(format) else writer.conversation()
        messages = with_thoughts_apart(messages) if format is GLM_51 else messages
        effort = efforts[number % 3] if format.states_effort else {}
        conversation = parse_conversation({"messages": messages, "tools": tools, **effort}, "messages")
        plain = [one | {"content": "" if one["content"] is None else one["content"]} for one in messages]

        def written(end, plain=plain, tools=tools, effort=effort, **options):
            return template(messages=plain[:end], tools=tools, **options, **effort)

        assert template(messages=messages, tools=tools, **effort) == written(None)
        on = bool(number % 2)
        users = [i for i, one in enumerate(messages) if one["role"] == "user"]
        allowed = {written(end, enable_thinking=on) for end in [*users[1:], len(messages)] for on in (True, False)}
        history = ("expand", "last", "all", "keep" if format.opens_thought else "expand")[number // 2 % 4]
        if history == "keep":
            allowed = {written(None, clear_thinking=False, enable_thinking=on) for on in (True, False)}
        # In the new format an empty thought that is a target has a tag that the template leaves out.
        no_reasoning = ("nothink", "mask", "train")[number % 3 if format is GLM_45 else number % 2]
        documents = render(conversation, tokenizer, ChatOptions(history, no_reasoning)).documents
        read = {tokenizer.decode(one.ids).removesuffix("<|user|>") for one in documents}
        # A sampled thought of white space follows a prompt without thinking; the template writes tags of its own.
        empty = "</think>" if format.opens_thought else "<think></think>"
        assert {EMPTY_THOUGHT.sub(empty, text) for text in read} <= {EMPTY_THOUGHT.sub(empty, text) for text in allowed}
        seen["documents"] += len(documents)
        for end, message in enumerate(messages, start=1):
            if message["role"] in ("user", "tool"):
                ask = dict(tools=conversation.tools, thinking=on, effort=conversation.effort)
                prompt = chat_prompt(tokenizer, conversation.messages[:end], **ask)
                assert tokenizer.decode(prompt) == written(end, enable_thinking=on, add_generation_prompt=True)
                if format.opens_thought:
                    keep = ask | {"keeps_thoughts": True}
                    asked = dict(enable_thinking=on, clear_thinking=False, add_generation_prompt=True)
                    prompt = chat_prompt(tokenizer, conversation.messages[:end], **keep)
                    assert tokenizer.decode(prompt) == written(end, **asked)
                seen["prompts"] += 1
    assert seen["documents"] > count and seen["prompts"] > 2 * count


@pytest.mark.slow
def test_random_conversations_are_those_of_the_stored_results():
    for name, has_deferred in (("conversations", False), ("conversations with deferred tools", True)):
        texts = original_templates.random_texts(None, defers=has_deferred)
        assert original_templates.digests(texts) == original_templates.stored()[name]


@pytest.mark.slow
@each_format
def test_our_template_writes_random_conversations_as_the_original_does(format):
    """Each beginning of 400 conversations, or of 160 with deferred tools, with each option of the templates. To see
    where two templates differ, run tests/unit/storage/chats/original_templates.py with the original."""
    texts = original_templates.random_texts(compiled(chat_template(format)), defers=defers(format))
    digests = original_templates.digests(texts)
    assert digests == original_templates.stored()[format.name]["random"]


@each_format
def test_our_template_writes_named_conversations_as_the_original_does(format):
    render = compiled(chat_template(format))
    original = original_templates.stored()[format.name]
    assert {name: render(**chat) for name, chat in named_chats(format.name).items()} == original["named"]
    samples = [render(messages=messages, tools=tools, **PROMPT) for messages, tools in plain_samples(format.name)]
    assert samples == original["samples"]


@each_format
def test_prompts_are_those_of_the_original_template(format):
    prompts = {name: chat for name, chat in named_chats(format.name).items() if chat.get("add_generation_prompt")}
    assert len(prompts) == (7 if defers(format) else 3)
    for name, chat in prompts.items():
        row = chat | {"messages": [*chat["messages"], assistant("It flows.")]}
        conversation = parse_conversation(row, "messages")
        tokenizer = TOKENIZERS[format]
        prompt = chat_prompt(
            tokenizer,
            conversation.messages[:-1],
            tools=conversation.tools,
            thinking=chat.get("enable_thinking", True),
            effort=conversation.effort,
        )
        assert tokenizer.decode(prompt) == original_templates.stored()[format.name]["named"][name]


@pytest.mark.slow
@each_format
def test_the_format_is_that_of_the_template_beside_the_tokenizer(format, tmp_path):
    for name, content in files_beside_weights(TOKENIZERS[format], max_length=512).items():
        (tmp_path / name).write_bytes(content)
    for flavor in ("", "GLM-4.5", "GLM-4.6", "GLM-4.7", "GLM-4.7-Flash", "GLM-5", "GLM-5.1", "GLM-5.2"):
        assert find_format(load_tokenizer(str(tmp_path), flavor)) is format
    if format is GLM_45:
        (tmp_path / "chat_template.jinja").write_bytes(template_of_trl().read_bytes())
        assert find_format(load_tokenizer(str(tmp_path))) is format
    # Another spelling of the same meaning.
    (tmp_path / "chat_template.jinja").write_text("{# ours #}" + chat_template(format))
    assert find_format(load_tokenizer(str(tmp_path))) is format
    # LLaMA-Factory's form of 4.7, with the line ends of 4.5.
    (tmp_path / "chat_template.jinja").write_text(chat_template(GLM_47).replace("'<tool_call>'", "'\\n<tool_call>'"))
    with pytest.raises(UserError, match="or GLM-5.2; beside the nearest, of GLM-4.7 or 5, it renders"):
        find_format(load_tokenizer(str(tmp_path)))
    (tmp_path / "chat_template.jinja").unlink()
    assert find_format(load_tokenizer(str(tmp_path), format.name)) is format


@pytest.mark.parametrize(
    ("flavor", "format"),
    [
        ("GLM-5", GLM_47), ("GLM-5.1", GLM_51), ("GLM-5.2", GLM_52), ("debug-glm5", GLM_52), ("GLM-4.7-Flash", GLM_47),
        ("debug-flash", GLM_47), ("GLM-4.6", GLM_45), ("debug", GLM_45),
    ],
)  # fmt: skip
def test_without_a_template_the_preset_tells_the_format(flavor, format):
    assert find_format(load_tokenizer("builtin", flavor)) is format


def template_of_trl():
    """TRL's copy of the template of GLM-4.5, found without an import of TRL."""
    package = importlib.util.find_spec("trl")
    assert package is not None, "TRL is part of the test extra"
    return Path(package.origin).parent / "chat_templates" / "glm4moe.jinja"


def test_the_copy_of_trl_is_the_original_template():
    assert hashlib.sha256(template_of_trl().read_bytes()).hexdigest() == original_templates.SHA256["GLM-4.5"]


@each_format
def test_the_folder_of_the_model_has_the_format_of_its_tokenizer(format, tmp_path):
    raise_for_model(tmp_path, TOKENIZERS[format])  # no template
    (tmp_path / "chat_template.jinja").write_text(chat_template(format))
    raise_for_model(tmp_path, TOKENIZERS[format])
    said = f"has the chat format of {format.models}, but .* set model.tokenizer_path = '{tmp_path}"
    for other in set(FORMATS) - {format}:
        with pytest.raises(UserError, match=said):
            raise_for_model(tmp_path, TOKENIZERS[other])


def test_sampling_of_a_new_folder_follows_the_format():
    of_45, *later = (
        json.loads(files_beside_weights(one, max_length=9)["generation_config.json"]) for one in TOKENIZERS.values()
    )
    assert "top_p" not in of_45 and len(later) == 3
    assert all(one == of_45 | {"do_sample": True, "temperature": 1.0, "top_p": 0.95} for one in later)


def user(text="Hi"):
    return {"role": "user", "content": text}


def assistant(text="Hello", thought=None, calls=()):
    return {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": [*calls]}


def text_of(document):
    """The text of a document, with its targets in [[ ]]; without ``[gMASK]<sop>``."""
    ids, edges = document.ids, np.flatnonzero(np.diff(document.is_target)) + 1
    parts = [TOKENIZER.decode(part) for part in np.split(ids, edges)]
    parts = [f"[[{part}]]" if number % 2 else part for number, part in enumerate(parts)]
    return "".join(parts).removeprefix("[gMASK]<sop>")


def marked(*messages, history="expand", no_reasoning="nothink"):
    conversation = parse_conversation({"messages": [*messages]}, "messages")
    return [text_of(one) for one in render(conversation, TOKENIZER, ChatOptions(history, no_reasoning)).documents]


CALL, RESULT = {"name": "now", "arguments": {"zone": "é"}}, {"role": "tool", "content": "noon"}
THREE = user("1"), assistant("a", "x"), user("2"), assistant("b"), user("3"), assistant("c", "z")
TARGETS = json.loads(Path(__file__).with_name("targets_of_glm_47.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_the_format_that_opens_thoughts(name):
    messages, options, wanted = TARGETS[name]
    assert marked(*messages, **options) == wanted


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("thought", ["why", "", " \n"])
def test_a_document_is_a_prompt_and_what_is_sampled_behind_it(thinking, thought):
    """A turn is sampled behind an opened thought, whether it has one or not, or behind a closed one."""
    if thought.strip() and not thinking:
        return
    prompt = chat_prompt(TOKENIZER, [Message("user", "Hi")], thinking=thinking)
    sampled = f"{thought.strip()}</think>Hello<|user|>" if thinking else "Hello<|user|>"
    options = ChatOptions(no_reasoning="train" if thinking else "nothink")
    conversation = parse_conversation({"messages": [user(), assistant("Hello", thought)]}, "messages")
    ((ids, is_target),) = render(conversation, TOKENIZER, options).documents
    assert ids.tolist() == prompt + TOKENIZER.encode_with_special(sampled).tolist()
    assert is_target.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    # The next turn goes on behind what was sampled: an empty thought that a template would write otherwise stays.
    reply = chat_reply(TOKENIZER, [Message("user", "And?")], thinking=thinking)[1:]
    opening = "<think>" if thinking else "</think>"
    assert TOKENIZER.decode([*ids.tolist(), *reply]).endswith(f"{opening}{sampled}And?<|assistant|>{opening}")


@pytest.mark.parametrize("thought", ["why", None])
def test_both_halves_of_a_pair_have_one_prompt(thought):
    halves = parse_pair({"prompt": "Hi", "chosen": [assistant("A", thought)], "rejected": "B"})
    found = [text_of(one) for one in render_pair(halves, TOKENIZER, "nothink")]
    opening = "<think>" if thought else "</think>[["
    assert all(text.startswith(f"<|user|>Hi<|assistant|>{opening}") for text in found)
    assert found[1].endswith("</think>[[B<|user|>]]")


def chats(folder, format, monkeypatch, **keys):
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
    (folder / "chats.jsonl").write_text(json.dumps({"messages": [user(), assistant("A", "x")]}))
    recipe = {"input": (str(folder / "chats.jsonl"),), "format": "messages", "max_tokens": 99, "held_out": 0.0}
    recipe |= {"output": str(folder / "shards"), "processes": 1} | keys
    return prepare_text(TextRecipe(**recipe), report=lambda line: None, flavor=format.name)


@each_format
def test_a_source_has_one_format(format, tmp_path, monkeypatch):
    manifest = chats(tmp_path, format, monkeypatch)
    assert manifest.settings.get("chat_format") == (None if format is GLM_45 else format.name)
    assert chats(tmp_path, format, monkeypatch) == manifest
    raise_for_source(manifest, TOKENIZERS[format])
    other = next(other for other in FORMATS if other is not format)
    for refused in (lambda: raise_for_source(manifest, TOKENIZERS[other]), lambda: chats(tmp_path, other, monkeypatch)):
        with pytest.raises(UserError, match=f"have the format of {format.name}, but the tokenizer 'builtin' that of"):
            refused()


def test_kept_thoughts_need_a_format_that_keeps_them(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="history = \"keep\": the tokenizer 'builtin' has the chat format of GLM-4.5"):
        chats(tmp_path, GLM_45, monkeypatch, history="keep")
    assert chats(tmp_path, GLM_47, monkeypatch, history="keep").settings["history"] == "keep"


TEMPLATE = chat_template(GLM_45)
BUILTIN = load_tokenizer("builtin")
JUDGES = {
    "ours": (GLM_45, lambda: TEMPLATE),
    "original": (GLM_45, lambda: template_of_trl().read_text(encoding="utf-8")),
    "GLM-5.2": (GLM_52, lambda: chat_template(GLM_52)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What an export writes for the shipped tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    for name, content in files_beside_weights(BUILTIN, max_length=512).items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


def without_what_is_read_otherwise(messages):
    """Messages without thoughts of white space, for which the template of GLM-5.2 writes tags of its own, and without
    ``/nothink``, which is text to us and a token to transformers."""
    read = []
    for message in with_thoughts_apart(messages):
        if message["role"] == "assistant":
            message = message | {"reasoning_content": (message.get("reasoning_content") or "").strip() or None}
        elif message["role"] == "user":
            message = message | {"content": message["content"].removesuffix("/nothink")}
        read.append(message)
    return read


@pytest.mark.slow
@pytest.mark.parametrize("judge", JUDGES)
def test_documents_and_prompts_equal_apply_chat_template(judge, theirs):
    """The originals write None for a content that is null. Our template of GLM-5.2 is held equal to the original
    above."""
    format, template_text = JUDGES[judge]
    chosen = template_text()
    tokenizer = TOKENIZERS[format]
    writer = Writer(3)
    user_marker = (BUILTIN.special["<|user|>"],)

    def template(messages, tools, thinking, **options):
        plain = [one | {"content": "" if one["content"] is None else one["content"]} for one in messages]
        options |= {} if thinking else {"enable_thinking": False}
        ids = theirs.apply_chat_template(plain, tools=tools or None, chat_template=chosen, return_dict=False, **options)
        return tuple(ids)

    for number in range(50):
        messages, tools = writer.conversation()
        messages = messages if format is GLM_45 else without_what_is_read_otherwise(messages)
        conversation = parse_conversation({"messages": messages, "tools": tools}, "messages")
        ends = [i for i, m in enumerate(messages) if i > 1 and m["role"] == "user"] + [len(messages)]
        for history in ("expand", "last", "all"):
            options = ChatOptions(history, ("nothink", "mask", "train")[number % 3])
            got = [tuple(one.ids.tolist()) for one in render(conversation, tokenizer, options).documents]
            allowed = [[template(messages[:end], tools, on) + user_marker for on in (False, True)] for end in ends]
            assert set(got) <= {ids for pair in allowed for ids in pair} and got[-1] in allowed[-1]
        for end in range(1, len(messages) + 1):
            for thinking in (True, False) if messages[end - 1]["role"] in ("user", "tool") else ():
                so_far = conversation.messages[:end]
                prompt = chat_prompt(tokenizer, so_far, tools=conversation.tools, thinking=thinking)
                assert tuple(prompt) == template(messages[:end], tools, thinking, add_generation_prompt=True)


def test_null_content_and_roles_of_our_template(theirs):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "now", "arguments": {}}]}
    text = theirs.apply_chat_template([{"role": "developer", "content": "S"}, call], tokenize=False)
    assert text == "[gMASK]<sop><|system|>\nS<|assistant|>\n<think></think>\n<tool_call>now\n</tool_call>"
    apart = {"role": "assistant", "content": "<think>x</think> y", "reasoning_content": ""}
    assert theirs.apply_chat_template([apart], tokenize=False).endswith("\n<think></think>\n<think>x</think> y")
    for message in ({"role": "critic", "content": "x"}, {"role": "user", "content": [{"type": "image"}]}):
        with pytest.raises(Exception, match="critic|not text"):
            theirs.apply_chat_template([message], tokenize=False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    form=st.sampled_from([{}, {"ensure_ascii": False}, {"separators": (",", ":")}, {"indent": 1}]),
)
def test_arguments_as_json_text_are_those_of_the_object(arguments, form):
    def render(given):
        call = {"type": "function", "function": {"name": "now", "arguments": given}}
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return rendered(TEMPLATE, messages, (), {})

    assert render(json.dumps(arguments, **form)) == render(arguments)
    assert render("") == render({})


@pytest.mark.slow
def test_the_template_beside_a_tokenizer_is_compared(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    other = load_tokenizer(str(tmp_path))
    find_format(BUILTIN)
    find_format(other)  # no template
    no_switch = TEMPLATE.replace("/nothink{%- endif", "{%- endif")
    for template, words in (
        (TEMPLATE.replace("<|assistant|>{{ '\\n<think></think>'", "<|assistant|><think>{{ ''"), ["<think>"]),
        (no_switch, ["renders '<|assistant|>", "that renders '/nothink"]),
        (TEMPLATE + "{{ messages.clear() }}", ["fails"]),
        ("{% for", ["fails"]),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ["fails", "RecursionError"]),
        ("{{ 'a' * 4000000000 }}", ["fails", "MemoryError"]),
    ):
        for file, content in (
            ("chat_template.jinja", template),
            ("tokenizer_config.json", json.dumps({"chat_template": template})),
            ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": template}]})),
        ):
            (tmp_path / file).write_text(content, encoding="utf-8")
            with pytest.raises(UserError) as refused:
                find_format(other)
            said = str(refused.value)
            assert all(word in said for word in [str(tmp_path / file), "GLM-4.5 or 4.6", *words]), said
            (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="tokenizer_config.json: damaged"):
        find_format(other)
