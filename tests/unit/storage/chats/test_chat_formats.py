"""Both chat formats against the original templates of the releases, and what is particular to that of GLM-4.7."""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.storage.chats.chat import ChatOptions, chat_prompt, chat_reply, render, render_pair
from glm46.storage.chats.chat_format import FORMATS, GLM_45, GLM_47
from glm46.storage.chats.chat_template import chat_template, find_format, raise_for_model, raise_for_source
from glm46.storage.chats.conversation import Message, parse_conversation
from glm46.storage.chats.pairs import parse_pair
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.tokenizer_files import files_beside_weights
from glm46.storage.prepare.pipeline import prepare_text
from tests.small_run import call_here

CASES = Path(__file__).resolve().parents[4].parent / "shared" / "cases" / "templates"
TOKENIZERS = {format: load_tokenizer("builtin", format.name) for format in FORMATS}
TOKENIZER = TOKENIZERS[GLM_47]
ORIGINALS = {GLM_45: CASES / "glm45.jinja", GLM_47: CASES / "glm47.jinja"}
CITIES = {"Köln": {"days": 2}, "Bonn": {}}
both = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def original(format):
    """The template of the release as a function of messages and options."""
    if not ORIGINALS[format].is_file():
        pytest.skip("the original template is not at hand")
    return compiled(ORIGINALS[format].read_text(encoding="utf-8"))


def compiled(template):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = partial(json.dumps)
    return environment.from_string(template).render


class Writer:
    """Random conversations."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def text(self, most=10):
        return "".join(self._random.choices("ab é中🙂<>/{}\"'1\n\t ", k=self._random.randrange(most)))

    def value(self, depth=2):
        kinds = [self.text, lambda: None, lambda: True, lambda: 1.5, lambda: -3]
        if depth:
            kinds += [lambda: [self.value(depth - 1)], lambda: {self.text(): self.value(depth - 1)}]
        return self._random.choice(kinds)()

    def values(self):
        return {self.text(): self.value() for _ in range(self._random.randrange(3))}

    def assistant(self, calls):
        content, thought, kind = self.text(), self.text(), self._random.randrange(4)
        if not calls and not content.strip():
            content += "answer"
        message = {"role": "assistant", "content": content}
        if kind == 0:
            message["content"] = f"<think>\n{thought}</think>{content}"
        elif kind < 3:
            message["reasoning_content"] = thought
        else:
            message["reasoning_content"] = None
        if calls and not content.strip() and kind:
            message["content"] = self._random.choice(["", None])
        elif self._random.random() < 0.3:
            text = message["content"]
            message["content"] = [text[:3], {"type": "text", "text": text[3:]}]
        return message | ({"tool_calls": calls} if calls else {})

    def conversation(self):
        chance, messages = self._random.random, []
        if chance() < 0.5:
            messages.append({"role": "system", "content": self.text()})
        for _ in range(self._random.randint(1, 3)):
            messages.append({"role": "user", "content": self.text() + self._random.choice(["", "", "/nothink"])})
            for _ in range(self._random.randrange(3)):
                calls = [{"name": "now", "arguments": self.values()} for _ in range(self._random.randint(1, 2))]
                wrapped = [{"type": "function", "function": call} if chance() < 0.5 else call for call in calls]
                messages.append(self.assistant(wrapped))
                messages += [{"role": "tool", "content": self.text()} for _ in calls]
            messages.append(self.assistant([]))
        tools = [{"name": self.text(), "parameters": self.values()} for _ in range(self._random.randrange(3))]
        return messages, tools


@pytest.mark.slow
@both
def test_random_conversations_read_as_the_original_template_writes_them(format):
    """Documents and prompts, with and without thinking; and our own template. The originals write None for a content
    that is null."""
    theirs, ours, tokenizer, writer = original(format), compiled(chat_template(format)), TOKENIZERS[format], Writer(7)
    seen = {"documents": 0, "prompts": 0}
    closed = ("<think></think>", "</think>") if format.opens_thought else ("", "")
    for number in range(3000):
        messages, tools = writer.conversation()
        conversation = parse_conversation({"messages": messages, "tools": tools}, "messages")
        plain = [one | {"content": "" if one["content"] is None else one["content"]} for one in messages]

        def written(end, plain=plain, tools=tools, **options):
            return theirs(messages=plain[:end], tools=tools, **options)

        assert ours(messages=messages, tools=tools) == written(None)
        on = bool(number % 2)
        users = [i for i, one in enumerate(messages) if one["role"] == "user"]
        allowed = {written(end, enable_thinking=on) for end in [*users[1:], len(messages)] for on in (True, False)}
        history = ("expand", "last", "all", "keep" if format.opens_thought else "expand")[number // 2 % 4]
        if history == "keep":
            allowed = {written(None, clear_thinking=False)}
        # In the new format an empty thought that is a target has a tag that the template leaves out.
        no_reasoning = ("nothink", "mask", "train")[number % 3 if format is GLM_45 else number % 2]
        documents = render(conversation, tokenizer, ChatOptions(history, no_reasoning)).documents
        read = {tokenizer.decode(one.ids).removesuffix("<|user|>") for one in documents}
        # A sampled thought of white space follows a prompt without thinking; the template writes tags of its own.
        assert {text.replace(*closed) for text in read} <= {text.replace(*closed) for text in allowed}
        seen["documents"] += len(documents)
        for end, message in enumerate(messages, start=1):
            if message["role"] in ("user", "tool"):
                prompt = chat_prompt(tokenizer, conversation.messages[:end], tools=conversation.tools, thinking=on)
                assert tokenizer.decode(prompt) == written(end, enable_thinking=on, add_generation_prompt=True)
                if format.opens_thought:
                    keep = dict(tools=conversation.tools, thinking=on, keeps_thoughts=True)
                    asked = dict(enable_thinking=on, clear_thinking=False, add_generation_prompt=True)
                    prompt = chat_prompt(tokenizer, conversation.messages[:end], **keep)
                    assert tokenizer.decode(prompt) == written(end, **asked)
                seen["prompts"] += 1
    assert seen["documents"] > 3000 and seen["prompts"] > 6000


@both
def test_rendered_conversations_of_the_family(format):
    if not (CASES / "rendered.json").is_file():
        pytest.skip("the rendered conversations are not at hand")
    rows = json.loads((CASES / "rendered.json").read_text(encoding="utf-8"))
    key = {GLM_45: "4.5/4.6", GLM_47: "4.7/4.7-Flash"}[format]
    asked = [Message("system", "Be brief."), Message("user", "Hi")]
    for row, thinking in (("1 system+user, prompt, thinking on", True), ("2 the same, thinking off", False)):
        tokenizer = TOKENIZERS[format]
        assert tokenizer.decode(chat_prompt(tokenizer, asked, thinking=thinking)) == rows[row][key]
    ours = compiled(chat_template(format))
    thoughts, none = (
        [user("Q1"), assistant("A1", first), user("Q2"), assistant("A2", second)]
        for first, second in (("R1", "R2"), (None, None))
    )
    assert ours(messages=thoughts) == rows["3 two turns with reasoning, default"][key]
    assert ours(messages=thoughts, clear_thinking=False) == rows["3b the same, clear_thinking=False"][key]
    assert ours(messages=none) == rows["5 answers without reasoning"][key]
    sizes = {"city": {"type": "string"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": sizes, "required": ["city"]}
    tool = {"name": "get_weather", "description": "Weather of a city.", "parameters": parameters}
    calls = [{"name": "get_weather", "arguments": {"city": city} | days} for city, days in CITIES.items()]
    messages = [user("Weather?"), assistant("Checking.", "look", calls)]
    messages += [{"role": "tool", "content": weather} for weather in ("rain", "sun")]
    tools, row = [{"type": "function", "function": tool}], rows["4 tool call, two results, prompt"][key]
    assert ours(messages=messages, tools=tools, add_generation_prompt=True) == row
    made = parse_conversation({"messages": [*messages, assistant("Rain.")], "tools": tools}, "messages")
    assert tokenizer.decode(chat_prompt(tokenizer, made.messages[:-1], tools=made.tools, thinking=True)) == row


@pytest.mark.slow
@both
def test_the_format_is_that_of_the_template_beside_the_tokenizer(format, tmp_path):
    for name, content in files_beside_weights(TOKENIZERS[format], max_length=512).items():
        (tmp_path / name).write_bytes(content)
    for flavor in ("", "GLM-4.5", "GLM-4.6", "GLM-4.7", "GLM-4.7-Flash"):
        assert find_format(load_tokenizer(str(tmp_path), flavor)) is format
    if ORIGINALS[format].is_file():
        (tmp_path / "chat_template.jinja").write_bytes(ORIGINALS[format].read_bytes())
        assert find_format(load_tokenizer(str(tmp_path))) is format
    # Another spelling of the same meaning.
    (tmp_path / "chat_template.jinja").write_text("{# ours #}" + chat_template(format))
    assert find_format(load_tokenizer(str(tmp_path))) is format
    # LLaMA-Factory's form of 4.7, with the line ends of 4.5.
    (tmp_path / "chat_template.jinja").write_text(chat_template(GLM_47).replace("'<tool_call>'", "'\\n<tool_call>'"))
    with pytest.raises(UserError, match="nor that of GLM-4.7; beside the nearest, of GLM-4.7, it renders"):
        find_format(load_tokenizer(str(tmp_path)))
    (tmp_path / "chat_template.jinja").unlink()
    assert find_format(load_tokenizer(str(tmp_path), format.name)) is format


@both
def test_the_folder_of_the_model_has_the_format_of_its_tokenizer(format, tmp_path):
    (other,) = set(FORMATS) - {format}
    raise_for_model(tmp_path, TOKENIZERS[format])  # no template
    (tmp_path / "chat_template.jinja").write_text(chat_template(format))
    raise_for_model(tmp_path, TOKENIZERS[format])
    said = f"has the chat format of {format.models}, but .* set model.tokenizer_path = '{tmp_path}"
    with pytest.raises(UserError, match=said):
        raise_for_model(tmp_path, TOKENIZERS[other])


def test_sampling_of_a_new_folder_follows_the_format():
    of_45, of_47 = (
        json.loads(files_beside_weights(one, max_length=9)["generation_config.json"]) for one in TOKENIZERS.values()
    )
    assert of_47 == of_45 | {"do_sample": True, "temperature": 1.0, "top_p": 0.95} and "top_p" not in of_45


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
TARGETS = {
    "a thought that the prompt opens": (
        (user(), assistant(" Hello\n", " why ")), {},
        ["<|user|>Hi<|assistant|><think>[[why</think>Hello<|user|>]]"],
    ),
    "no thought, no switch": (
        (user("Hi/nothink"), assistant()), {}, ["<|user|>Hi/nothink<|assistant|></think>[[Hello<|user|>]]"],
    ),
    "mask is the same": (
        (user(), assistant()), {"no_reasoning": "mask"}, ["<|user|>Hi<|assistant|></think>[[Hello<|user|>]]"],
    ),
    "an opened thought that the model ends": (
        (user(), assistant()), {"no_reasoning": "train"},
        ["<|user|>Hi<|assistant|><think>[[</think>Hello<|user|>]]"],
    ),
    "a call and a step without a thought": (
        (user(), assistant("", "look", [CALL]), RESULT, assistant("Noon.")), {},
        ["<|user|>Hi<|assistant|><think>[[look</think><tool_call>now<arg_key>zone</arg_key><arg_value>é</arg_value>"
         "</tool_call><|observation|>]]<tool_response>noon</tool_response><|assistant|></think>[[Noon.<|user|>]]"],
    ),
    "turns without reasoning share the next document": (
        THREE, {},
        ["<|user|>1<|assistant|><think>[[x</think>a<|user|>]]",
         "<|user|>1<|assistant|></think>a<|user|>2<|assistant|></think>[[b<|user|>]]3<|assistant|><think>"
         "[[z</think>c<|user|>]]"],
    ),
    "an ended thought reads otherwise later, so it is alone": (
        THREE, {"no_reasoning": "train"},
        ["<|user|>1<|assistant|><think>[[x</think>a<|user|>]]",
         "<|user|>1<|assistant|></think>a<|user|>2<|assistant|><think>[[</think>b<|user|>]]",
         "<|user|>1<|assistant|></think>a<|user|>2<|assistant|></think>b<|user|>3<|assistant|><think>"
         "[[z</think>c<|user|>]]"],
    ),
    "all": (
        THREE, {"history": "all"},
        ["<|user|>1<|assistant|></think>[[a<|user|>]]2<|assistant|></think>[[b<|user|>]]3<|assistant|><think>"
         "[[z</think>c<|user|>]]"],
    ),
    "keep": (
        THREE, {"history": "keep"},
        ["<|user|>1<|assistant|><think>[[x</think>a<|user|>]]2<|assistant|></think>[[b<|user|>]]3<|assistant|><think>"
         "[[z</think>c<|user|>]]"],
    ),
}  # fmt: skip


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


@both
def test_a_source_has_one_format(format, tmp_path, monkeypatch):
    manifest = chats(tmp_path, format, monkeypatch)
    assert manifest.settings.get("chat_format") == (None if format is GLM_45 else "GLM-4.7")
    assert chats(tmp_path, format, monkeypatch) == manifest
    raise_for_source(manifest, TOKENIZERS[format])
    (other,) = set(FORMATS) - {format}
    for refused in (lambda: raise_for_source(manifest, TOKENIZERS[other]), lambda: chats(tmp_path, other, monkeypatch)):
        with pytest.raises(UserError, match=f"have the format of {format.name}, but the tokenizer 'builtin' that of"):
            refused()


def test_kept_thoughts_need_a_format_that_keeps_them(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="history = \"keep\": the tokenizer 'builtin' has the chat format of GLM-4.5"):
        chats(tmp_path, GLM_45, monkeypatch, history="keep")
    assert chats(tmp_path, GLM_47, monkeypatch, history="keep").settings["history"] == "keep"
