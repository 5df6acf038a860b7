"""The command line ``python -m glm46 VERB``: finds the verb, calls it, and turns its result into an exit code.

Each verb is one module of `glm46.commands` and is imported only when it is called, so bad input is refused before torch
is imported.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

from glm46.compute.distributed.environment import forget_other_local_rank, let_memory_segments_grow
from glm46.config.errors import UserError
from glm46.config.options import VERBS, VerbParser
from glm46.engine.reliability.stop import EXIT_SIGNAL, code_before_training
from glm46.operate.launch.environment import describe_unfit, describe_version, unfit_packages
from glm46.operate.launch.process_end import EXIT_BROKEN_PIPE, end_on_signals, wait_if_ending

_EXIT_USER_ERROR = 2
_EXIT_INTERRUPTED = 130

_WORK_IN_ANY_ENVIRONMENT = ("plan", "schema", "init")
"""Verbs that run without comparing the installed packages with pyproject.toml."""
_TRAIN = ("launch", "train", "ablate")
"""Verbs that a signal ends with the exit code of a run that can be started again."""
_WRITE_MORE_THAN_OUTPUT = (*_TRAIN, "prepare", "convert")
"""Verbs that stop before their work is done when the reader of the output closes the pipe."""


def run_process() -> int:
    """Run the command line of `sys.argv`, and end this process on signals, which the caller has blocked; returns the
    exit code."""
    # Before the import of the verb, which can take seconds and swallow a KeyboardInterrupt.
    is_started_again = sys.argv[1:2] and sys.argv[1] in (*_TRAIN, "preflight")  # by job scripts
    end_on_signals(code_before_training if is_started_again else lambda number: EXIT_SIGNAL + number)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        return main()
    finally:
        wait_if_ending()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    Exit codes of all verbs: 0 done; 2 a user error, printed without a traceback; 130 Ctrl-C; 141 the reader of the
    output closed the pipe before the work was done. Verbs add their own (`launch_command`, `checkpoint_command`).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(argv)
        finally:
            # Flushed here because the interpreter's own flush at exit cannot be caught: a closed pipe, a full disk.
            if sys.stdout is not None:  # None if the shell closed it: >&-
                sys.stdout.flush()
    except UserError as error:
        wait_if_ending()  # the error may be a consequence of processes that were just killed
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
        if isinstance(end.__context__, BrokenPipeError):  # rich turns BrokenPipeError into SystemExit
            return _end_without_output(argv)
        raise
    except BrokenPipeError:
        return _end_without_output(argv)
    except OSError as error:
        # Standard output has no file name: `> /dev/full`.
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _end_without_output(argv)
        print(
            f"error: the output cannot be written: {error.strerror}; make room or write it elsewhere", file=sys.stderr
        )
        return _EXIT_USER_ERROR


def _run(argv: list[str]) -> int:
    if not argv or argv[0] not in VERBS:
        parser = _list_of_verbs()
        parser.parse_args(argv)  # prints --help and --version, refuses everything else
        parser.error("the verb must be the first argument")
    if argv[0] not in _WORK_IN_ANY_ENVIRONMENT and not _asks_for_help(argv) and (unfit := unfit_packages()):
        raise UserError(describe_unfit(unfit))
    forget_other_local_rank()
    let_memory_segments_grow()
    verb = argv[0].replace("-", "_")
    command: Callable[[Sequence[str]], int] = resolve_name(f"glm46.commands.{verb}:{verb}_command")
    return command(argv[1:])


def _list_of_verbs() -> VerbParser:
    parser = VerbParser(prog="python -m glm46", description="Trains GLM-4.5, 4.6 and 4.7 models from one TOML file.")
    parser.add_argument("--version", action="version", version=describe_version())
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb, meaning in VERBS.items():
        verbs.add_parser(verb, help=meaning)
    return parser


def _asks_for_help(argv: Sequence[str]) -> bool:
    return not {"--help", "-h"}.isdisjoint(argv)


def _end_without_output(argv: Sequence[str]) -> int:
    """Return the exit code after the output has lost its reader, such as `| head`: 0 if output is all that the verb
    does."""
    # Otherwise the interpreter flushes the rest of the output at exit, fails, and sets its own exit code.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    is_incomplete = argv[0] in _WRITE_MORE_THAN_OUTPUT and not _asks_for_help(argv)
    return EXIT_BROKEN_PIPE if is_incomplete else 0
