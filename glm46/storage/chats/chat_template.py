"""The chat format as a Jinja template, which servers read; and the check that a folder's template is this format.

A trained model is served through the template of its folder. If that template renders another format than the one the
model was trained in, nothing fails and answers are bad: so both are compared before work starts.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm46.config.errors import UserError
from glm46.files.file_content import read_json_object
from glm46.storage.chats.chat import TOOLS_HEAD, TOOLS_TAIL, chat_prompt, raise_for_markers
from glm46.storage.chats.conversation import Message, ToolCall
from glm46.storage.data.tokenizer import Tokenizer, tokenizer_file

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"

CHAT_TEMPLATE = (
    r"""
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
{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>\n' }}
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
{%- if message.role in ['system', 'developer'] -%}<|system|>{{ '\n' + text(message.content) }}
{%- elif message.role == 'user' -%}
{%- set users.seen = users.seen + 1 -%}
<|user|>{{ '\n' + text(message.content) }}
{%- if no_thinking and not text(message.content).endswith('/nothink') -%}/nothink{%- endif -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
{%- set given = message.content -%}
{%- set is_list = given is iterable and given is not string and given is not mapping and given -%}
{%- for one in (given if is_list and given[0].type is not defined else [given]) -%}
{{ '\n<tool_response>\n' + text(one.output if one.output is defined else one) + '\n</tool_response>' }}
{%- endfor -%}
{%- elif message.role == 'assistant' -%}
{%- set content = text(message.content) -%}
{%- set thought = message.reasoning_content -%}
{%- if thought is not string -%}
{%- set thought = '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
{%- endif -%}
<|assistant|>{{ '\n<think>' }}
{%- if users.seen == users.all -%}{{ thought.strip() }}{%- endif -%}
</think>
{%- if content.strip() -%}{{ '\n' + content.strip() }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '\n<tool_call>' + function.name + '\n' }}
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
{%- if add_generation_prompt -%}<|assistant|>{{ '\n<think></think>' if no_thinking else '' }}{%- endif -%}
""".lstrip()
    .replace("HEAD", json.dumps(TOOLS_HEAD))
    .replace("TAIL", json.dumps(TOOLS_TAIL))
)
"""For an export whose tokenizer has no template of its own. It gives the text of `render` and `chat_prompt`."""

_TOOLS = ({"type": "function", "function": {"name": "now", "parameters": {"zone": "é"}}},)
_PROBE = (
    Message("system", "Be brief."),
    Message("user", "Hi"),
    Message("assistant", "Hello", "old"),
    Message("user", "When?"),
    Message("assistant", "Wait.", "look", (ToolCall("now", {"zone": "é", "deep": [1, True]}), ToolCall("now"))),
    Message("tool", "1"),
    Message("tool", "2"),
)
"""A prompt in which the formats of GLM-4, 4.5, 4.7 and 5 and of other models differ."""


def raise_for_template(tokenizer: Tokenizer) -> None:
    """Check that a tokenizer has the markers of the chat format, and that a template beside it is this format.

    The template runs in Jinja's sandbox, with what transformers gives it.

    Raises:
        UserError: a marker is missing, or the template fails or renders a probe in another way.
    """
    raise_for_markers(tokenizer)
    if (found := template_beside(tokenizer_file(tokenizer.path))) is None:
        return
    file, template = found
    messages = [
        {
            "role": one.role, "content": one.content, "reasoning_content": one.reasoning,
            "tool_calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in one.tool_calls],
        }
        for one in _PROBE
    ]  # fmt: skip
    remedy = "use the tokenizer of a GLM-4.5 or 4.6 folder, or remove the template"
    for thinking in (True, False):
        want = tokenizer.decode(chat_prompt(tokenizer, _PROBE, tools=_TOOLS, thinking=thinking))
        try:
            got = rendered(template, messages, _TOOLS, {} if thinking else {"enable_thinking": False})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise UserError(f"{file}: chat template fails ({error}); {remedy}") from error
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
            raise UserError(
                f"{file}: this chat template is not that of GLM-4.5 and 4.6: it renders {got[at : at + 30]!r} where "
                f"they render {want[at : at + 30]!r}; {remedy}"
            )


def template_beside(file: Path) -> tuple[Path, str] | None:
    """The chat template that belongs to a ``tokenizer.json``, and its file; None if there is none. Raises UserError if
    the file is damaged."""
    beside, config = file.with_name(TEMPLATE_FILE), file.with_name(CONFIG_FILE)
    if file.suffix != ".json":
        return None
    if beside.is_file():
        return beside, beside.read_text(encoding="utf-8")
    if not config.is_file():
        return None
    template = read_json_object(config, "copy it anew").get("chat_template")
    if isinstance(template, list) and all(isinstance(one, dict) for one in template):  # several, with names
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise UserError(f"{config}: damaged (chat_template = {str(template):.40} is no text); copy it anew")
    return None if template is None else (config, template)


def rendered(template: str, messages: Sequence[Mapping], tools: Sequence[Mapping], options: Mapping) -> str:
    """The prompt that a template makes, in Jinja's sandbox with what transformers gives it. Raises
    jinja2.TemplateError if the template fails; it may raise other errors."""
    blocks = {"trim_blocks": True, "lstrip_blocks": True}
    environment = ImmutableSandboxedEnvironment(**blocks, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(value, ensure_ascii=ensure_ascii)
    given = {"messages": messages, "tools": list(tools), "add_generation_prompt": True}
    return environment.from_string(template).render(**given, **options)
