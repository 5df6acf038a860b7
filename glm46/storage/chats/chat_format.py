"""The chat formats of the family: of GLM-4.5, 4.5-Air and 4.6; of GLM-4.7 and 5; of GLM-5.1; and of GLM-5.2.

Sources: the chat templates of the releases; of GLM-5's only public renderers, which write the grammar of GLM-4.7.
`chat_template.format_of` finds the format of a tokenizer's folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """False: ``/nothink`` after the user's message forbids thinking, and past thoughts are always removed. True: a
    prompt ends with ``<think>`` or, if thinking is forbidden, with `empty_thought`; past thoughts are kept on request
    (``clear_thinking`` = false)."""
    empty_thought: tuple[str, ...]
    """What stands for a thought that is empty or removed. Where it is ``</think>`` alone, a sampled turn
    ``<think></think>A`` is written ``</think>A`` in a server's next prompt."""
    tags_recent_thoughts: bool = False
    """Where thinking is allowed, a turn after the last user message has both tags, also around an empty thought."""
    strips_thoughts: bool = True
    """Thoughts are written without the white space around them."""
    states_effort: bool = False
    """A prompt that allows thinking begins with the reasoning effort, see `chat_pieces.EFFORTS`."""
    defers_tools: bool = False
    """A tool is described by its function alone. One with ``defer_loading`` is described only in a reply that refers to
    it (``tool_reference``)."""
    sampling: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Sampling keys for a new ``generation_config.json``."""

    @property
    def tools_tail(self) -> str:
        """Text after the descriptions of the tools. Its tags are special tokens."""
        how = "output the function name and arguments within the following XML format"
        return f"</tools>\n\nFor each function call, {how}:\n{self.line.join(_CALL)}"

    @property
    def tags_empty_thoughts(self) -> bool:
        """True if an empty thought has both tags everywhere, so that later prompts repeat a sampled one."""
        return THINK in self.empty_thought

    @property
    def shows_thinking(self) -> bool:
        """True if a prompt shows also before its end that thinking is allowed."""
        return not self.opens_thought or self.states_effort or self.tags_recent_thoughts


_SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 0.95}
GLM_45 = ChatFormat("GLM-4.5", "GLM-4.5 or 4.6", "\n", opens_thought=False, empty_thought=("\n", THINK, END_THINK))
GLM_47 = ChatFormat("GLM-4.7", "GLM-4.7 or 5", "", opens_thought=True, empty_thought=(END_THINK,), sampling=_SAMPLING)
GLM_51 = replace(
    GLM_47,
    name="GLM-5.1",
    models="GLM-5.1",
    tags_recent_thoughts=True,
    strips_thoughts=False,
    defers_tools=True,
)
GLM_52 = replace(
    GLM_51,
    name="GLM-5.2",
    models="GLM-5.2",
    empty_thought=(THINK, END_THINK),
    tags_recent_thoughts=False,
    states_effort=True,
)
FORMATS = (GLM_45, GLM_47, GLM_51, GLM_52)
_BY_FLAVOR = {
    "GLM-5.2": GLM_52,
    "GLM-5.1": GLM_51,
    "GLM-5": GLM_47,
    "GLM-4.7": GLM_47,
    "debug-glm5": GLM_52,
    "debug-flash": GLM_47,
}
"""Format by the beginning of a preset's name; the first that fits counts. Other presets have that of GLM-4.5."""


def made_in(settings: Mapping[str, Any]) -> str:
    """Return the name of the format of a source of chats, from the settings in its manifest."""
    name: str = settings.get(FORMAT_KEY, GLM_45.name)
    return name


def format_of_flavor(flavor: str) -> ChatFormat:
    """Return the format of a preset, for a tokenizer without a template."""
    return next((format for name, format in _BY_FLAVOR.items() if flavor.startswith(name)), GLM_45)
