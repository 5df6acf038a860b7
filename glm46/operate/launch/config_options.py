"""The options of verbs that read a config: the file, and overrides of its keys."""

import argparse
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from glm46.compute.distributed.environment import launched_world_size, variables_that_are_set
from glm46.config.options import SCRIPT_VARIABLE, VERBS, VerbParser, verb_parser


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
    is_printed = launched_world_size() or variables_that_are_set([SCRIPT_VARIABLE]) or "--from-hostfile" in argv
    if is_start and not is_printed:
        print(f"starting     {shlex.join([str(arguments.config), *overrides])}", flush=True)
    # Imported here: the classes of keys take longer to import than all before the first line.
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

    def __init__(self, option_strings: Sequence[str], **_: object) -> None:
        super().__init__(
            option_strings,
            dest=argparse.SUPPRESS,
            nargs="?",
            metavar="keys",
            help="show this; with the word keys, every key of the file",
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        if values == "keys":
            print_keys()
        elif values is None:
            parser.print_help()
        else:
            parser.error(f"{option_string} {values}: write --help, or --help keys")
        parser.exit()


def print_keys() -> None:
    """Print each section of a config with its keys: values and default on one line, the meaning below it."""
    from glm46.config.schema import describe_keys  # needs the classes of keys too

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
