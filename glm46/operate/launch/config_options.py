"""The options of verbs that read a config: the file, and overrides of its keys."""

import argparse
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glm46.compute.distributed.environment import launched_world_size, set_variables
from glm46.config.options import SCRIPT_VARIABLE, VERBS, VerbParser, verb_parser

if TYPE_CHECKING:  # the classes of keys take longer to import than all before the first line
    from glm46.config.run_config import RunConfig

_IN_CACHE = re.compile(r"--[^=]+=.*/(?:models|datasets)--[^/]+/snapshots/")
"""An override with a place in the cache of the hub, as `fetched_overrides` makes them."""


def config_parser(verb: str) -> VerbParser:
    """Parser of a verb that reads a config: ``--config FILE``, and ``--help`` that also prints every key.

    Parse with `parse_with_overrides`.
    """
    meaning = VERBS[verb]
    parser = verb_parser(
        verb,
        description=f"{meaning[0].upper()}{meaning[1:]}.",
        epilog="Any key of the file can be stated again as --section.key VALUE; VALUE is read as TOML, a bare word is "
        "a string, and --section.key= or --section= takes the key or the section out of the file.",
        usage=f"python -m glm46 {verb} --config FILE [options] [--section.key VALUE ...]",
        add_help=False,
    )
    parser.add_argument("--help", "-h", action=_KeysHelp)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the TOML file of the run")
    return parser


def parse_with_overrides(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, is_start: bool = False
) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options of a verb, and the tokens that override keys of its config (see `load_config`). With `is_start` what
    is started is printed before the imports that take seconds, but not by what somebody starts who has printed it."""
    arguments, overrides = parser.parse_known_args(argv)
    is_told = launched_world_size() or set_variables([SCRIPT_VARIABLE]) or "--from-hostfile" in argv
    if is_start and not is_told:
        print(f"starting     {shlex.join([str(arguments.config), *overrides])}", flush=True)
    from glm46.config.run_config import RunConfig

    # Every key has a dot in its name, so that a mistyped option is not taken for one; a section may be taken out.
    sections = {f"--{name}=" for name in RunConfig.model_fields}
    unknown = [t for t in overrides if t.startswith("--") and "." not in t.partition("=")[0] and t not in sections]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments, tuple(overrides)


class _KeysHelp(argparse.Action):
    """``--help`` of a verb that reads a config: its options, then every key of the file."""

    def __init__(self, option_strings, dest, **_):
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="show this, and every key of the file")

    def __call__(self, parser, namespace, values, option_string=None):
        parser.print_help()
        print_keys()
        parser.exit()


def print_keys() -> None:
    """Print each section of a config with its keys: values and default on one line, the meaning below it."""
    from glm46.config.schema import describe_keys  # only the help needs it

    width = shutil.get_terminal_size().columns
    bold, dim, plain = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")
    for section in describe_keys():
        head, *rest = textwrap.wrap(f"{section.header}  {section.meaning}", width)
        print("\n".join(["", f"{bold}{section.header}{plain}{head[len(section.header) :]}", *rest]))
        for row in section.rows:
            default = row.default if row.default in ("required", "absent") else f"default {row.default}"
            head, *rest = textwrap.wrap(
                f"{row.key}  {row.values}, {default}", width, initial_indent="  ", subsequent_indent="  ",
                break_on_hyphens=False,
            )  # fmt: skip
            marked = f"  {bold}{row.key}{plain}{dim}{head[2 + len(row.key) :]}"
            print("\n".join([marked, *rest]) + plain)
            meaning, indent = row.meaning.replace("``", ""), " " * 6
            print(textwrap.fill(meaning, width, initial_indent=indent, subsequent_indent=indent))


def fetched_overrides(config: "RunConfig") -> list[str]:
    """Overrides that put local folders and files in place of ids of the hub, which are fetched; see `fetched_keys`."""
    from glm46.storage.huggingface.hub import fetched_keys

    return [f"--{key}={place}" for key, place in fetched_keys(config).items()]


def load_fetched(path: Path, overrides: Sequence[str], *, world_size: int | None) -> "RunConfig":
    """A config with local folders and files in place of its ids of the hub, which `RunConfig.ids` keeps. What the
    launcher of several ranks has fetched, its overrides put into the places of the cache."""
    from glm46.config.hub_ids import hub_keys
    from glm46.config.loader import load_config

    stated = config = load_config(path, overrides, world_size=world_size)
    fetched, of_launcher = fetched_overrides(config), [word for word in overrides if _IN_CACHE.match(word)]
    if fetched:
        config = load_config(path, [*overrides, *fetched], world_size=world_size)
    elif of_launcher:
        stated = load_config(path, [word for word in overrides if word not in of_launcher], world_size=world_size)
    places = dict(word[2:].split("=", 1) for word in (*of_launcher, *fetched))
    # A folder of another repository was stated in place of the id.
    return config.with_ids({
        found.key: found.value for found in hub_keys(stated)
        if fetched or f"--{found.repository.replace('/', '--')}/" in places.get(found.key, "")
    })  # fmt: skip


def task_module(config: "RunConfig") -> str:
    """The module that trains a config."""
    room = "rl" if config.rl is not None else "pretrain" if config.finetune is None else "finetune"
    return f"glm46.tasks.{room}.task"
