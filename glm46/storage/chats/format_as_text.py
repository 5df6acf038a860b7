"""Detects chat formats that are characters in the text of an assistant, in the form of GLM or of another model.

Training on such text would teach a model to sample characters where servers read special tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

OPEN_THOUGHT = "thought that never ends, or with tags of its own"
CALL_AS_TEXT = "tool call as text"
MARKER_AS_TEXT = "control token of a chat as text"
FORMAT_AS_TEXT = frozenset((OPEN_THOUGHT, CALL_AS_TEXT, MARKER_AS_TEXT))
"""Reasons why turns are not trained on, see `format_as_text`."""

_CODE = re.compile(r"(```|~~~).*?(?:\1|\Z)|`[^`\n]*`", re.DOTALL)
"""Code and quoted words in Markdown, which show a marker without using it."""
_CONTROL = (
    r"<[|\uff5c][\w\u2581]+[|\uff5c]>|\[/?INST\]|<(?:start|end)_of_turn>|<</?SYS>>|\[s?g?MASK\]|<(?:[se]op|bos|eos)>"
)
_FORMAT = {
    # At the beginning of a line or a sentence.
    OPEN_THOUGHT: r"(?:^|(?<=[.!?\u3002]))[ \t]*(?:</?think(?:ing)?>|\u25c1think\u25b7|<\|begin_of_thought\|>)",
    # A tag at the beginning of a line, or before a call.
    CALL_AS_TEXT: r"^[ \t]*<(?:/?(?:tool|(?:start_|end_)?function)_calls?>|/?tool_response>|\|(?:python_tag|tool_call))"
    r"|<tool_calls?>\s*(?:[\[{]|[\w.-]+\s*<arg_key>)|<function=[\w.-]+>|<invoke name="
    r"|\[TOOL_CALLS\]\s*(?:[\[{]|\w+\s*[\[{])|\bfunctools\[\s*\{",
    MARKER_AS_TEXT: rf"^[ \t]*(?:{_CONTROL})|(?:{_CONTROL})[ \t]*$|</s>\s*\Z",
}
"""Pattern for each reason, applied to text outside of code. A marker inside a sentence is a word of the sentence."""
_FORMS = {reason: re.compile(form, re.MULTILINE) for reason, form in _FORMAT.items()}


def format_as_text(text: str) -> tuple[str, str] | None:
    """Return the reason and the characters of the first chat format in a text; None if there is no chat format."""
    prose = _CODE.sub("", text)
    matches = ((reason, form.search(prose)) for reason, form in _FORMS.items())
    return next(((reason, match[0].strip()) for reason, match in matches if match), None)


def is_bare_call(answer: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if an entire answer is the JSON of calls of these tools, as Llama 3 writes them."""
    functions = [tool.get("function") or tool for tool in tools]
    names = [entry["name"] for entry in functions if isinstance(entry, Mapping) and entry.get("name")]
    if not names or answer.lstrip()[:1] not in ("{", "["):
        return False
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    calls = content if isinstance(content, list) else [content]
    calls = [entry for entry in calls if isinstance(entry, Mapping) and {"arguments", "parameters"} & {*entry}]
    return any(entry.get("name") in names for entry in calls)
