"""The list of verbs, and the options that several verbs share: a config with overrides of its keys, and numbers."""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.run_config import RunConfig

VERBS = {
    "launch": "check, compare with this machine, prepare the data and train",
    "train": "train in this process; launch and torchrun start one for each rank",
    "ablate": "train the same run with different keys and compare them in one report",
    "preflight": "check hosts, network, storage and the files of a run before it begins",
    "setup-cluster": "check the hosts of a cluster, make their folders, write hostfile and job script",
    "prepare": "make the shards of the sources that are missing, verify the others",
    "plan": "say how big, how long and whether it fits, on any number of any GPU",
    "benchmark": "measure speed and memory of this machine; see benchmark --help",
    "checkpoint": "list, verify, show or prune checkpoints; see checkpoint --help",
    "rl": "show samples of reinforcement learning; see rl --help",
    "inspect": "count and show what is in a folder of shards; see inspect --help",
    "metrics": "serve the metrics of a run for Prometheus; see metrics --help",
    "plot": "draw metrics of runs, or the curriculum of TOML files, as a picture; see plot --help",
    "convert": "weights from and to Hugging Face folders; see convert --help",
    "generate": "text from a checkpoint or a Hugging Face folder; see generate --help",
    "evaluate": "loss by source and position, needle in a haystack; see evaluate --help",
    "serve-config": "check a folder and print the commands of vLLM and SGLang that serve it",
    "schema": "print the JSON schema of the TOML file",
    "init": "write the shipped TOML files and their schema",
}
"""Help of each verb. The function of the verb ``serve-config`` is `serve_config_command` in
`glm46.commands.serve_config`, and so on."""


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb or of one of its kinds: options cannot be abbreviated."""

    def __init__(self, **options):
        super().__init__(**{"allow_abbrev": False} | options)


def verb_parser(verb: str, **options) -> VerbParser:
    """The parser of a verb that has its own options."""
    return VerbParser(prog=f"python -m glm46 {verb}", **options)


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
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options of a verb, and the tokens that override keys of its config (see `load_config`)."""
    arguments, overrides = parser.parse_known_args(argv)
    # Every key has a dot in its name, so that a mistyped option is not taken for one; a section may be taken out.
    sections = {f"--{name}=" for name in RunConfig.model_fields}
    unknown = [t for t in overrides if t.startswith("--") and "." not in t.partition("=")[0] and t not in sections]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments, tuple(overrides)


def count(text: str) -> int:
    """Type of an option: an integer from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 on")
    return int(text)


def positive(text: str) -> int:
    """Type of an option: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """Type of an option: a number greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number greater than 0")
    return value


def process_count(text: str) -> int | None:
    """Type of the option ``--nproc``: a number of processes, or None for ``auto``."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, or a number of at least 1")
    return int(text)


def require_picture(verb: str, option: str, path: Path, suffixes: Sequence[str]) -> None:
    """Refuse a picture that cannot be drawn, before the work for it.

    Raises:
        UserError: its name has another ending, or matplotlib is not installed.
    """
    if path.suffix not in suffixes:
        raise UserError(f"{verb}: {option} {path}: end the name of the picture with {' or '.join(suffixes)}")
    if find_spec("matplotlib") is None:
        raise UserError(f"{verb}: matplotlib is not installed; pip install matplotlib, or glm46 with its extra [plot]")


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
    # Only the help needs them; the packages may be missing, which `cli.main` reports.
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from glm46.config.schema import describe_keys

    # Without rich's highlighting of numbers and paths: bold is a key, dim is a type.
    console = Console(highlight=False)
    for section in describe_keys():
        console.print()
        console.print(Text.assemble((section.header, "bold green"), "  ", section.meaning))
        for row in section.rows:
            default = row.default if row.default in ("required", "absent") else f"default {row.default}"
            title = Text.assemble((row.key, "bold"), "  ", (f"{row.values}, {default}", "dim"))
            console.print(Padding(title, (0, 0, 0, 2), expand=False))
            console.print(Padding(Text(row.meaning), (0, 0, 0, 6), expand=False))


def fetched_overrides(config: RunConfig) -> list[str]:
    """Overrides that put local folders and files in place of ids of the hub, which are fetched; see `fetched_keys`."""
    from glm46.huggingface.hub import fetched_keys

    return [f"--{key}={place}" for key, place in fetched_keys(config).items()]


def task_module(config: RunConfig) -> str:
    """The module that trains a config."""
    room = "rl" if config.rl is not None else "pretrain" if config.finetune is None else "finetune"
    return f"glm46.{room}.task"
