"""``python -m glm46 prepare``: make the sources of a config, or one source from files (``--input``, ``--recipe``)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli
from pydantic import ValidationError

from glm46.config.errors import UserError
from glm46.config.fields import hub_keys
from glm46.config.loader import load_config, read_table
from glm46.config.options import VerbParser, verb_parser
from glm46.config.overrides import key_parts
from glm46.config.rules import described
from glm46.config.rules_fields import idle_faults
from glm46.config.text_recipe import TextRecipe
from glm46.config.validation import translate
from glm46.files.standard_output import print_line
from glm46.operate.launch.config_options import config_parser, parse_with_overrides
from glm46.operate.launch.fetched_config import fetched_overrides
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.huggingface.hub import fetched_keys, local_inputs
from glm46.storage.huggingface.stored_folder import local_output


def prepare_command(argv: Sequence[str]) -> int:
    """Turn text into shards; returns the exit code.

    Raises:
        UserError: every key or file that cannot be used.
    """
    has_recipe = any(token.partition("=")[0] in ("--input", "--recipe") for token in argv)
    source = _recipe_of(argv) if has_recipe else _plan_of(argv)
    from glm46.storage.prepare.pipeline import prepare_run, prepare_text  # numpy: --help and refusals need none

    if isinstance(source, TextRecipe):
        with local_output(Path(source.output)) as folder:
            local_source = source.model_copy(update={"output": str(folder)})
            prepare_text(local_source, report=print_line, local_inputs=local_inputs)
        return 0
    for name, manifest in prepare_run(source, report=print_line, local_inputs=local_inputs).items():
        validation = manifest.splits["validation"]
        train = manifest.splits["train"]
        print(f"{name} in {manifest.folder}: {train.tokens:,} tokens to train on, {validation.tokens:,} held out")
    return 0


def _plan_of(argv: Sequence[str]) -> Plan:
    parser = config_parser("prepare")
    parser.epilog = f"With --input FILES --output FOLDER it makes a source of any text. {parser.epilog}"
    arguments, overrides = parse_with_overrides(parser, argv)
    fetched = fetched_overrides(load_config(arguments.config, overrides))
    return resolve_plan(load_config(arguments.config, [*overrides, *fetched]))


def _recipe_of(argv: Sequence[str]) -> TextRecipe:
    arguments = vars(_recipe_parser().parse_args(argv))
    file = arguments.pop("recipe")
    options = {key: _value(key, text) for key, text in arguments.items() if text is not None}
    recipe = read_recipe(file, options)
    return recipe.model_copy(update=fetched_keys(hub_keys(recipe)))


def read_recipe(file: Path | None, options: dict[str, Any]) -> TextRecipe:
    """Read a recipe from a TOML file; keys of the command line replace those of the file.

    Raises:
        UserError: one fault per key that is unknown, missing or wrong.
    """
    table = {} if file is None else read_table(file)
    try:
        recipe = TextRecipe.model_validate(table | options)
        faults = [described(recipe, broken) for broken in idle_faults(recipe)]
    except ValidationError as error:
        faults = translate(error, TextRecipe)
    if faults:
        command_line = "command line"
        place = file or command_line
        origins = (command_line if key_parts(fault.keys[0])[0] in options else place for fault in faults)
        raise UserError(*(f"{origin}: {fault.message}" for origin, fault in zip(origins, faults, strict=True)))
    return recipe


def _recipe_parser() -> VerbParser:
    parser = verb_parser(
        "prepare",
        description="Turn files of text into a folder of shards.",
        epilog="Interrupted work goes on when the same command is given again.",
    )
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="TOML file of the keys below")
    for key, field in TextRecipe.model_fields.items():
        meaning = " ".join(str(field.description).split()).replace("%", "%%")
        is_list = key in ("input", "decontaminate")
        shape: dict[str, Any] = {"nargs": "+", "action": "extend"} if is_list else {}
        parser.add_argument(f"--{key}", help=meaning, metavar="VALUE", **shape)
    return parser


def _value(key: str, text: str | list[str]) -> object:
    """Return the value of a key of the recipe from its text; text that is not a number stays text and is refused
    later."""
    if TextRecipe.model_fields[key].annotation in (int, float, int | None):
        try:
            return tomli.loads(f"value = {text}")["value"]
        except tomli.TOMLDecodeError:
            return text
    return text
