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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from glm46.checkpoint.publish import published_steps
from glm46.commands.nodes import VARIABLES, Nodes, detect_nodes
from glm46.config.check import check_run
from glm46.config.command_line import SCRIPT_VARIABLE, Start, module_command, replace_overrides
from glm46.config.errors import UserError
from glm46.config.loader import load_run
from glm46.config.run_config import Run
from glm46.planner.budget import budget_tokens
from glm46.planner.layout import fixed_processes, resolve_layout, smallest_world
from glm46.planner.machine import Machine, detect_machine
from glm46.planner.requirement import describe_requirement
from glm46.reliability.stop import EXIT_DIVERGED, EXIT_HANG, EXIT_SIGNAL, EXIT_STOPPED, STOPPED

_EXIT_USER_ERROR = 2
_EXIT_FAILED_RANK = 1

_PROCESSES_WITHOUT_GPU = 2
"""Enough that sharding and collectives are real; more would only split the same cores further."""
_SAVE_SECONDS = 600
"""How long ranks may take to save and leave after a signal before they are killed."""
_PREPARE_SECONDS = 3600
"""How long other nodes wait for the first, which may have data to prepare."""
_REJOIN_SECONDS = 600
"""How long a node that starts again waits for the others to do so."""
_LONGER = 4
"""Factor on the budget of a run that is proposed after it."""
_FRUITLESS_STARTS = 3
"""Starts in a row without a new checkpoint after which no other is tried."""
_FORWARDED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_SIGNALS_OF_JOB_SYSTEMS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class End(NamedTuple):
    """How the processes of one start ended."""

    code: int
    cause: str = ""
    """Of a failure, in words."""


def launch(config: Path, overrides: Sequence[str], processes: int | None, max_restarts: int = 0) -> int:
    """Train the run of a TOML file on this node.

    Args:
        overrides: tokens of the command line, see `load_run`.
        processes: ranks to start on this node; None takes one for each GPU, or a few without GPUs.
        max_restarts: how often all ranks are started again after one failed or went silent.

    Returns:
        Exit code: 0 trained to the end; 2 refused; EXIT_DIVERGED diverged;
        EXIT_STOPPED stopped by SIGTERM, SIGHUP or SIGUSR1, nothing is lost;
        128 + n stopped by signal n otherwise; else a rank failed, or went silent, and no start is left.

    Raises:
        UserError: the run is not sound.
    """
    with _stopping_at_once():
        return _launch(config, overrides, processes, max_restarts)


@contextmanager
def _stopping_at_once() -> Iterator[None]:
    """While torchrun does not listen to signals there is nothing to save: EXIT_STOPPED at once. Without an exception,
    which is lost where the signal comes while the interpreter cleans up."""
    handlers = {number: signal.signal(number, lambda *_: os._exit(EXIT_STOPPED)) for number in _SIGNALS_OF_JOB_SYSTEMS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _launch(config: Path, overrides: Sequence[str], processes: int | None, max_restarts: int) -> int:
    run = load_run(config, overrides, world_size=None)
    if max_restarts and not run.checkpoint.enable:
        raise UserError(
            f"command line: --max-restarts {max_restarts} with checkpoint.enable = false: every start would begin "
            "anew; enable checkpoints, or leave it out"
        )
    # Torch takes seconds to import and is needed from here on only: the file is sound.
    from glm46.distributed.process import set_variables, share_cores, visible_gpus

    nodes = detect_nodes(set_variables(VARIABLES), socket.gethostname())
    machine = detect_machine(visible_gpus(), nodes=nodes.count)
    start_of_run = Start(
        config,
        tuple(overrides),
        options=("--max-restarts", str(max_restarts)) if max_restarts else (),
        processes=processes,
        script=set_variables([SCRIPT_VARIABLE]).get(SCRIPT_VARIABLE),
    )
    remedies = (
        f"see what it needs in detail:  {start_of_run.plan_command(nodes.count)}",
        f"train something that fits:    {start_of_run.small_command()}",
    )
    refusal = _refuse(run, machine, processes and processes * nodes.count, remedies)
    if refusal:
        print(refusal, file=sys.stderr)
        return _EXIT_USER_ERROR
    processes = processes or max(choose_processes(run, machine) // nodes.count, 1)
    run = load_run(config, overrides, world_size=processes * nodes.count)
    if nodes.rank == 0:
        _refuse_start(run)
        _prepare(run, processes * nodes.count)
    share_cores(machine.cores, processes)
    mark = Path(run.job.dump_folder) / STOPPED
    mark.parent.mkdir(parents=True, exist_ok=True)
    checkpoints = Path(run.job.dump_folder) / run.checkpoint.folder

    def start(number: int) -> End:
        mark.write_text("0\n")  # the first rank removes it when training begins
        return _start(_meeting(nodes, processes, number), ["train", "--config", str(config), *overrides])

    code = keep_running(
        start,
        lambda: max(published_steps(checkpoints), default=0),
        max_restarts,
    )
    # Who pressed Ctrl-C wants to hear of it; job systems want to hear whether to start the run again.
    stopped_by_system = code - EXIT_SIGNAL in _SIGNALS_OF_JOB_SYSTEMS
    is_at_rest = mark.exists()
    mark.unlink(missing_ok=True)
    if code == 0 and nodes.rank == 0:
        print(describe_next(run, start_of_run, processes * nodes.count))
    return EXIT_STOPPED if stopped_by_system and is_at_rest else code


def _refuse_start(run: Run) -> None:
    """What a rank would find wrong at its start with the folders of the run, once and before any work."""
    from glm46.reliability.run_lock import writing
    from glm46.training.origin import refuse_origin

    refuse_origin(run)
    folder = Path(run.job.dump_folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with writing(folder), tempfile.TemporaryFile(dir=there) as file:
        file.write(b"\0" * 4096)


def _prepare(run: Run, world_size: int) -> None:
    """Make the shards that are missing, and refuse a run that would read one too often, with what it would read; a run
    that goes on says so itself. The other nodes find the shards in the same place: they wait where all ranks meet."""
    # Not before: it loads the whole program, and a refusal needs little of it.
    from glm46.data.corpus import check_epochs, describe_sources
    from glm46.prepare.corpus import prepare_run

    manifests = prepare_run(run, report=lambda line: print(line, flush=True))
    rows = run.training.local_batch_size * resolve_layout(run.parallelism, world_size).batch_ranks
    try:
        check_epochs(run, manifests, rows)
    except UserError:
        print("\n".join(describe_sources(run, manifests, rows)), flush=True)
        raise


def describe_next(run: Run, start: Start, world_size: int) -> str:
    """What to type after a run that is finished: a longer one, if the rules and the text allow it, and the help."""
    # Not before: it loads the data's libraries.
    from glm46.data.corpus import check_epochs
    from glm46.data.manifest import load_manifest

    rows = run.training.local_batch_size * resolve_layout(run.parallelism, world_size).batch_ranks
    values = {
        "training.tokens": str(_LONGER * budget_tokens(run, rows)),
        "job.dump_folder": f"{run.job.dump_folder}_longer",
    }
    lines = [f"all keys      {module_command()} train --help"]
    try:
        longer = load_run(start.config, replace_overrides(start.overrides, values), world_size=world_size)
        manifests = {source.name: load_manifest(Path(source.path), full=False) for source in longer.data.sources}
        check_epochs(longer, manifests, rows)
        lines.insert(0, f"train longer  {start.command(values)}")
    except UserError:
        pass
    return "\n".join(f"{'      ' if number else 'Next: '}{line}" for number, line in enumerate(lines))


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


def _meeting(nodes: Nodes, processes: int, number: int) -> list[str]:
    """Options of torchrun for the n-th start: how many processes, and where the nodes meet."""
    options = [f"--nnodes={nodes.count}", f"--nproc-per-node={processes}", "--max-restarts=0"]
    if nodes.count == 1:
        return [*options, "--local-addr=localhost"]
    seconds = _REJOIN_SECONDS if number else _PREPARE_SECONDS
    patience = f"join_timeout={seconds},read_timeout={seconds}"
    options += [
        "--rdzv-backend=c10d",
        # A node may be ahead of the first, which then still listens for the start before.
        f"--rdzv-endpoint={nodes.host}:{nodes.port + number}",
        f"--rdzv-id={nodes.job}",
        f"--rdzv-conf=is_host={int(nodes.rank == 0)},{patience}",
    ]
    # Nodes on one machine, for a trial: its own name need not lead to it.
    return [*options, f"--local-addr={nodes.host}"] if nodes.host in ("localhost", "127.0.0.1") else options


def choose_processes(run: Run, machine: Machine) -> int:
    """Ranks that suit this machine: one for each GPU as far as the degrees allow, a few without GPUs."""
    wanted = len(machine.gpus) or min(_PROCESSES_WITHOUT_GPU, machine.cores)
    if run.parallelism.data_parallel_shard_degree != -1:
        return fixed_processes(run.parallelism)
    smallest = smallest_world(run.parallelism)
    return max(wanted - wanted % smallest, smallest)


def _refuse(run: Run, machine: Machine, processes: int | None, remedies: Sequence[str] = ()) -> str | None:
    """One screen that says why this machine cannot train the run, and what to do; None when it can."""
    fits, screen = describe_requirement(run, machine, remedies=remedies)
    # A number of processes that the degrees do not allow is a fault of its own, and said as such after this.
    if fits and processes is not None and not check_run(run, world_size=processes):
        fits, screen = describe_requirement(run, machine, world_size=processes, remedies=remedies)
    return None if fits else screen


def _start(options: Sequence[str], command: Sequence[str]) -> End:
    """Run ``python -m glm46 COMMAND`` in each rank through torchrun and turn its end into an exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import get_args_parser, run

    # What torchrun logs about the end of its ranks is said below in one line; the cause is the rank's own traceback.
    # Its loggers set their own levels, so logging is switched off for this process, which logs nothing else.
    logging.disable(logging.ERROR)
    arguments = get_args_parser().parse_args([*options, "--module", "glm46", *command])
    arguments.signals_to_handle = _FORWARDED_SIGNALS
    arguments.shutdown_timeout = _SAVE_SECONDS
    before = {
        number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, _FORWARDED_SIGNALS.split(","))
    }
    try:
        run(arguments)
    except RendezvousError as error:
        cause = f"the first node has gone, or another did not come: {error}"
        print(f"error: {cause}", file=sys.stderr)
        return End(_EXIT_FAILED_RANK, cause)
    except SignalException as stop:
        return End(EXIT_SIGNAL + stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if any(each.exitcode == EXIT_HANG for each in error.failures.values()):
            return End(EXIT_HANG, "a rank went silent")  # the rank that found it has said what it found
        if failure.exitcode == EXIT_STOPPED:  # a signal was sent to a rank, not to this process
            return End(EXIT_STOPPED)
        cause = f"rank {rank} {_describe_exit(failure.exitcode)}"
        print(f"error: {cause} The other ranks were stopped.", file=sys.stderr)
        is_final = failure.exitcode in (_EXIT_USER_ERROR, EXIT_DIVERGED)  # another start would end in the same way
        return End(failure.exitcode if is_final else _EXIT_FAILED_RANK, cause)
    finally:
        for number, handler in before.items():  # torchrun keeps them, for ranks that are no more
            signal.signal(number, handler)
    return End(0)


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}; what it wrote is above."
    name = signal.Signals(-exit_code).name
    remark = " Most often the system does that when memory runs out." if name == "SIGKILL" else ""
    return f"was ended by {name}.{remark}"
