"""Write original_templates.json: what the chat templates of the releases make of conversations of ours.

    python -m tests.unit.storage.chats.original_templates glm45.jinja glm47.jinja glm51.jinja glm52.jinja

glm45.jinja is the chat_template.jinja of zai-org/GLM-4.5, 4.5-Air and 4.6 (TRL's chat_templates/glm4moe.jinja equals
it byte for byte), glm47.jinja that of zai-org/GLM-4.7 and GLM-4.7-Flash, glm52.jinja that of zai-org/GLM-5.2.
glm51.jinja is glm_5_1_chat_template.jinja of ambient-xyz/tokenizer, which differs from that of zai-org/GLM-5.1, as its
authors say, in one spelling (``content[0]`` for ``content.0``). `SHA256` has their hashes. The tests compare with the
results; no text of the templates is in this project.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.unit.storage.chats.samples import CONVERSATIONS, Writer

FILE = Path(__file__).with_suffix(".json")
SHA256 = {
    "GLM-4.5": "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3",
    "GLM-4.7": "d63ad536c3c81880043e22ec7fd08db42b4d8fb7c89c7138bc562bfa25281375",
    "GLM-5.1": "7e11a0b0081fb7ebb2280f8ac320a2c3816201a792241ee77c9f9bdf26d779cf",
    "GLM-5.2": "172dc74a35e1752df75ecfb2b2cf9326d2852bb1379868ebeec9571654489679",
}
DEFERRING = ("GLM-5.1", "GLM-5.2")
"""Formats with deferred tools; their random conversations have them, and all options."""
RANDOM_CHATS = {False: 400, True: 160}
"""Number of random conversations, without and with deferred tools."""
CHATS_OF_A_DIGEST = 20
NO_THINKING = {"enable_thinking": False}
KEEP_THOUGHTS = {"clear_thinking": False}
PROMPT = {"add_generation_prompt": True}
HIGH_EFFORT = {"reasoning_effort": "high"}
OPTIONS = ({}, NO_THINKING, KEEP_THOUGHTS, PROMPT, PROMPT | NO_THINKING, PROMPT | KEEP_THOUGHTS)
MORE_OPTIONS = (PROMPT | HIGH_EFFORT, HIGH_EFFORT | NO_THINKING, KEEP_THOUGHTS | NO_THINKING)


@cache
def stored() -> dict[str, dict]:
    """The contents of the file, by format."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def compiled(template: str) -> Callable[..., str]:
    """A template as a function of messages and options."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = partial(json.dumps)
    return environment.from_string(template).render


def plain(message: dict) -> dict:
    """A message without what the original templates do not know: developers, and contents that are null."""
    role = message["role"].replace("developer", "system")
    return message | {"role": role, "content": message["content"] or ""}


def plain_samples(name: str) -> list[tuple[list[dict], list[dict]]]:
    """Messages and tools of `CONVERSATIONS`, for the original template of a format. That of GLM-5.1 drops results in
    tables with an ``output``."""
    return [
        ([plain(message) for message in messages], tools or [])
        for messages, tools in CONVERSATIONS
        if name != "GLM-5.1" or '"output"' not in json.dumps(messages)
    ]


def named_chats(name: str) -> dict[str, dict]:
    """Conversations that show where the formats differ, with the options of their templates."""
    question = {"role": "user", "content": "Which river flows through Köln?"}
    answer = {"role": "assistant", "content": "The Rhine."}
    thought = answer | {"reasoning_content": "Köln is on the Rhine."}
    second = {"role": "user", "content": "And through Bonn?"}
    last = {"role": "assistant", "content": "The Rhine too.", "reasoning_content": "Bonn is upstream."}
    system = {"role": "system", "content": "One sentence."}
    two_turns = [question, thought, second, last]
    parameters = {"type": "object", "properties": {"river": {"type": "string"}, "days": {"type": "integer"}}}
    level = {"name": "water_level", "description": "Level of a river in cm.", "parameters": parameters}
    calls = [
        {"name": "water_level", "arguments": {"river": "Rhein", "days": 3}},
        {"name": "water_level", "arguments": {"river": "Sieg – untere"}},
    ]
    asks = {"role": "assistant", "content": "I look it up.", "reasoning_content": "two rivers", "tool_calls": calls}
    results = [{"role": "tool", "content": "312"}, {"role": "tool", "content": "74"}]
    deferred = {"name": "tides", "description": "Tides of a port.", "parameters": {}, "defer_loading": True}
    search = {"role": "assistant", "content": "", "tool_calls": [{"name": "search_tools", "arguments": {"q": "sea"}}]}
    loaded = {"role": "tool", "content": [{"type": "tool_reference", "name": "tides"}]}
    more = {
        "a thought with white space around it": {
            "messages": [question, thought | {"reasoning_content": " Köln?\n"}],
            **PROMPT,
        },
        "high effort": {"messages": [system, question], **PROMPT, **HIGH_EFFORT},
        "high effort without thinking": {"messages": [question], **PROMPT, **HIGH_EFFORT, **NO_THINKING},
        "a deferred tool that a reply loads": {
            "messages": [question, search, loaded],
            "tools": [{"type": "function", "function": level}, {"type": "function", "function": deferred}],
            **PROMPT,
        },
    }
    return (more if name in DEFERRING else {}) | {
        "prompt with thinking": {"messages": [system, question], **PROMPT},
        "prompt without thinking": {"messages": [system, question], **PROMPT, **NO_THINKING},
        "thoughts of earlier turns": {"messages": two_turns},
        "thoughts of earlier turns, kept": {"messages": two_turns, **KEEP_THOUGHTS},
        "answers without thoughts": {"messages": [question, answer, second, answer]},
        "calls and results": {
            "messages": [question, asks, *results],
            "tools": [{"type": "function", "function": level}],
            **PROMPT,
        },
    }


def random_texts(render: Callable[..., str] | None, *, defers: bool) -> Iterator[str]:
    """One text for each random conversation: what a template writes for each of its beginnings, with each option.
    Without a template, the conversation itself.

    Args:
        defers: whether the conversations have deferred tools.
    """
    writer = Writer(11)
    every_option = (*OPTIONS, *MORE_OPTIONS) if defers else OPTIONS
    for _ in range(RANDOM_CHATS[defers]):
        messages, tools = writer.deferring_conversation() if defers else writer.conversation()
        if render is None:
            yield json.dumps([messages, tools])
            continue
        known = [plain(message) for message in messages]
        ends = range(1, len(messages) + 1)
        texts = [render(messages=known[:end], tools=tools, **options) for end in ends for options in every_option]
        yield json.dumps(texts)


def digests(texts: Iterator[str]) -> list[str]:
    """The start of a SHA-256 for each `CHATS_OF_A_DIGEST` texts."""
    all_texts = list(texts)
    groups = [all_texts[at : at + CHATS_OF_A_DIGEST] for at in range(0, len(all_texts), CHATS_OF_A_DIGEST)]
    return [hashlib.sha256("\n".join(group).encode()).hexdigest()[:16] for group in groups]


def results_of(name: str, template: str) -> dict:
    """What the template of a format makes of the conversations, as the file holds it."""
    render = compiled(template)
    samples = [render(messages=messages, tools=tools, **PROMPT) for messages, tools in plain_samples(name)]
    return {
        "named": {title: render(**chat) for title, chat in named_chats(name).items()},
        "samples": samples,
        "random": digests(random_texts(render, defers=name in DEFERRING)),
    }


def main(files: list[str]) -> None:
    """Write the file."""
    results: dict[str, object] = {
        "conversations": digests(random_texts(None, defers=False)),
        "conversations with deferred tools": digests(random_texts(None, defers=True)),
    }
    for (name, sha256), file in zip(SHA256.items(), files, strict=True):
        content = Path(file).read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise SystemExit(f"{file}: not the published template of {name}")
        results[name] = results_of(name, content.decode())
    FILE.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
