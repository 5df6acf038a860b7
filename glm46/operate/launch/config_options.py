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
"""Pattern of an override with a path in the cache of the hub, as `fetched_overrides` makes it."""


def config_parser(verb: str) -> VerbParser:
    """Parser of a verb that reads a config: ``--config FILE``, and ``--help keys`` that prints every key.

    Parse with `parse_with_overrides`.
    """
    meaning = VERBS[verb]
    parser = verb_parser(
        verb,
        description=f"{meaning[0].upper()}{meaning[1:]}.",
        epilog="Any key of the file can be stated again as --section.key VALUE; VALUE is read as TOML, a bare word is "
        "a string, and --section.key= or --section= takes the key or the section out of the file. "
        "--help keys prints all keys, as docs/reference/keys.md does.",
        usage=f"python -m glm46 {verb} --config FILE [options] [--section.key VALUE ...]",
        add_help=False,
    )
    parser.add_argument("--help", "-h", action=_KeysHelp)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the TOML file of the run")
    return parser


def parse_with_overrides(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, is_start: bool = False
) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Parse the options of a verb, and the words that override keys of its config (see `load_config`).

    Args:
        is_start: print what is started before the imports that take seconds, unless the program that started this one
            has printed it.
    """
    arguments, overrides = parser.parse_known_args(argv)
    is_printed = launched_world_size() or set_variables([SCRIPT_VARIABLE]) or "--from-hostfile" in argv
    if is_start and not is_printed:
        print(f"starting     {shlex.join([str(arguments.config), *overrides])}", flush=True)
    from glm46.config.run_config import RunConfig

    # Every key has a dot in its name, so a mistyped option is not mistaken for a key; a section may be removed.
    sections = {f"--{name}=" for name in RunConfig.model_fields}
    unknown = [
        word
        for word in overrides
        if word.startswith("--") and "." not in word.partition("=")[0] and word not in sections
    ]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments, tuple(overrides)


class _KeysHelp(argparse.Action):
    """Action of ``--help`` for a verb that reads a config: prints its options; ``--help keys`` prints every key."""

    def __init__(self, option_strings, dest, **_):
        super().__init__(
            option_strings,
            dest=argparse.SUPPRESS,
            nargs="?",
            metavar="keys",
            help="show this; with the word keys, every key of the file",
        )

    def __call__(self, parser, namespace, values, option_string=None):
        if values == "keys":
            print_keys()
        elif values is None:
            parser.print_help()
        else:
            parser.error(f"{option_string} {values}: write --help, or --help keys")
        parser.exit()


def print_keys() -> None:
    """Print each section of a config with its keys: values and default on one line, the meaning below it."""
    from glm46.config.schema import describe_keys  # only the help needs it

    width = shutil.get_terminal_size().columns
    is_terminal = sys.stdout.isatty()
    bold = "\x1b[1m" if is_terminal else ""
    dim = "\x1b[2m" if is_terminal else ""
    plain = "\x1b[0m" if is_terminal else ""
    for section in describe_keys():
        head, *rest = textwrap.wrap(f"{section.header}  {section.meaning}", width)
        print("\n".join(["", f"{bold}{section.header}{plain}{head[len(section.header) :]}", *rest]))
        for row in section.rows:
            default = row.default if row.default in ("required", "absent") else f"default {row.default}"
            head, *rest = textwrap.wrap(
                f"{row.key}  {row.values}, {default}",
                width,
                initial_indent="  ",
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            marked = f"  {bold}{row.key}{plain}{dim}{head[2 + len(row.key) :]}"
            print("\n".join([marked, *rest]) + plain)
            meaning = row.meaning.replace("``", "")
            indent = " " * 6
            print(textwrap.fill(meaning, width, initial_indent=indent, subsequent_indent=indent))


def fetched_overrides(config: "RunConfig") -> list[str]:
    """Fetch the ids of the hub, and return overrides with local folders and files instead; see `fetched_keys`."""
    from glm46.storage.huggingface.hub import fetched_keys

    return [f"--{key}={path}" for key, path in fetched_keys(config).items()]


def load_fetched(path: Path, overrides: Sequence[str], *, world_size: int | None) -> "RunConfig":
    """Load a config with local folders and files instead of its ids of the hub, which `RunConfig.ids` keeps. The
    launcher of several ranks has fetched them already: its overrides name paths in the cache."""
    from glm46.config.hub_ids import hub_keys
    from glm46.config.loader import load_config

    config = load_config(path, overrides, world_size=world_size)
    config_with_ids = config
    fetched = fetched_overrides(config)
    cached = [word for word in overrides if _IN_CACHE.match(word)]
    if fetched:
        config = load_config(path, [*overrides, *fetched], world_size=world_size)
    elif cached:
        uncached = [word for word in overrides if word not in cached]
        config_with_ids = load_config(path, uncached, world_size=world_size)
    paths = dict(word[2:].split("=", 1) for word in (*cached, *fetched))
    # An override may name a folder of another repository than the id.
    return config.with_ids(
        {
            hub_key.key: hub_key.value
            for hub_key in hub_keys(config_with_ids)
            if fetched or f"--{hub_key.repository.replace('/', '--')}/" in paths.get(hub_key.key, "")
        }
    )


def task_module(config: "RunConfig") -> str:
    """Return the module with the task of a config."""
    if config.rl is not None:
        return "glm46.tasks.rl.task"
    package = "pretrain" if config.finetune is None else "finetune"
    return f"glm46.tasks.{package}.task"
