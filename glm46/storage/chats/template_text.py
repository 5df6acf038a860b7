"""The text of the Jinja templates that exports get: one template, whose capitalised words each format fills in."""

import json
import re

from glm46.storage.chats.chat_format import GLM_45, GLM_47, GLM_51, GLM_52, TOOLS_HEAD, ChatFormat

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
DESCRIBED{%- set no_thinking = enable_thinking is defined and not enable_thinking -%}
{%- set users = namespace(all=0, seen=0) -%}
{%- for message in messages if message.role == 'user' -%}{%- set users.all = loop.index -%}{%- endfor -%}COUNTED
[gMASK]<sop>EFFORT
{%- if tools -%}<|system|>{{ HEAD }}
{%- for tool in tools -%}LISTED{%- endfor -%}
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
LOADED{%- for one in (given if is_list and MANY else [given]) -%}
{{ 'LINE<tool_response>LINE' + text(one.output if one.output is defined else one) + 'LINE</tool_response>' }}
{%- endfor -%}DONE
{%- elif message.role == 'assistant' -%}
{%- set content = text(message.content) -%}
{%- set thought = message.reasoning_content -%}
{%- if thought is not string -%}
{%- set thought = ABSENT -%}
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
_KEEPS = "(users.seen == users.all or (clear_thinking is defined and not clear_thinking))"
"""Whether the thought of a turn stays in the prompt."""

_GLM_45 = {
    "DESCRIBED": "",
    "COUNTED": "",
    "EFFORT": "",
    "LISTED": r"{{ tool | tojson(ensure_ascii=False) + '\n' }}",
    "SWITCH": """
{%- if no_thinking and not text(message.content).endswith('/nothink') -%}/nothink{%- endif -%}
""".lstrip(),
    "LOADED": "",
    "MANY": "given[0].type is not defined",
    "DONE": "",
    "ABSENT": "''",
    "BARE": "",
    "THOUGHT": r"""
{{ '\n<think>' }}
{%- if users.seen == users.all -%}{{ thought.strip() }}{%- endif -%}
""".strip(),
    "OPENING": r"'\n<think></think>' if no_thinking else ''",
}
_GLM_47 = _GLM_45 | {
    "SWITCH": "",
    "BARE": r".strip('\n')",
    "THOUGHT": f"""
{{%- if thought and {_KEEPS} -%}}
{{{{ '<think>' + thought.strip() }}}}
{{%- endif -%}}
""".strip(),
    "OPENING": "'</think>' if no_thinking else '<think>'",
}
_GLM_51 = _GLM_47 | {
    "DESCRIBED": r"""
{%- macro described(function) -%}
{{ '{' }}
{%- for key, value in function.items() if key not in ['defer_loading', 'strict'] -%}
{{ (', ' if not loop.first else '') + '"' + key + '": ' + value | tojson(ensure_ascii=False) }}
{%- endfor -%}
{{ '}\n' }}
{%- endmacro -%}
""".lstrip(),
    "COUNTED": r"""
{%- set users.thinking = [] -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set users.seen = users.seen + 1 -%}
{%- elif message.role == 'assistant' and message.reasoning_content is string and users.seen -%}
{%- set users.thinking = users.thinking + [users.seen] -%}
{%- endif -%}
{%- endfor -%}
{%- set users.seen = 0 -%}
""".rstrip(),
    "LISTED": """
{%- set function = tool.function or tool -%}
{%- if not function.defer_loading -%}{{ described(function) }}{%- endif -%}
""".strip(),
    "LOADED": r"""
{%- if is_list and given[0].type == 'tool_reference' -%}
{{ '<tool_response><tools>\n' }}
{%- for reference in given -%}
{%- for tool in tools or [] -%}
{%- set function = tool.function or tool -%}
{%- if function.name == reference.name -%}{{ described(function) }}{%- endif -%}
{%- endfor -%}
{%- endfor -%}
</tools></tool_response>
{%- else -%}
""".lstrip(),
    "MANY": "given[0].output is defined",
    "DONE": "\n{%- endif -%}",
    "ABSENT": "none",
    "BARE": "",
    "THOUGHT": f"""
{{%- set recent = users.seen == users.all -%}}
{{%- if thought is none and (not no_thinking if recent else users.seen in users.thinking) -%}}
{{%- set thought = '' -%}}
{{%- endif -%}}
{{%- if thought is not none and {_KEEPS} -%}}{{{{ '<think>' + thought }}}}{{%- endif -%}}
""".strip(),
}
_GLM_52 = _GLM_51 | {
    "COUNTED": "",
    "EFFORT": """
{%- if not no_thinking -%}<|system|>Reasoning Effort: {{ 'High' if reasoning_effort == 'high' else 'Max' }}
{%- endif -%}""",
    "ABSENT": "''",
    "THOUGHT": f"""
{{{{ '<think>' }}}}
{{%- if {_KEEPS} -%}}{{{{ thought }}}}{{%- endif -%}}
""".strip(),
    "OPENING": "'<think></think>' if no_thinking else '<think>'",
}
_PARTS = {GLM_45: _GLM_45, GLM_47: _GLM_47, GLM_51: _GLM_51, GLM_52: _GLM_52}
"""Text of each format for the capitalised words in the template."""


def chat_template(format: ChatFormat) -> str:
    """Return the template of a format, for an export whose tokenizer has no template. It gives the text of
    `chat.render` and `chat.chat_prompt`."""
    parts = _PARTS[format] | {"LINE": format.line.replace("\n", r"\n")}
    parts |= {"HEAD": json.dumps(TOOLS_HEAD), "TAIL": json.dumps(format.tools_tail)}
    return re.sub("|".join(parts), lambda match: parts[match[0]], _TEMPLATE)
