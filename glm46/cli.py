"""The command line: ``python -m glm46 VERB``. Each verb imports what it needs: refusing bad input costs no torch.

Every verb that reads a run takes ``--config FILE`` and any key of the file as ``--section.key value``.
"""

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from glm46.commands.environment import describe_unfit, describe_version, unfit_packages
from glm46.config.command_line import Start
from glm46.config.errors import UserError

_EXIT_USER_ERROR = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141
"""As of a command that SIGPIPE ends."""

_OWN_COMMANDS = {
    "benchmark": "glm46.commands.benchmark:benchmark_command",
    "checkpoint": "glm46.commands.checkpoint:checkpoint_command",
    "convert": "glm46.commands.convert:convert_command",
    "generate": "glm46.commands.generate:generate_command",
    "inspect": "glm46.commands.data:inspect_command",
    "plot": "glm46.commands.plot:plot_command",
    "prepare": "glm46.commands.data:prepare_command",
}
"""Verbs that read no run parse their own options; by name, because only the one that is asked for is imported."""


_NEED_PACKAGES = {*_OWN_COMMANDS, "launch", "train"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 2 a mistake of the user, printed without a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(argv)
        finally:
            # Here, and not when the interpreter ends: nothing there catches a reader that has gone or a full disk.
            if sys.stdout is not None:  # closed by the shell: >&-
                sys.stdout.flush()
    except UserError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "glm46").partition(".")[0]
        if package == "glm46":
            raise
        print(f"error: {describe_unfit([(f'{package} is missing', package)])}", file=sys.stderr)
        return _EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich turns one into the other
            return _end_without_output(argv)
        raise
    except BrokenPipeError:
        return _end_without_output(argv)
    except OSError as error:
        # Only the output has no name: `> /dev/full`.
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _end_without_output(argv)
        print(
            f"error: the output cannot be written: {error.strerror}; make room or write it elsewhere", file=sys.stderr
        )
        return _EXIT_USER_ERROR


def _end_without_output(argv: Sequence[str]) -> int:
    """Exit code where the reader, such as `head`, has left: 0 where the output is all there is to do."""
    # Else the interpreter tries to write the rest when it ends, and fails with a code of its own.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    is_work = argv[0] in ("launch", "train", "prepare", "convert") and not {"--help", "-h"} & set(argv)
    return _EXIT_BROKEN_PIPE if is_work else 0


def _run(argv: list[str]) -> int:
    if argv and argv[0] in _NEED_PACKAGES and not {"--help", "-h"} & set(argv) and (unfit := unfit_packages()):
        raise UserError(describe_unfit(unfit))
    if argv and argv[0] in _OWN_COMMANDS and (argv[0] != "prepare" or _prepares_files(argv)):
        return resolve_name(_OWN_COMMANDS[argv[0]])(argv[1:])
    tokens, overrides = _split_overrides(argv)
    arguments = _parser().parse_args(tokens)
    return arguments.run(arguments, overrides)


def _prepares_files(argv: Sequence[str]) -> bool:
    """``prepare`` makes the sources of a run, or, given a recipe or an input, one source of files."""
    return any(token.partition("=")[0] in ("--input", "--recipe") for token in argv)


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate ``--section.key value`` from the verb's own options: only the former have a dot in their name."""
    own, overrides, remaining = [], [], list(argv)
    while remaining:
        token = remaining.pop(0)
        name = token.partition("=")[0]
        if not (token.startswith("--") and "." in name):
            own.append(token)
            continue
        overrides.append(token)
        if "=" not in token and remaining and not remaining[0].startswith("--"):
            overrides.append(remaining.pop(0))
    return own, overrides


class _KeysHelp(argparse.Action):
    """``--help`` of a verb that reads a run: its options, then every key of the file."""

    def __init__(self, option_strings, dest, **_):
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="show this, and every key of the file")

    def __call__(self, parser, namespace, values, option_string=None):
        from glm46.commands.key_help import print_keys

        parser.print_help()
        print_keys()
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m glm46", description="Trains GLM-4.5 and GLM-4.6 models from one TOML file.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=describe_version())
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    launch = _add_run_verb(verbs, "launch", "check, compare with this machine, prepare the data and train", _launch)
    launch.add_argument(
        "--nproc",
        type=_processes,
        metavar="N",
        help="processes to start; auto, the default, takes one for each GPU, or two on a CPU",
    )
    launch.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all processes again, from the newest checkpoint, up to N times after one has failed or hangs; "
        "0, the default, ends the run",
    )
    _add_run_verb(verbs, "train", "train in this process; launch and torchrun start one for each rank", _train)
    prepare = _add_run_verb(
        verbs, "prepare", "make the shards of the sources that are missing, verify the others", _prepare
    )
    prepare.epilog = f"With --input FILES --output FOLDER it makes a source of any text. {prepare.epilog}"
    plan = _add_run_verb(verbs, "plan", "say how big, how long and whether it fits, on any number of any GPU", _plan)
    plan.add_argument("--nproc", type=_processes, metavar="N", help="processes; the fewest that the degrees allow")
    plan.add_argument(
        "--gpu", metavar="NAME", help="GPU to compare with, such as H200; H100 and this machine, if not given"
    )
    plan.add_argument("--mfu", type=float, metavar="SHARE", help="share of its peak that the run is assumed to reach")
    verbs.add_parser("benchmark", help="measure speed and memory of this machine; see benchmark --help")
    verbs.add_parser("checkpoint", help="list, verify, show or prune checkpoints; see checkpoint --help")
    verbs.add_parser("inspect", help="count and show what is in a folder of shards; see inspect --help")
    verbs.add_parser("plot", help="draw loss, learning rate, speed and balance of runs as a PNG; see plot --help")
    verbs.add_parser("convert", help="weights from and to Hugging Face folders; see convert --help")
    verbs.add_parser("generate", help="text from a checkpoint or a Hugging Face folder; see generate --help")
    schema = verbs.add_parser("schema", help="print the JSON schema of the TOML file", allow_abbrev=False)
    schema.set_defaults(run=_schema)
    init = verbs.add_parser("init", help="write the shipped TOML files and their schema", allow_abbrev=False)
    init.add_argument("folder", type=Path, nargs="?", default=Path("train_configs"), help="train_configs, if not given")
    init.set_defaults(run=_init)
    return parser


def _add_run_verb(verbs, name: str, meaning: str, function) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=meaning,
        description=f"{meaning[0].upper()}{meaning[1:]}.",
        epilog="Any key of the file can be stated again as --section.key VALUE; VALUE is read as TOML, a bare word is "
        "a string, and --section.key= takes the key out of the file.",
        usage=f"python -m glm46 {name} --config FILE [options] [--section.key VALUE ...]",
        allow_abbrev=False,
        add_help=False,
    )
    verb.add_argument("--help", "-h", action=_KeysHelp)
    verb.add_argument("--config", type=Path, required=True, metavar="FILE", help="the TOML file of the run")
    verb.set_defaults(run=function)
    return verb


def _processes(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, or a number of at least 1")
    return int(text)


def _launch(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from glm46.commands.launch import launch

    if arguments.max_restarts < 0:
        raise UserError(f"command line: --max-restarts {arguments.max_restarts}: must be at least 0")
    return launch(arguments.config, overrides, arguments.nproc, arguments.max_restarts)


def _prepare(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from glm46.config.loader import load_config
    from glm46.prepare.corpus import prepare_run

    for name, manifest in prepare_run(load_config(arguments.config, overrides), report=print).items():
        held, train = manifest.splits["validation"], manifest.splits["train"]
        print(f"{name} in {manifest.folder}: {train.tokens:,} tokens to train on, {held.tokens:,} held out")
    return 0


def _plan(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from glm46.config.loader import load_config
    from glm46.planner.report import plan_text

    options = {"gpu": arguments.gpu, "mfu": arguments.mfu, "world_size": arguments.nproc}
    config = load_config(arguments.config, overrides, world_size=arguments.nproc)
    if arguments.gpu is None:
        options["machine"] = _this_machine()
    try:
        print(plan_text(config, **{name: value for name, value in options.items() if value is not None}))
    except ValueError as error:
        raise UserError(f"command line: {error}") from error
    return 0


def _this_machine():
    from glm46.planner.machine import detect_machine

    machine = detect_machine()
    if machine.gpus:  # which of them are visible is read beside torch, whose import takes seconds
        from glm46.distributed.process import visible_gpus

        machine = detect_machine(visible_gpus())
    return machine


def _schema(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from glm46.config.schema import json_schema

    if overrides:
        raise UserError(f"command line: {overrides[0]}: the verb schema reads no run; leave it out")
    print(json.dumps(json_schema(), indent=2))
    return 0


def _init(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from glm46.commands.init import write_configs

    if overrides:
        raise UserError(f"command line: {overrides[0]}: the verb init reads no run; leave it out")
    written = write_configs(arguments.folder)
    print("\n".join(f"wrote {path}" for path in written) or f"{arguments.folder} has them all")
    return 0


def _train(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from glm46.config.loader import load_config
    from glm46.reliability.stop import StopRequest

    stop = StopRequest()
    load_config(arguments.config, overrides)
    # Torch takes seconds to import: only now, and the rules about the number of processes with it.
    from glm46.distributed.process import launched_world_size
    from glm46.training.trainer import train

    config = load_config(arguments.config, overrides, world_size=launched_world_size() or 1)
    code = train(config, stop)
    if code == 0 and launched_world_size() is None:
        from glm46.commands.launch import describe_next

        print(describe_next(config, Start(arguments.config, tuple(overrides), verb="train"), 1))
    return code
