"""Chat formats as characters in the text of an assistant, in the form of GLM or of another model.

A model would learn to sample characters where servers read special tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence

OPEN_THOUGHT, CALL_AS_TEXT, MARKER_AS_TEXT = (
    "thought that never ends, or with tags of its own", "tool call as text", "control token of a chat as text"
)  # fmt: skip
FORMAT_AS_TEXT = frozenset((OPEN_THOUGHT, CALL_AS_TEXT, MARKER_AS_TEXT))
"""Reasons of turns that are not trained on, see `format_as_text`."""

_CODE = re.compile(r"(```|~~~).*?(?:\1|\Z)|`[^`\n]*`", re.DOTALL)
"""Code and quoted words of Markdown, which show a marker and do not use it."""
_CONTROL = (
    r"<[|\uff5c][\w\u2581]+[|\uff5c]>|\[/?INST\]|<(?:start|end)_of_turn>|<</?SYS>>|\[s?g?MASK\]|<(?:[se]op|bos|eos)>"
)
_FORMAT = {
    # At the begin of a line or a sentence.
    OPEN_THOUGHT: r"(?:^|(?<=[.!?\u3002]))[ \t]*(?:</?think(?:ing)?>|\u25c1think\u25b7|<\|begin_of_thought\|>)",
    # A tag at the begin of a line, or before a call.
    CALL_AS_TEXT: r"^[ \t]*<(?:/?(?:tool|(?:start_|end_)?function)_calls?>|/?tool_response>|\|(?:python_tag|tool_call))"
    r"|<tool_calls?>\s*(?:[\[{]|[\w.-]+\s*<arg_key>)|<function=[\w.-]+>|<invoke name="
    r"|\[TOOL_CALLS\]\s*(?:[\[{]|\w+\s*[\[{])|\bfunctools\[\s*\{",
    MARKER_AS_TEXT: rf"^[ \t]*(?:{_CONTROL})|(?:{_CONTROL})[ \t]*$|</s>\s*\Z",
}
"""The form of each reason outside of code. A marker inside a sentence is a word of it."""
_FORMS = {reason: re.compile(form, re.MULTILINE) for reason, form in _FORMAT.items()}


def format_as_text(text: str) -> tuple[str, str] | None:
    """The reason and the characters of the first chat format in a text; None if it has none."""
    prose = _CODE.sub("", text)
    found = ((reason, form.search(prose)) for reason, form in _FORMS.items())
    return next(((reason, match[0].strip()) for reason, match in found if match), None)


def is_bare_call(answer: str, tools: Sequence[Mapping]) -> bool:
    """True if a whole answer is the JSON of calls of these tools, as Llama 3 writes them."""
    functions = [tool.get("function") or tool for tool in tools]
    names = [one["name"] for one in functions if isinstance(one, Mapping) and one.get("name")]
    if not names or answer.lstrip()[:1] not in ("{", "["):
        return False
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    calls = found if isinstance(found, list) else [found]
    calls = [one for one in calls if isinstance(one, Mapping) and {"arguments", "parameters"} & {*one}]
    return any(one.get("name") in names for one in calls)
