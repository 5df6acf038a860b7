"""Write original_templates.json: what the chat templates of GLM-4.5 and GLM-4.7 make of conversations of ours.

    python -m tests.unit.storage.chats.original_templates glm45.jinja glm47.jinja

glm45.jinja is the chat_template.jinja of zai-org/GLM-4.5, 4.5-Air and 4.6 (TRL's chat_templates/glm4moe.jinja equals
it byte for byte), glm47.jinja that of zai-org/GLM-4.7 and GLM-4.7-Flash. `SHA256` has their hashes. The tests compare
with the results; no text of the templates is in this project.
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
}
RANDOM_CHATS = 400
CHATS_OF_A_DIGEST = 20
NO_THINKING = {"enable_thinking": False}
KEEP_THOUGHTS = {"clear_thinking": False}
PROMPT = {"add_generation_prompt": True}
OPTIONS = ({}, NO_THINKING, KEEP_THOUGHTS, PROMPT, PROMPT | NO_THINKING, PROMPT | KEEP_THOUGHTS)


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


def plain_samples() -> list[tuple[list[dict], list[dict]]]:
    """Messages and tools of `CONVERSATIONS`, for the original templates."""
    return [([plain(message) for message in messages], tools or []) for messages, tools in CONVERSATIONS]


def named_chats() -> dict[str, dict]:
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
    return {
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


def random_texts(render: Callable[..., str] | None) -> Iterator[str]:
    """One text for each random conversation: what a template writes for each of its beginnings, with each option.
    Without a template, the conversation itself."""
    writer = Writer(11)
    for _ in range(RANDOM_CHATS):
        messages, tools = writer.conversation()
        if render is None:
            yield json.dumps([messages, tools])
            continue
        known = [plain(message) for message in messages]
        ends = range(1, len(messages) + 1)
        texts = [render(messages=known[:end], tools=tools, **options) for end in ends for options in OPTIONS]
        yield json.dumps(texts)


def digests(texts: Iterator[str]) -> list[str]:
    """The start of a SHA-256 for each `CHATS_OF_A_DIGEST` texts."""
    all_texts = list(texts)
    groups = [all_texts[at : at + CHATS_OF_A_DIGEST] for at in range(0, len(all_texts), CHATS_OF_A_DIGEST)]
    return [hashlib.sha256("\n".join(group).encode()).hexdigest()[:16] for group in groups]


def results_of(template: str) -> dict:
    """What a template makes of the conversations, as the file holds it."""
    render = compiled(template)
    samples = [render(messages=messages, tools=tools, **PROMPT) for messages, tools in plain_samples()]
    return {
        "named": {name: render(**chat) for name, chat in named_chats().items()},
        "samples": samples,
        "random": digests(random_texts(render)),
    }


def main(files: list[str]) -> None:
    """Write the file."""
    results: dict[str, object] = {"conversations": digests(random_texts(None))}
    for (name, sha256), file in zip(SHA256.items(), files, strict=True):
        content = Path(file).read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise SystemExit(f"{file}: not the published template of {name}")
        results[name] = results_of(content.decode())
    FILE.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
