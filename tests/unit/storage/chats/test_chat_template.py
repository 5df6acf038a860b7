"""Documents and prompts against `transformers`' apply_chat_template, with our template and with an independent one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from glm46.config.errors import UserError
from glm46.storage.chats.chat import ChatOptions, chat_prompt, render
from glm46.storage.chats.chat_format import GLM_45
from glm46.storage.chats.chat_template import chat_template, find_format, rendered
from glm46.storage.chats.conversation import parse_conversation
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.tokenizer_files import files_beside_weights
from tests.unit.storage.chats.random_chats import Writer
from tests.unit.storage.chats.test_chat_formats import template_of_trl

TEMPLATE = chat_template(GLM_45)
TOKENIZER = load_tokenizer("builtin")
JUDGES = {"ours": lambda: TEMPLATE, "original": lambda: template_of_trl().read_text(encoding="utf-8")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What an export writes for the shipped tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    for name, content in files_beside_weights(TOKENIZER, max_length=512).items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("judge", JUDGES)
def test_documents_and_prompts_equal_apply_chat_template(judge, theirs):
    """The originals write None for a content that is null."""
    chosen = JUDGES[judge]()
    writer, user = Writer(3), (TOKENIZER.special["<|user|>"],)

    def template(messages, tools, thinking, **options):
        plain = [one | {"content": "" if one["content"] is None else one["content"]} for one in messages]
        options |= {} if thinking else {"enable_thinking": False}
        ids = theirs.apply_chat_template(plain, tools=tools or None, chat_template=chosen, return_dict=False, **options)
        return tuple(ids)

    for number in range(50):
        messages, tools = writer.conversation()
        conversation = parse_conversation({"messages": messages, "tools": tools}, "messages")
        ends = [i for i, m in enumerate(messages) if i > 1 and m["role"] == "user"] + [len(messages)]
        for history in ("expand", "last", "all"):
            options = ChatOptions(history, ("nothink", "mask", "train")[number % 3])
            got = [tuple(one.ids.tolist()) for one in render(conversation, TOKENIZER, options).documents]
            allowed = [[template(messages[:end], tools, on) + user for on in (False, True)] for end in ends]
            assert set(got) <= {ids for pair in allowed for ids in pair} and got[-1] in allowed[-1]
        for end in range(1, len(messages) + 1):
            for thinking in (True, False) if messages[end - 1]["role"] in ("user", "tool") else ():
                so_far = conversation.messages[:end]
                prompt = chat_prompt(TOKENIZER, so_far, tools=conversation.tools, thinking=thinking)
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
    find_format(TOKENIZER)
    find_format(other)  # no template
    no_switch = TEMPLATE.replace("/nothink{%- endif", "{%- endif")
    for template, words in (
        (TEMPLATE.replace("<|assistant|>{{ '\\n<think></think>'", "<|assistant|><think>{{ ''"), ["<think>"]),
        (no_switch, ["renders '<|assistant|>", "they render '/nothink"]),
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
