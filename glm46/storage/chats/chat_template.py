"""Jinja templates of the chat formats, for servers; and detection of a folder's format from what its template renders.

A trained model is served through the template of its folder. If that template renders another format than the one the
model was trained in, nothing fails but answers are bad: so the template decides the format, before work starts.
"""

from collections.abc import Mapping
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError
from glm46.files.file_content import read_json_object
from glm46.run.plan import Plan
from glm46.storage.chats.chat_format import FORMATS, MARKERS, ChatFormat, format_of_flavor, made_in
from glm46.storage.chats.render_template import TemplateFailed, rendered, rendered_apart
from glm46.storage.chats.template_text import chat_template
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import Tokenizer, tokenizer_file

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

_NOW = {"name": "now", "parameters": {"zone": "é"}, "strict": True}
_TOOLS = (
    {"type": "function", "function": _NOW},
    {"type": "function", "function": {"name": "later", "defer_loading": True}},
)
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
    {"role": "assistant", "content": "Three."},
    {"role": "tool", "content": "4"},
)
"""A prompt in which the formats of the family, of GLM-4 and of other models differ."""
_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"enable_thinking": False},
    {"clear_thinking": False},
    {"reasoning_effort": "high"},
)


def find_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format of a tokenizer: the one that the template next to it renders; without a template, the
    format of the model that it was loaded for.

    The template runs in Jinja's sandbox in a separate process, with the variables and filters that transformers
    provides.

    Raises:
        UserError: a marker is missing, or the template fails, or renders a probe unlike all formats.
    """
    raise_for_markers(tokenizer)
    if (entry := template_beside(tokenizer_file(tokenizer.path))) is None:
        return format_of_flavor(tokenizer.flavor)
    return _format_of_template(*entry)


def _format_of_template(file: Path, template: str) -> ChatFormat:
    models = f"{', '.join(format.models for format in FORMATS[:-1])} or {FORMATS[-1].models}"
    remedy = f"use the tokenizer of a folder of {models}, or remove the template"
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
        f"{file}: this chat template is not that of {models}; beside the nearest, of {nearest.models}, it renders "
        f"{theirs[at : at + 30]!r} where that renders {ours[at : at + 30]!r}; {remedy}"
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
            "thoughts; leave it out, or take the tokenizer of a folder of GLM-4.7 or later"
        )


def raise_for_effort(tokenizer: Tokenizer, setting: str) -> None:
    """Raise UserError if a user configured a reasoning effort, but the chat format states none."""
    if not (format := format_of(tokenizer)).states_effort:
        models = " or ".join(other.models for other in FORMATS if other.states_effort)
        raise UserError(
            f"{setting}: the tokenizer {tokenizer.path!r} has the chat format of {format.models}, which states no "
            f"effort; leave it out, or take the tokenizer of a folder of {models}"
        )


def missing_markers(tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens of the chat formats that a tokenizer lacks."""
    return sorted(MARKERS - tokenizer.special.keys())


def raise_for_markers(tokenizer: Tokenizer) -> None:
    """Raise UserError if a tokenizer lacks one of the special tokens of the chat formats."""
    if missing := missing_markers(tokenizer):
        raise UserError(
            f"tokenizer '{tokenizer.path}': has no {', '.join(missing)}; chats need GLM's special tokens: use the "
            "tokenizer of a GLM-4.5, 4.6, 4.7 or 5 folder, or 'builtin'"
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
