"""The ranks of this node: started through torchrun, stopped by signals, their end turned into an exit code."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, cast

from glm46.compute.distributed.environment import share_cores
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import (
    EXIT_DIVERGED,
    EXIT_HANG,
    EXIT_SIGNAL,
    EXIT_STOPPED,
    REPEAT_SECONDS,
    SIGNALS,
    SignalListener,
    code_before_training,
    exit_now,
)
from glm46.operate.launch.config_options import task_module
from glm46.operate.launch.process_end import EXIT_BROKEN_PIPE, started_ranks
from glm46.operate.launch.rank_server import RankServer

EXIT_FAILED_RANK = 1
EXIT_USER_ERROR = 2

SAVE_SECONDS = 600
"""Time for ranks to save and exit after a signal, before they are killed."""
_EXIT_SECONDS = 3
"""Time for ranks to exit after a second signal, before they are killed."""


class End(NamedTuple):
    """Result of one start of all ranks."""

    code: int
    cause: str = ""
    """Of a failure, in words."""
    is_final: bool = False
    """True if another start is impossible."""
    failed_at: float | None = None
    """`time.time` of the first failure of a rank."""


class LauncherSignals:
    """Handles signals to the launcher. Without ranks there is nothing to save, and a signal ends the launcher at once.
    With ranks, it passes the signal on and gives them time to save; after a second signal, only seconds.

    Attributes:
        number: of the last signal that was passed on to the ranks; None before the first.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._passed_on_at = 0.0
        self._deadlines: list[threading.Timer] = []
        self._listener = SignalListener(self._on_signal, (*SIGNALS, signal.SIGQUIT))

    def close(self) -> None:
        """Stop listening."""
        self._listener.restore()
        for deadline in self._deadlines:
            deadline.cancel()

    def exit_code(self, ranks: set[int]) -> int:
        """Exit code of a start that a signal ended: EXIT_STOPPED if all ranks saved or had nothing to save.

        Args:
            ranks: exit codes of the ranks of this node. A rank that a signal killed had not installed its handlers yet.
        """
        number = cast(int, self.number)
        is_saved = ranks <= {EXIT_STOPPED, -number, -signal.SIGTERM}
        return code_before_training(number) if is_saved else EXIT_SIGNAL + number

    def _on_signal(self, number: int) -> None:
        name, ranks, now = signal.Signals(number).name, started_ranks(), time.monotonic()
        if number == signal.SIGQUIT:
            exit_now(EXIT_SIGNAL + number, f"{name}: ended at once, without a save")
        if not ranks and self.number is None:
            exit_now(code_before_training(number), f"stopped by {name} before training began; nothing is lost")
        if self.number is not None and now - self._passed_on_at <= REPEAT_SECONDS:
            return
        seconds = SAVE_SECONDS if self.number is None else _EXIT_SECONDS
        self.number, self._passed_on_at = number, now
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        reason = f"{name}: the ranks did not exit within {seconds} s; killed"
        deadline = threading.Timer(seconds, exit_now, (EXIT_SIGNAL + number, reason))
        deadline.daemon = True
        deadline.start()
        self._deadlines.append(deadline)


@dataclass
class Standby:
    """The server of ranks of this launcher, and its signals, kept across restarts."""

    signals: LauncherSignals
    server: RankServer | None = None

    def prepare(self, config: RunConfig, cores: int, processes: int) -> RankServer:
        """Begin the imports of the ranks, if this has not been done. Call it in the main thread."""
        if self.server is None:
            share_cores(cores, processes)
            self.server = RankServer(["glm46.commands.train", task_module(config)])
        return self.server

    def close(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.close()


def run_ranks(
    options: Sequence[str], command: Sequence[str], signals: LauncherSignals, server: RankServer, times: StartTimes
) -> End:
    """Run ``python -m glm46 COMMAND`` in each rank of this node and wait for all of them.

    Args:
        options: of torchrun, see `rendezvous_options`.
        server: starts the ranks.
        times: of this start so far; the ranks go on with them.
    """
    server.begin_start()
    return _run_torchrun(options, command, signals, server, times)._replace(failed_at=server.failed_at)


def _run_torchrun(
    options: Sequence[str], command: Sequence[str], signals: LauncherSignals, server: RankServer, times: StartTimes
) -> End:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import get_args_parser, run

    from glm46.compat import torchrun_starts
    from glm46.operate.launch.local_rendezvous import register

    # Torchrun logs screens about the end of its ranks; one line below replaces them, beside the traceback of the rank.
    # Its loggers set their own levels, so logging is disabled for this process, which logs nothing else.
    logging.disable(logging.ERROR)
    register()
    arguments = get_args_parser().parse_args([*options, "--module", "glm46", *command])
    # Torchrun's signal handlers stay off: they raise in the main thread, which may be in code that no exception
    # interrupts, and a second signal would end it while ranks save.
    arguments.signals_to_handle = ""
    try:
        with torchrun_starts(lambda words, variables: server.start(words, variables, times)):
            run(arguments)
    except (RendezvousError, DistError) as error:
        cause = f"rendezvous failed: node 0 left or a node did not join: {error}"
        print(f"error: {cause}", file=sys.stderr)
        return End(EXIT_FAILED_RANK, cause)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        codes = {each.exitcode for each in error.failures.values()}
        if signals.number is not None:
            return End(signals.exit_code(codes), is_final=True)
        if EXIT_HANG in codes:
            return End(EXIT_HANG, "a rank hung")  # The rank that found it has printed the hang report.
        if EXIT_BROKEN_PIPE in codes:
            cause = "the reader of the output has closed the pipe; all ranks were stopped"
            print(f"error: {cause}", file=sys.stderr)
            return End(EXIT_BROKEN_PIPE, cause)
        # Torchrun looks now and then: it may have found the first one together with ranks that lost their neighbour.
        by_process = {each.pid: (number, each) for number, each in error.failures.items()}
        rank, failure = by_process.get(server.first_failed, (rank, failure))
        # Saves failed, or a rank alone got a signal; ranks that lost their neighbour by that end with 1.
        if EXIT_STOPPED in codes and failure.exitcode in (EXIT_STOPPED, EXIT_FAILED_RANK):
            return End(EXIT_STOPPED, "the ranks have stopped, to be started again")
        cause = f"rank {rank} {describe_exit(failure.exitcode)}"
        print(f"error: {cause} The other ranks were stopped.", file=sys.stderr)
        is_final = failure.exitcode in (EXIT_USER_ERROR, EXIT_DIVERGED)  # Another start would end in the same way.
        return End(failure.exitcode if is_final else EXIT_FAILED_RANK, cause)
    return End(0)


def load_torchrun() -> None:
    """Import torchrun, which takes seconds that a spare node has before it is needed."""
    import_module("torch.distributed.run")


def describe_exit(exit_code: int) -> str:
    """The end of a rank in words; negative codes are signals."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}; its output is above."
    remark = " The usual reason is that memory ran out." if -exit_code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-exit_code).name}.{remark}"
