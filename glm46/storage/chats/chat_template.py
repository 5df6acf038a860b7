"""Jinja templates of the chat formats, for servers; and detection of a folder's format from what its template renders.

A trained model is served through the template of its folder. If that template renders another format than the one the
model was trained in, nothing fails but answers are bad: so the template decides the format, before work starts.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path

from glm46.config.errors import UserError
from glm46.files.file_content import read_json_object
from glm46.run.plan import Plan
from glm46.storage.chats.chat_format import (
    FORMATS,
    GLM_45,
    GLM_47,
    MARKERS,
    TOOLS_HEAD,
    ChatFormat,
    format_of_flavor,
    made_in,
)
from glm46.storage.chats.render_template import TemplateFailed, rendered, rendered_apart
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import Tokenizer, tokenizer_file

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

_TEMPLATE = r"""
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content or [] -%}
{%- if part is string -%}{{ part }}
{%- elif part.type == 'text' -%}{{ part.text }}
{%- else -%}{{ raise_exception('a part of a message is not text') }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro argument(key, value) -%}
{{ '<arg_key>' + key + '</arg_key>LINE<arg_value>' + value + '</arg_value>LINE' }}
{%- endmacro -%}
{%- macro decoded(json) -%}
{%- set at = namespace(depth=0, quoted=false, escape='', high=0, key=none, part='') -%}
{%- for c in json -%}
{%- if at.escape -%}
{%- set at.escape = at.escape + c -%}
{%- if at.escape[1] != 'u' -%}
{%- set kept = at.escape if at.depth > 1 and c != '/' else
    {'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}.get(c, c) -%}
{%- set at.part = at.part + kept -%}
{%- set at.escape = '' -%}
{%- elif at.escape | length == 6 -%}
{%- set code = at.escape[2:] | int(base=16) -%}
{%- if code >= 55296 and code < 56320 -%}{%- set at.high = code -%}
{%- else -%}
{%- set code = code if code < 56320 or code > 57343 else 65536 + (at.high - 55296) * 1024 + code - 56320 -%}
{%- set at.part = at.part + (at.escape if at.depth > 1 and (code < 32 or code in [34, 92]) else '%c' % code) -%}
{%- endif -%}
{%- set at.escape = '' -%}
{%- endif -%}
{%- elif at.quoted and c == '\\' -%}{%- set at.escape = c -%}
{%- elif c == '"' -%}
{%- set at.quoted = not at.quoted -%}
{%- if at.depth > 1 -%}{%- set at.part = at.part + c -%}{%- endif -%}
{%- elif at.quoted -%}{%- set at.part = at.part + c -%}
{%- elif at.depth == 1 and c == ':' -%}
{%- set at.key = at.part -%}
{%- set at.part = '' -%}
{%- elif at.depth == 1 and c in ',}' -%}
{%- if at.key is not none -%}{{ argument(at.key, at.part) }}{%- endif -%}
{%- set at.key = none -%}
{%- set at.part = '' -%}
{%- elif c not in ' \n\r\t' -%}
{%- set at.depth = at.depth + (1 if c in '{[' else -1 if c in '}]' else 0) -%}
{%- if at.depth > 1 or c not in '{' -%}{%- set at.part = at.part + c + (' ' if c in ':,' else '') -%}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- set no_thinking = enable_thinking is defined and not enable_thinking -%}
{%- set users = namespace(all=0, seen=0) -%}
{%- for message in messages if message.role == 'user' -%}{%- set users.all = loop.index -%}{%- endfor -%}
[gMASK]<sop>
{%- if tools -%}<|system|>{{ HEAD }}
{%- for tool in tools -%}{{ tool | tojson(ensure_ascii=False) + '\n' }}{%- endfor -%}
{{ TAIL }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}<|system|>{{ 'LINE' + text(message.content) }}
{%- elif message.role == 'user' -%}
{%- set users.seen = users.seen + 1 -%}
<|user|>{{ 'LINE' + text(message.content) }}
SWITCH{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
{%- set given = message.content -%}
{%- set is_list = given is iterable and given is not string and given is not mapping and given -%}
{%- for one in (given if is_list and given[0].type is not defined else [given]) -%}
{{ 'LINE<tool_response>LINE' + text(one.output if one.output is defined else one) + 'LINE</tool_response>' }}
{%- endfor -%}
{%- elif message.role == 'assistant' -%}
{%- set content = text(message.content) -%}
{%- set thought = message.reasoning_content -%}
{%- if thought is not string -%}
{%- set thought = '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1]BARE -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
{%- endif -%}
<|assistant|>THOUGHT
</think>
{%- if content.strip() -%}{{ 'LINE' + content.strip() }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ 'LINE<tool_call>' + function.name + 'LINE' }}
{%- if function.arguments is string -%}{{ decoded(function.arguments) }}
{%- else -%}
{%- for key, value in (function.arguments or {}).items() -%}
{{ argument(key, value if value is string else value | tojson(ensure_ascii=False)) }}
{%- endfor -%}
{%- endif -%}
</tool_call>
{%- endfor -%}
{%- else -%}{{ raise_exception('no role of GLM: ' + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{ OPENING }}{%- endif -%}
""".lstrip()
_PARTS = {
    GLM_45: {
        "SWITCH": """
{%- if no_thinking and not text(message.content).endswith('/nothink') -%}/nothink{%- endif -%}
""".lstrip(),
        "BARE": "",
        "THOUGHT": r"""
{{ '\n<think>' }}
{%- if users.seen == users.all -%}{{ thought.strip() }}{%- endif -%}
""".strip(),
        "OPENING": r"'\n<think></think>' if no_thinking else ''",
    },
    GLM_47: {
        "SWITCH": "",
        "BARE": r".strip('\n')",
        "THOUGHT": """
{%- if thought and (users.seen == users.all or (clear_thinking is defined and not clear_thinking)) -%}
{{ '<think>' + thought.strip() }}
{%- endif -%}
""".strip(),
        "OPENING": "'</think>' if no_thinking else '<think>'",
    },
}
"""Text of each format for the capitalised words in the template."""


def chat_template(format: ChatFormat) -> str:
    """Return the template of a format, for an export whose tokenizer has no template. It gives the text of
    `chat.render` and `chat.chat_prompt`."""
    parts = _PARTS[format] | {"LINE": format.line.replace("\n", r"\n")}
    parts |= {"HEAD": json.dumps(TOOLS_HEAD), "TAIL": json.dumps(format.tools_tail)}
    return re.sub("|".join(parts), lambda match: parts[match[0]], _TEMPLATE)


_TOOLS = ({"type": "function", "function": {"name": "now", "parameters": {"zone": "é"}}},)
_CALLS = [{"name": "now", "arguments": {"zone": "é", "deep": [1, True]}}, {"name": "now", "arguments": {}}]
_PROBE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "old"},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "Wait.", "reasoning_content": "look", "tool_calls": _CALLS},
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two.", "reasoning_content": ""},
    {"role": "tool", "content": "3"},
)
"""A prompt in which the formats of GLM-4, 4.5, 4.7 and 5 and of other models differ."""
_OPTIONS: tuple[Mapping, ...] = ({}, {"enable_thinking": False}, {"clear_thinking": False})


def find_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format of a tokenizer: the one that the template next to it renders; without a template, the
    format of the model that it was loaded for.

    The template runs in Jinja's sandbox in a separate process, with the variables and filters that transformers
    provides.

    Raises:
        UserError: a marker is missing, or the template fails, or renders a probe unlike both formats.
    """
    raise_for_markers(tokenizer)
    if (entry := template_beside(tokenizer_file(tokenizer.path))) is None:
        return format_of_flavor(tokenizer.flavor)
    return _format_of_template(*entry)


def _format_of_template(file: Path, template: str) -> ChatFormat:
    remedy = "use the tokenizer of a GLM-4.5 or 4.6 folder, or of a GLM-4.7 one, or remove the template"
    try:
        theirs_by_options = rendered_apart(template, _PROBE, _TOOLS, _OPTIONS)
    except TemplateFailed as error:
        raise UserError(f"{file}: chat template fails ({error}); {remedy}") from error
    differs: list[tuple[int, str, str, ChatFormat]] = []
    for format in FORMATS:
        ours_by_options = [rendered(chat_template(format), _PROBE, _TOOLS, options) for options in _OPTIONS]
        if theirs_by_options == ours_by_options:
            return format
        ours, theirs = next(pair for pair in zip(ours_by_options, theirs_by_options, strict=True) if pair[0] != pair[1])
        differs.append((len(commonprefix([ours, theirs])), ours, theirs, format))
    at, ours, theirs, nearest = max(differs, key=lambda difference: difference[0])
    raise UserError(
        f"{file}: this chat template is not that of GLM-4.5 and 4.6, nor that of GLM-4.7; beside the nearest, of "
        f"{nearest.models}, it renders {theirs[at : at + 30]!r} where they render {ours[at : at + 30]!r}; {remedy}"
    )


def raise_for_model(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if the template in the folder of a model has another format than the tokenizer, which may be in
    another folder."""
    if (entry := template_beside(folder / "tokenizer.json")) is None:
        return
    if (format := _format_of_template(*entry)) is not format_of(tokenizer):
        raise UserError(
            f"{entry[0]}: the model has the chat format of {format.models}, but the tokenizer {tokenizer.path!r} that "
            f"of {format_of(tokenizer).models}; set model.tokenizer_path = {str(folder)!r}"
        )


format_of = lru_cache(maxsize=4)(find_format)
"""`find_format`, cached per tokenizer: its files do not change while it is in memory."""


def raise_for_kept_thoughts(tokenizer: Tokenizer, setting: str) -> None:
    """Raise UserError if a user configured that past thoughts stay, but the chat format always removes them."""
    if not (format := format_of(tokenizer)).opens_thought:
        raise UserError(
            f"{setting}: the tokenizer {tokenizer.path!r} has the chat format of {format.models}, which removes past "
            "thoughts; leave it out, or take the tokenizer of a GLM-4.7 folder"
        )


def missing_markers(tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens of the chat formats that a tokenizer lacks."""
    return sorted(MARKERS - tokenizer.special.keys())


def raise_for_markers(tokenizer: Tokenizer) -> None:
    """Raise UserError if a tokenizer lacks one of the special tokens of the chat formats."""
    if missing := missing_markers(tokenizer):
        raise UserError(
            f"tokenizer '{tokenizer.path}': has no {', '.join(missing)}; chats need GLM's special tokens: use the "
            "tokenizer of a GLM-4.5, 4.6 or 4.7 folder, or 'builtin'"
        )


def raise_for_source(manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Raise UserError if a source of chats has another format than the model of this tokenizer."""
    if manifest.splits["train"].targets is None:
        return
    format = format_of(tokenizer)
    made = made_in(manifest.settings)
    if made != format.name:
        raise UserError(
            f"{manifest.folder}: its chats have the format of {made}, but the tokenizer {tokenizer.path!r} that of "
            f"{format.name}; prepare the source again with this tokenizer, or take a model of that format"
        )


def raise_for_text(plan: Plan, manifests: Mapping[str, Manifest], tokenizer: Tokenizer) -> None:
    """Raise UserError if a source or the initial weights of a run have another chat format than the tokenizer."""
    for manifest in manifests.values():
        raise_for_source(manifest, tokenizer)
    checkpoint = plan.config.checkpoint
    has_chats = any(manifest.splits["train"].targets is not None for manifest in manifests.values())
    if checkpoint.initial_load_in_hf and has_chats:
        raise_for_model(checkpoint.initial_folder, tokenizer)


def template_beside(file: Path) -> tuple[Path, str] | None:
    """Return the chat template that belongs to a ``tokenizer.json``, and its file; None if there is no template. Raises
    UserError if the file is damaged."""
    template_file = file.with_name(TEMPLATE_FILE)
    config = file.with_name(CONFIG_FILE)
    if file.suffix != ".json":
        return None
    if template_file.is_file():
        return template_file, template_file.read_text(encoding="utf-8")
    if not config.is_file():
        return None
    template = read_json_object(config, "copy it anew").get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):  # several, with names
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise UserError(f"{config}: damaged (chat_template = {str(template):.40} is no text); copy it anew")
    return None if template is None else (config, template)
