"""Renders chat templates; a template from an unknown source runs in a separate process with limits on time and memory.

Jinja's sandbox protects files and Python's internals, but does not stop endless loops or large texts. `rendered_apart`
therefore runs this file as a program.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 20.0
"""Includes the start of the interpreter on a busy machine. GLM's own templates take milliseconds."""
_MAX_BYTES = 2 * 2**30
_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
    SyntaxError,
)


class TemplateFailed(Exception):
    """A template cannot be rendered; the text gives the reason."""


def rendered(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """Render a prompt in Jinja's sandbox, with the extensions and filters of transformers.

    Args:
        options: further variables for the template, such as `enable_thinking`.

    Raises:
        jinja2.TemplateError: the template fails. Its expressions may also raise the other errors in `_ERRORS`.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(value, ensure_ascii=ensure_ascii)
    values = {"messages": messages, "tools": list(tools), "add_generation_prompt": True}
    return environment.from_string(template).render(**values, **options)


def rendered_apart(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    options: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Render prompts in another process, one for each set of options.

    Raises:
        TemplateFailed: the template fails, takes longer than `MAX_SECONDS`, or needs more than 2 GiB of memory.
    """
    request = json.dumps({"template": template, "messages": messages, "tools": tools, "options": options})
    try:
        process = subprocess.run(
            [sys.executable, "-I", __file__], input=request, capture_output=True, text=True, timeout=MAX_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise TemplateFailed(f"it takes more than {MAX_SECONDS:g} s") from error
    if process.returncode != 0:
        raise TemplateFailed(f"it needs too much memory, or ended its process with code {process.returncode}")
    answer = json.loads(process.stdout)
    if "fault" in answer:
        raise TemplateFailed(answer["fault"])
    prompts: list[str] = answer["prompts"]
    return prompts


def main() -> None:
    """Render the template of the request on standard input; print the prompts, or the fault, as JSON."""
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(MAX_SECONDS), int(MAX_SECONDS)))
    try:
        prompts = [
            rendered(request["template"], request["messages"], request["tools"], options)
            for options in request["options"]
        ]
        answer: dict[str, list[str] | str] = {"prompts": prompts}
    except _ERRORS as error:
        answer = {"fault": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
