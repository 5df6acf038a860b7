"""One command from a TOML file to a running training on this node: check, compare with the machine, prepare, start.

Everything that can be refused is refused here, in one process and before any work, because a rank that finds a mistake
says it as often as there are ranks. What torchrun does is then done by torchrun itself, in this process.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from glm46.checkpoint.publish import published_steps
from glm46.commands.meeting import meeting_options, require_free_port, telling_who_is_missing, wait_for_first
from glm46.commands.nodes import LAST_PORT, VARIABLES, detect_nodes
from glm46.config.check import check_config
from glm46.config.command_line import SCRIPT_VARIABLE, Start, module_command, replace_overrides
from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.config.run_config import RunConfig
from glm46.planner.budget import budget_tokens
from glm46.planner.layout import fixed_processes, resolve_layout, smallest_world
from glm46.planner.machine import Machine, detect_machine
from glm46.planner.requirement import describe_requirement
from glm46.reliability.stop import (
    EXIT_DIVERGED,
    EXIT_HANG,
    EXIT_SIGNAL,
    EXIT_STOPPED,
    REPEAT_SECONDS,
    SIGNALS,
    SignalListener,
    code_before_training,
    exit_now,
    started_ranks,
)

_EXIT_USER_ERROR = 2
_EXIT_FAILED_RANK = 1

_PROCESSES_WITHOUT_GPU = 2
"""Enough that sharding and collectives are real; more would only split the same cores further."""
_SAVE_SECONDS = 600
"""How long ranks may take to save and leave after a signal before they are killed."""
_LONGER = 4
"""Factor on the budget of a run that is proposed after it."""
_FRUITLESS_STARTS = 3
"""Starts in a row without a new checkpoint after which no other is tried."""
_END_SECONDS = 3
"""How long ranks may take to leave after a second signal before they are killed."""


class End(NamedTuple):
    """How the processes of one start ended."""

    code: int
    cause: str = ""
    """Of a failure, in words."""


def launch(config: Path, overrides: Sequence[str], processes: int | None, max_restarts: int = 0) -> int:
    """Train the run of a TOML file on this node.

    Args:
        overrides: tokens of the command line, see `load_config`.
        processes: ranks to start on this node; None takes one for each GPU, or a few without GPUs.
        max_restarts: how often all ranks are started again after one failed or went silent.

    Returns:
        Exit code: 0 trained to the end; 2 refused; EXIT_DIVERGED diverged;
        EXIT_STOPPED stopped by SIGTERM, SIGHUP or SIGUSR1, nothing is lost;
        128 + n stopped by signal n otherwise; else a rank failed, or went silent, and no start is left.

    Raises:
        UserError: the run is not sound.
    """
    signals = _Signals()
    try:
        return _launch(config, overrides, processes, max_restarts, signals)
    finally:
        signals.close()


class _Signals:
    """Signals to the launcher. While it has no ranks there is nothing to save, and a signal ends it at once. Ranks are
    told, and have time to save; a second signal leaves them a moment.

    Attributes:
        number: of the last signal that the ranks were told of; None while there was none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._told_at = 0.0
        self._deadlines: list[threading.Timer] = []
        self._listener = SignalListener(self._hear, (*SIGNALS, signal.SIGQUIT))

    def close(self) -> None:
        """Hear no more."""
        self._listener.restore()
        for deadline in self._deadlines:
            deadline.cancel()

    def exit_code(self, ranks: set[int]) -> int:
        """Of a start that a signal ended, from the exit codes of the ranks of this node: EXIT_STOPPED if all have saved
        or had nothing to save; a rank that a signal could kill had not begun to listen."""
        at_rest = ranks <= {EXIT_STOPPED, -self.number, -signal.SIGTERM}
        return code_before_training(self.number) if at_rest else EXIT_SIGNAL + self.number

    def _hear(self, number: int) -> None:
        name, ranks, now = signal.Signals(number).name, started_ranks(), time.monotonic()
        if number == signal.SIGQUIT:
            exit_now(EXIT_SIGNAL + number, f"{name}: ended at once, without a save")
        if not ranks and self.number is None:
            exit_now(code_before_training(number), f"stopped by {name} before training began; nothing is lost")
        if self.number is not None and now - self._told_at <= REPEAT_SECONDS:
            return
        seconds = _SAVE_SECONDS if self.number is None else _END_SECONDS
        self.number, self._told_at = number, now
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        reason = f"{name}: the ranks did not leave within {seconds} s; killed"
        deadline = threading.Timer(seconds, exit_now, (EXIT_SIGNAL + number, reason))
        deadline.daemon = True
        deadline.start()
        self._deadlines.append(deadline)


def _launch(
    config_file: Path, overrides: Sequence[str], processes: int | None, max_restarts: int, signals: _Signals
) -> int:
    config = load_config(config_file, overrides, world_size=None)
    if max_restarts and not config.checkpoint.enable:
        raise UserError(
            f"command line: --max-restarts {max_restarts} with checkpoint.enable = false: every start would begin "
            "anew; enable checkpoints, or leave it out"
        )
    # Torch takes seconds to import and is needed from here on only: the file is sound.
    from glm46.distributed.process import set_variables, share_cores, visible_gpus

    nodes = detect_nodes(set_variables(VARIABLES), socket.gethostname())
    if nodes.count > 1 and nodes.port + max_restarts > LAST_PORT:
        raise UserError(
            f"environment: MASTER_PORT = {nodes.port} with --max-restarts {max_restarts}: each start takes the next "
            f"port, and the last is {LAST_PORT}; set MASTER_PORT to at most {LAST_PORT - max_restarts}"
        )
    require_free_port(nodes, 0)
    machine = detect_machine(visible_gpus(), nodes=nodes.count)
    start_of_run = Start(
        config_file,
        tuple(overrides),
        options=("--max-restarts", str(max_restarts)) if max_restarts else (),
        processes=processes,
        script=set_variables([SCRIPT_VARIABLE]).get(SCRIPT_VARIABLE),
    )
    remedies = (
        f"see what it needs in detail:  {start_of_run.plan_command(nodes.count)}",
        f"train something that fits:    {start_of_run.small_command()}",
    )
    refusal = _refuse(config, machine, processes and processes * nodes.count, remedies)
    if refusal:
        print(refusal, file=sys.stderr)
        return _EXIT_USER_ERROR
    processes = processes or max(choose_processes(config, machine) // nodes.count, 1)
    config = load_config(config_file, overrides, world_size=processes * nodes.count)
    if nodes.rank == 0:
        _refuse_start(config)
        _prepare(config, processes * nodes.count)
    share_cores(machine.cores, processes)
    checkpoints = Path(config.job.dump_folder) / config.checkpoint.folder

    def start(number: int) -> End:
        require_free_port(nodes, number)
        wait_for_first(nodes, number, _say)
        with telling_who_is_missing(nodes, lambda: bool(started_ranks()), _say):
            options = meeting_options(nodes, processes, number)
            return _start(options, ["train", "--config", str(config_file), *overrides], signals)

    code = keep_running(start, lambda: max(published_steps(checkpoints), default=0), max_restarts)
    if code == 0 and nodes.rank == 0:
        print(describe_next(config, start_of_run, processes * nodes.count))
    return code


def _refuse_start(config: RunConfig) -> None:
    """What a rank would find wrong at its start with the folders of the run, once and before any work."""
    from glm46.reliability.run_lock import writing
    from glm46.training.origin import refuse_origin

    refuse_origin(config)
    folder = Path(config.job.dump_folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with writing(folder), tempfile.TemporaryFile(dir=there) as file:
        file.write(b"\0" * 4096)


def _prepare(config: RunConfig, world_size: int) -> None:
    """Make the shards that are missing, and refuse a run that would read one too often, with what it would read; a run
    that goes on says so itself. The other nodes find the shards in the same place: they wait where all ranks meet."""
    # Not before: it loads the whole program, and a refusal needs little of it.
    from glm46.data.corpus import check_epochs, describe_sources
    from glm46.prepare.corpus import prepare_run

    manifests = prepare_run(config, report=_say)
    rows = config.training.local_batch_size * resolve_layout(config.parallelism, world_size).dp_degree
    try:
        check_epochs(config, manifests, rows)
    except UserError:
        print("\n".join(describe_sources(config, manifests, rows)), flush=True)
        raise


def describe_next(config: RunConfig, start: Start, world_size: int) -> str:
    """What to type after a run that is finished: a longer one, if the rules and the text allow it, and the help."""
    # Not before: it loads the data's libraries.
    from glm46.data.corpus import check_epochs
    from glm46.data.manifest import load_manifest

    rows = config.training.local_batch_size * resolve_layout(config.parallelism, world_size).dp_degree
    values = {
        "training.tokens": str(_LONGER * budget_tokens(config, rows)),
        "job.dump_folder": f"{config.job.dump_folder}_longer",
    }
    lines = [f"all keys      {module_command()} train --help"]
    try:
        longer = load_config(start.config, replace_overrides(start.overrides, values), world_size=world_size)
        manifests = {source.name: load_manifest(Path(source.path), full=False) for source in longer.data.sources}
        check_epochs(longer, manifests, rows)
        lines.insert(0, f"train longer  {start.command(values)}")
    except UserError:
        pass
    return "\n".join(f"{'      ' if number else 'Next: '}{line}" for number, line in enumerate(lines))


def _say(line: str) -> None:
    print(line, flush=True)


def keep_running(start: Callable[[int], End], newest_step: Callable[[], int], max_restarts: int) -> int:
    """Start, and start again after a failure while there is hope; the exit code of the last start.

    Torchrun's own restarts are not used: its ranks met stale addresses of the start before. Here everything is new, the
    store and the port. The launchers of several nodes count the starts alike, because a failed rank ends those of all.

    Args:
        start: starts all ranks, for the n-th time, and waits for their end.
        newest_step: the newest checkpoint, 0 if there is none.
        max_restarts: starts after the first.
    """
    best, fruitless = newest_step(), 0
    for number in range(max_restarts + 1):
        end = start(number)
        if end.code not in (_EXIT_FAILED_RANK, EXIT_HANG) or not max_restarts:
            return end.code
        newest = newest_step()
        fruitless, best = (0, newest) if newest > best else (fruitless + 1, best)
        where = f"the checkpoint of step {newest}" if newest else "the beginning, there is no checkpoint"
        if fruitless == _FRUITLESS_STARTS:
            print(
                f"error: {fruitless} starts in a row failed before a new checkpoint; the last one: "
                f"{end.cause.rstrip('.')}. Not started again: what fails every time needs a person. The same command "
                f"goes on from {where}; a smaller checkpoint.interval saves more of a run that fails often.",
                file=sys.stderr,
            )
            return end.code
        if number < max_restarts:
            print(f"restart {number + 1} of {max_restarts}, from {where}", file=sys.stderr, flush=True)
    print(f"error: no restart is left of {max_restarts}; the same command goes on from {where}", file=sys.stderr)
    return end.code


def choose_processes(config: RunConfig, machine: Machine) -> int:
    """Ranks that suit this machine: one for each GPU as far as the degrees allow, a few without GPUs."""
    wanted = len(machine.gpus) or min(_PROCESSES_WITHOUT_GPU, machine.cores)
    if config.parallelism.data_parallel_shard_degree != -1:
        return fixed_processes(config.parallelism)
    smallest = smallest_world(config.parallelism)
    return max(wanted - wanted % smallest, smallest)


def _refuse(config: RunConfig, machine: Machine, processes: int | None, remedies: Sequence[str] = ()) -> str | None:
    """One screen that says why this machine cannot train the run, and what to do; None when it can."""
    fits, screen = describe_requirement(config, machine, remedies=remedies)
    # A number of processes that the degrees do not allow is a fault of its own, and said as such after this.
    if fits and processes is not None and not check_config(config, world_size=processes):
        fits, screen = describe_requirement(config, machine, world_size=processes, remedies=remedies)
    return None if fits else screen


def _start(options: Sequence[str], command: Sequence[str], signals: _Signals) -> End:
    """Run ``python -m glm46 COMMAND`` in each rank through torchrun and turn its end into an exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import get_args_parser, run

    # What torchrun logs about the end of its ranks is said below in one line; the cause is the rank's own traceback.
    # Its loggers set their own levels, so logging is switched off for this process, which logs nothing else.
    logging.disable(logging.ERROR)
    arguments = get_args_parser().parse_args([*options, "--module", "glm46", *command])
    # None of them: its handlers raise in the main thread, which may wait in code that no signal ends, and a second
    # signal would end it while ranks save.
    arguments.signals_to_handle = ""
    try:
        run(arguments)
    except RendezvousError as error:
        cause = f"the first node has gone, or another did not come: {error}"
        print(f"error: {cause}", file=sys.stderr)
        return End(_EXIT_FAILED_RANK, cause)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        codes = {each.exitcode for each in error.failures.values()}
        if signals.number is not None:
            return End(signals.exit_code(codes))
        if EXIT_HANG in codes:
            return End(EXIT_HANG, "a rank went silent")  # the rank that found it has said what it found
        if failure.exitcode == EXIT_STOPPED:  # a signal was sent to a rank, not to this process
            return End(EXIT_STOPPED)
        cause = f"rank {rank} {_describe_exit(failure.exitcode)}"
        print(f"error: {cause} The other ranks were stopped.", file=sys.stderr)
        is_final = failure.exitcode in (_EXIT_USER_ERROR, EXIT_DIVERGED)  # another start would end in the same way
        return End(failure.exitcode if is_final else _EXIT_FAILED_RANK, cause)
    return End(0)


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}; what it wrote is above."
    name = signal.Signals(-exit_code).name
    remark = " Most often the system does that when memory runs out." if name == "SIGKILL" else ""
    return f"was ended by {name}.{remark}"
