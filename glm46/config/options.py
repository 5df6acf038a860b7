"""List of verbs, and types of options that several verbs share."""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, TypeVar, Unpack

from glm46.config.errors import UserError
from glm46.config.faults import nearest

if TYPE_CHECKING:  # only in the stubs of type checkers
    from _typeshed import SupportsWrite

_Value = TypeVar("_Value")

VERBS = {
    "launch": "check, compare with this machine, prepare the data and train",
    "train": "train in this process; launch and torchrun start one for each rank",
    "ablate": "train the same run with different keys and compare them in one report",
    "preflight": "check hosts, network, storage and the files of a run before it begins",
    "setup-cluster": "check the hosts of a cluster, make their folders, write hostfile and job script",
    "prepare": "make the shards of the sources that are missing, verify the others",
    "plan": "say how big, how long and whether it fits, on any number of any GPU",
    "benchmark": "measure the speed of this machine for a plan; see benchmark --help",
    "checkpoint": "list, verify, show or prune checkpoints; see checkpoint --help",
    "rl": "show samples of reinforcement learning; see rl --help",
    "rl-servers": "print, or start, the inference servers of a run, host by host",
    "inspect": "count and show what is in a folder of shards; see inspect --help",
    "plot": "draw metrics of runs as a picture; see plot --help",
    "convert": "weights from and to Hugging Face folders; see convert --help",
    "generate": "text from a checkpoint or a Hugging Face folder; see generate --help",
    "evaluate": "loss by source and position, needle in a haystack; see evaluate --help",
    "schema": "print the JSON schema of the TOML file",
    "init": "write the shipped TOML files and their schema",
}
"""Help of each verb. The function of the verb ``setup-cluster`` is `setup_cluster_command` in
`glm46.commands.setup_cluster`; the other verbs follow the same pattern."""


SCRIPT_VARIABLE = "GLM46_START"
"""Environment variable in which run_train.sh passes its own command line."""

MOST_PROCESSES = 2**20
"""Largest number of processes of a run; plans of more would take minutes."""


class ParserOptions(TypedDict, total=False):
    """Options of argparse that the parser of a verb takes."""

    usage: str
    description: str
    epilog: str
    formatter_class: type[argparse.HelpFormatter]
    add_help: bool


class VerbParser(argparse.ArgumentParser):
    """Parser of the list of verbs, of one verb, or of one of its kinds. Options cannot be abbreviated, and the error
    about an unknown word suggests the nearest known one."""

    def __init__(self, prog: str | None = None, **options: Unpack[ParserOptions]):
        super().__init__(prog, allow_abbrev=False, **options)

    # argparse takes a namespace of any class, and returns it.
    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments; the error about an unknown option suggests a similar known one."""
        parsed, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            name = word.partition("=")[0]
            if word.startswith("--") and "." not in name and (near := nearest(name, self._option_string_actions, 0.75)):
                self.error(f"unrecognized arguments: {word}: did you mean {near}?")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: str) -> None:
        # Also for the word that chooses a verb or its kind.
        if action.choices is not None and value not in action.choices:
            near = nearest(value, action.choices, 0.5)
            remedy = f"did you mean {near}?" if near else f"choose from {', '.join(action.choices)}"
            raise argparse.ArgumentError(action, f"{value[:40]!r}: unknown; {remedy}")

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the help. argparse's own method hides errors of writing, for example to a full disk."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Exit with a message of one line, without the usage, which would fill a screen."""
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def verb_parser(verb: str, **options: Unpack[ParserOptions]) -> VerbParser:
    """Return the parser of a verb that has its own options."""
    return VerbParser(prog=f"python -m glm46 {verb}", **options)


def whole(minimum: int, maximum: int = 10**9) -> Callable[[str], int]:
    """Return the type of an option that is an integer in this range."""

    def read(text: str) -> int:
        shown = repr(text if len(text) <= 40 else f"{text[:40]}…")
        if not re.fullmatch("-?[0-9]+", text):
            raise argparse.ArgumentTypeError(f"{shown}: expected a whole number, in digits")
        number = int(text[:40])  # a longer number is on the same side of both bounds
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{shown}: expected a whole number of at least {minimum:,}")
        if number > maximum:
            raise argparse.ArgumentTypeError(f"{shown}: expected a whole number of at most {maximum:,}")
        return number

    return read


positive = whole(1)
integer = whole(-(2**63), 2**63 - 1)
port = whole(1, 65535)
_processes = whole(1, MOST_PROCESSES)


def list_of(parse: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """Return the type of an option that is a list of values with commas."""
    return lambda text: tuple(parse(part) for part in text.split(","))


def number(text: str) -> float:
    """Parse an option that is a number. Its verb checks the range, and refuses NaN and infinity."""
    with suppress(ValueError):
        return float(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a number, such as 0.9")


def above_zero(text: str) -> float:
    """Parse an option that is a finite number greater than 0."""
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a finite number greater than 0")


def process_count(text: str) -> int | None:
    """Parse the option ``--nproc``: a number of processes, or None for ``auto``."""
    if text == "auto":
        return None
    try:
        return _processes(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(str(error).replace("expected a", "expected auto, or a")) from None


def require_picture(verb: str, option: str, path: Path, suffixes: Sequence[str]) -> None:
    """Refuse a picture that cannot be drawn, before the work for it.

    Raises:
        UserError: its name has another ending, or matplotlib is not installed.
    """
    if path.suffix not in suffixes:
        raise UserError(f"{verb}: {option} {path}: end the name of the picture with {' or '.join(suffixes)}")
    if find_spec("matplotlib") is None:
        raise UserError(f"{verb}: matplotlib is not installed; pip install matplotlib, or glm46 with its extra [plot]")


def require_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result is written to it.

    Raises:
        UserError: its folder does not exist, it is a folder, or the system refuses to open it.
    """
    try:
        is_new = not path.exists()
        if is_new or path.is_file() or path.is_dir():  # a pipe may wait for its reader
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        if is_new:
            path.unlink(missing_ok=True)  # another node may have checked the same file
    except OSError as error:
        raise UserError(
            f"command line: {option} {path}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error
