"""The tokenizer files and generation config of a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError
from glm46.files.file_content import read_json_object
from glm46.storage.chats.chat_format import format_of_flavor
from glm46.storage.chats.chat_template import TEMPLATE_FILE, missing_markers
from glm46.storage.chats.template_text import chat_template
from glm46.storage.data.tokenizer import END_OF_TEXT, Tokenizer, tokenizer_file
from glm46.storage.data.tokenizer_hf import byte_characters, parts_below
from glm46.storage.huggingface.config_json import stated_ids
from glm46.storage.huggingface.exported_tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, exported_tokenizer

_STOP_TOKENS = (END_OF_TEXT, "<|user|>", "<|observation|>")
"""GLM has no end-of-turn token: the token of the next role ends a turn."""

GENERATION_CONFIG = "generation_config.json"

_COPIED = (TOKENIZER_JSON, TOKENIZER_CONFIG, "special_tokens_map.json", TEMPLATE_FILE, GENERATION_CONFIG)
"""Files of a tokenizer folder that are copied; generation_config.json gets all stop ids."""


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a text or a turn; the first one is also used for padding."""
    return [tokenizer.special[name] for name in _STOP_TOKENS if name in tokenizer.special]


def files_beside_weights(tokenizer: Tokenizer, *, max_length: int) -> dict[str, bytes]:
    """Return file contents by name: the loaded ``tokenizer.json``, or one made from a rank file, and the files that
    belong to it; without settings by which readers would truncate, pad or mark texts, see `exported_tokenizer`.

    Args:
        max_length: longest sequence of the model, in tokens.

    Raises:
        UserError: see `tokenizer_files`; or a generation_config.json is damaged.
    """
    files = {GENERATION_CONFIG: _generation_config(None, tokenizer)}
    file = tokenizer_file(tokenizer.path)
    if file.suffix != ".json":
        return files | tokenizer_files(tokenizer, max_length=max_length)
    # The other files of a folder belong to its tokenizer.json, not to a file with another name.
    folder = [file.with_name(name) for name in _COPIED if file.name == TOKENIZER_JSON]
    copied = {path.name: path.read_bytes() for path in folder if path.is_file()}
    if TOKENIZER_CONFIG not in copied:
        files |= _description(tokenizer, max_length)
    if GENERATION_CONFIG in copied:
        copied[GENERATION_CONFIG] = _generation_config(file.with_name(GENERATION_CONFIG), tokenizer)
    files |= copied | {TOKENIZER_JSON: file.read_bytes()}
    return exported_tokenizer(files, max_length=max_length, prefix_space=tokenizer.prefix_space)


def _generation_config(file: Path | None, tokenizer: Tokenizer) -> bytes:
    """Return the generation config of the tokenizer's folder, or a new one, with all ids that end a text or a turn: a
    server stops only at these. Raises UserError if it is damaged."""
    ids = stop_ids(tokenizer)
    config = {"_from_model_config": True, "eos_token_id": ids, "pad_token_id": ids[0]}
    config |= format_of_flavor(tokenizer.flavor).sampling
    if file is not None:
        config = read_json_object(file, "copy it anew, or remove it")
        old_ids = stated_ids(config, file)
        if set(ids) <= set(old_ids):
            return file.read_bytes()
        config["eos_token_id"] = list(dict.fromkeys([*old_ids, *ids]))
    return json.dumps(config, indent=2).encode() + b"\n"


def tokenizer_files(tokenizer: Tokenizer, *, max_length: int) -> dict[str, bytes]:
    """Make the files of `files_beside_weights` for a tokenizer that was not loaded from a ``tokenizer.json``. Raises
    UserError if a token is not the merge of two others, so no list of merges can produce it."""
    return _description(tokenizer, max_length) | {TOKENIZER_JSON: _json(_tokenizer_json(tokenizer))}


def _description(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Return the files that transformers reads with a ``tokenizer.json``."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "padding_side": "left",
    }
    files = {TOKENIZER_CONFIG: _json(config)}
    if not missing_markers(tokenizer):
        files[TEMPLATE_FILE] = chat_template(format_of_flavor(tokenizer.flavor)).encode()
    return files


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"


def _tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    character = byte_characters()
    written = {piece: "".join(character[byte] for byte in piece) for piece in tokenizer.ranks}
    merges = []
    for piece, rank in sorted(tokenizer.ranks.items(), key=lambda item: item[1]):
        parts = parts_below(tokenizer.ranks, piece, rank)
        if len(parts) > 2:
            raise UserError(
                f"tokenizer '{tokenizer.path}': token {rank} ({piece!r}) is not the merge of two tokens, so "
                f"{TOKENIZER_JSON} cannot hold it; use a tokenizer that has a {TOKENIZER_JSON}"
            )
        if len(parts) == 2:  # otherwise a single byte
            merges.append([written[part] for part in parts])
    added = [
        {
            "id": token_id,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_id in tokenizer.control_ids,
        }
        for name, token_id in sorted(tokenizer.special.items(), key=lambda item: item[1])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {written[piece]: rank for piece, rank in tokenizer.ranks.items()},
            "merges": merges,
        },
    }
