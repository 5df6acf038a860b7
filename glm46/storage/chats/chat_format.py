"""The two chat formats of the family: the one of GLM-4.5, 4.5-Air and 4.6, and the one of GLM-4.7.

Sources: the chat templates of the releases. `chat_template.format_of` finds the format of a tokenizer's folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT_KEY = "chat_format"
"""Setting in the manifest of a source of chats; if absent, the format is GLM-4.5's."""

_CALL = (
    "<tool_call>{function-name}",
    "<arg_key>{arg-key-1}</arg_key>",
    "<arg_value>{arg-value-1}</arg_value>",
    "<arg_key>{arg-key-2}</arg_key>",
    "<arg_value>{arg-value-2}</arg_value>",
    "...",
    "</tool_call>",
)

TOOLS_HEAD = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
"""Text before the descriptions of the tools, which follow one per line."""


class Marker(str):
    """The name of a special token; plain strings are text."""


BEGIN = (Marker("[gMASK]"), Marker("<sop>"))
SYSTEM, USER, ASSISTANT, OBSERVATION = map(Marker, ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"))
THINK = Marker("<think>")
END_THINK = Marker("</think>")
NO_THINK = Marker("/nothink")
RESPONSE = Marker("<tool_response>")
END_RESPONSE = Marker("</tool_response>")
CALL_MARKERS = tuple(Marker(f"<{end}{name}>") for name in ("tool_call", "arg_key", "arg_value") for end in ("", "/"))
CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE = CALL_MARKERS
MARKERS = frozenset((*BEGIN, SYSTEM, USER, ASSISTANT, OBSERVATION, THINK, END_THINK, NO_THINK, *CALL_MARKERS))
MARKERS |= {RESPONSE, END_RESPONSE}
"""All markers that the formats use; they are in one vocabulary."""


@dataclass(frozen=True)
class ChatFormat:
    """The differences between the formats."""

    name: str
    """First model that has it; stored in the manifest of a source of chats."""
    models: str
    """All models of this package that have it, for messages."""
    line: str
    """Separator after a role marker, after a thought, and between parts of a tool call."""
    opens_thought: bool
    """False: ``/nothink`` after the user's message forbids thinking, an empty thought is ``<think></think>``, and past
    thoughts are always removed. True: a prompt ends with ``<think>`` or, if thinking is forbidden, with ``</think>``;
    an empty thought is ``</think>`` alone; past thoughts are kept on request (``clear_thinking`` = false). A sampled
    turn ``<think></think>A`` is then written ``</think>A`` in a server's next prompt."""
    sampling: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Sampling keys for a new ``generation_config.json``."""

    @property
    def tools_tail(self) -> str:
        """Text after the descriptions of the tools. Its tags are special tokens."""
        how = "output the function name and arguments within the following XML format"
        return f"</tools>\n\nFor each function call, {how}:\n{self.line.join(_CALL)}"


GLM_45 = ChatFormat("GLM-4.5", "GLM-4.5 or 4.6", "\n", opens_thought=False)
GLM_47 = ChatFormat(
    "GLM-4.7", "GLM-4.7", "", opens_thought=True, sampling={"do_sample": True, "temperature": 1.0, "top_p": 0.95}
)
FORMATS = (GLM_45, GLM_47)


def made_in(settings: Mapping[str, Any]) -> str:
    """Return the name of the format of a source of chats, from the settings in its manifest."""
    return settings.get(FORMAT_KEY, GLM_45.name)


def format_of_flavor(flavor: str) -> ChatFormat:
    """Return the format of a preset, for a tokenizer without a template."""
    return GLM_47 if flavor.startswith((GLM_47.name, "debug-flash")) else GLM_45
