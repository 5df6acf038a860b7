"""The verbs ``prepare --input`` (keys of a recipe on the command line, over those of a file) and ``inspect``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import tomli
from pydantic import ValidationError

from glm46.config.errors import UserError
from glm46.config.overrides import key_parts
from glm46.config.rules_effect import stated_keys_have_an_effect
from glm46.config.text_recipe import TextRecipe
from glm46.config.validation import translate, without_lists
from glm46.data.inspect_source import describe, show_rows
from glm46.data.manifest import load_manifest
from glm46.data.tokenizer import load_tokenizer
from glm46.prepare.pipeline import prepare_text


def prepare_command(argv: Sequence[str]) -> int:
    """Turn text into shards; returns the exit code.

    Raises:
        UserError: every key or file that cannot be used.
    """
    arguments = vars(_parser().parse_args(argv))
    file = arguments.pop("recipe")
    stated = {key: _value(key, text) for key, text in arguments.items() if text is not None}
    prepare_text(read_recipe(file, stated), report=print)
    return 0


def inspect_command(argv: Sequence[str]) -> int:
    """Show what is in a folder of shards; returns the exit code.

    Raises:
        UserError: the folder is not a source, is damaged, or belongs to another tokenizer.
    """
    parser = argparse.ArgumentParser(
        prog="python -m glm46 inspect", allow_abbrev=False, description="Verify a folder of shards and show its text.",
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="a folder that prepare has made")
    parser.add_argument("--rows", type=int, default=2, help="rows to show as text, picked at random")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens per row")
    parser.add_argument("--seed", type=int, default=0, help="another one shows other rows")
    parser.add_argument("--tokenizer", default="builtin", help="what the shards were made with")
    arguments = parser.parse_args(argv)
    for line in describe(arguments.folder):
        print(line)
    tokenizer = load_tokenizer(arguments.tokenizer)
    manifest = load_manifest(arguments.folder, full=False)
    sizes = {"rows": max(0, arguments.rows), "seq_len": max(1, arguments.seq_len), "seed": arguments.seed}
    for line in show_rows(manifest, tokenizer, **sizes):
        print(line)
    return 0


def read_recipe(file: Path | None, stated: dict) -> TextRecipe:
    """A recipe from a TOML file with keys put over it.

    Raises:
        UserError: one fault per key that is unknown, missing or wrong.
    """
    table = {}
    if file is not None:
        try:
            table = tomli.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from error
        except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: not valid TOML: {error}") from error
    try:
        recipe = TextRecipe.model_validate(without_lists(table | stated))
        faults = list(stated_keys_have_an_effect(recipe))
    except ValidationError as error:
        faults = translate(error, TextRecipe)
    if faults:
        origins = {key: "command line" for key in stated}
        place = file or "command line"
        raise UserError(*(f"{origins.get(key_parts(fault.keys[0])[0], place)}: {fault.message}" for fault in faults))
    return recipe


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m glm46 prepare", allow_abbrev=False, description="Turn files of text into a folder of shards.",
        epilog="Interrupted work goes on when the same command is given again.",
    )  # fmt: skip
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="TOML file of the keys below")
    for key, field in TextRecipe.model_fields.items():
        meaning = " ".join(field.description.split()).replace("%", "%%")
        many = key in ("input", "decontaminate", "pack_lengths")
        shape = {"nargs": "+", "action": "extend"} if many else {}
        parser.add_argument(f"--{key}", help=meaning, metavar="VALUE", **shape)
    return parser


def _value(key: str, text: str | list[str]):
    """Lists and words are text; numbers are numbers."""
    if isinstance(text, list):
        return [int(word) if key == "pack_lengths" and word.isdecimal() else word for word in text]
    if TextRecipe.model_fields[key].annotation in (int, float, int | None):
        try:
            return tomli.loads(f"value = {text}")["value"]
        except tomli.TOMLDecodeError:
            return text
    return text
