"""Removes settings from tokenizer files that would give readers of an export other tokens than training had.

`tokenizers` saves the truncation and padding of its last call in `tokenizer.json`; transformers saves arguments of
calls in `tokenizer_config.json`. A program that opens such a folder truncates or pads every text without being asked
to.
"""

import json
from collections.abc import Mapping
from typing import Any

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_CALL_SETTINGS = ("truncation", "padding")
"""Keys of `tokenizer.json` that are null unless a caller enabled them."""
_CALL_ARGUMENTS = ("max_length", "stride", "truncation", "truncation_strategy", "padding", "pad_to_multiple_of")
"""Keys of `tokenizer_config.json` that are arguments of a call."""
_SWITCHES = ("add_bos_token", "add_eos_token", "split_special_tokens")
"""Keys of `tokenizer_config.json` that add tokens to a text, or split markers such as <|user|>."""


def exported_tokenizer(
    files: Mapping[str, bytes], *, max_length: int, prefix_space: bool | None = None
) -> dict[str, bytes]:
    """Return the files of a tokenizer for an export.

    A file keeps its bytes if it needs no change or is not a JSON object.

    Args:
        files: contents by file name.
        max_length: positions of the exported model. A smaller `model_max_length` is raised to it, because servers take
            the smaller one of the two.
        prefix_space: True if training put a space before each text; None if unknown.
    """
    exported = dict(files)
    for name, content in files.items():
        if name not in (TOKENIZER_JSON, TOKENIZER_CONFIG):
            continue
        table = _json_object(content)
        if table is None:
            continue
        if name == TOKENIZER_JSON:
            changed = _tokenizer_json(table)
        else:
            changed = _tokenizer_config(table, max_length, prefix_space)
        if changed != table:
            exported[name] = json.dumps(changed, ensure_ascii=False, indent=2).encode() + b"\n"
    return exported


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


def _tokenizer_json(table: dict[str, Any]) -> dict[str, Any]:
    return table | {key: None for key in _CALL_SETTINGS if key in table}


def _tokenizer_config(table: dict[str, Any], max_length: int, prefix_space: bool | None) -> dict[str, Any]:
    kept = {key: value for key, value in table.items() if key not in _CALL_ARGUMENTS}
    kept |= {key: False for key in _SWITCHES if kept.get(key)}
    if prefix_space is not None and "add_prefix_space" in kept:
        kept["add_prefix_space"] = prefix_space
    length = kept.get("model_max_length")
    if isinstance(length, int | float) and length < max_length:
        kept["model_max_length"] = max_length
    return kept
