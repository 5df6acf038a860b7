"""Ranks of this node: started through torchrun, stopped by signals, their end turned into an exit code."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from glm46.compute.distributed.environment import set_variable
from glm46.engine.observe.start_times import VARIABLE as START_TIMES
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
from glm46.operate.launch.process_end import EXIT_BROKEN_PIPE, started_ranks

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
    """Cause of a failure, in words."""
    is_final: bool = False
    """True if another start is impossible."""
    failed_at: float | None = None
    """`time.time` of the first failure of a rank."""


class LauncherSignals:
    """Handles signals to the launcher. Without ranks there is nothing to save, and a signal ends the launcher
    immediately. With ranks, it passes the signal on and gives them time to save; after a second signal, only seconds.

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
        """Return the exit code of a start that a signal ended: EXIT_STOPPED if all ranks saved or had nothing to save.

        Args:
            ranks: exit codes of the ranks of this node. A rank that a signal killed had not installed its handlers yet.
        """
        number = cast(int, self.number)
        is_saved = ranks <= {EXIT_STOPPED, -number, -signal.SIGTERM}
        return code_before_training(number) if is_saved else EXIT_SIGNAL + number

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        ranks = started_ranks()
        now = time.monotonic()
        if number == signal.SIGQUIT:
            exit_now(EXIT_SIGNAL + number, f"{name}: ended at once, without a save")
        if not ranks and self.number is None:
            exit_now(code_before_training(number), f"stopped by {name} before training began; nothing is lost")
        if self.number is not None and now - self._passed_on_at <= REPEAT_SECONDS:
            return
        seconds = SAVE_SECONDS if self.number is None else _EXIT_SECONDS
        self.number = number
        self._passed_on_at = now
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        reason = f"{name}: the ranks did not exit within {seconds} s; killed"
        deadline = threading.Timer(seconds, exit_now, (EXIT_SIGNAL + number, reason))
        deadline.daemon = True
        deadline.start()
        self._deadlines.append(deadline)


def run_ranks(options: Sequence[str], command: Sequence[str], signals: LauncherSignals, times: StartTimes) -> End:
    """Run ``python -m glm46 COMMAND`` in each rank of this node and wait for all of them.

    Args:
        options: of torchrun, see `rendezvous_options`.
        times: times of this start; the ranks report its duration.
    """
    from glm46.operate.launch.torchrun_agent import RendezvousFailed, run_agent  # imports torch, which takes seconds

    # Torchrun logs screens about the end of its ranks; one line below replaces them, after the traceback of the rank.
    # Its loggers set their own levels, so logging is disabled for this process, which logs nothing else.
    logging.disable(logging.ERROR)
    set_variable(START_TIMES, times.to_text())
    try:
        failures = run_agent([*options, "--module", "glm46", *command])
    except RendezvousFailed as error:
        cause = f"rendezvous failed: node 0 left or a node did not join: {error}"
        print(f"error: {cause}", file=sys.stderr)
        return End(EXIT_FAILED_RANK, cause)
    if failures:
        failed_at = min(failure.failed_at for failure in failures.values())
        exit_codes = {rank: failure.exit_code for rank, failure in failures.items()}
        early = {rank: code for rank, code in exit_codes.items() if failures[rank].failed_at <= failed_at + 1}
        return _end_of_failure(exit_codes, first_cause(early), signals)._replace(failed_at=failed_at)
    return End(0)


def first_cause(exit_codes: Mapping[int, int]) -> int:
    """Return the rank whose failure caused the failures of the other ranks.

    A rank that loses its neighbour ends with 1, and torchrun may see its end first. A rank that still reports its
    error when torchrun stops it ends with EXIT_STOPPED.

    Args:
        exit_codes: by rank, in the order in which torchrun found them.
    """
    weights = {-signal.SIGTERM: 0, EXIT_STOPPED: 1, EXIT_FAILED_RANK: 1, EXIT_USER_ERROR: 3, EXIT_DIVERGED: 3}
    return max(exit_codes, key=lambda rank: weights.get(exit_codes[rank], 2))


def _end_of_failure(exit_codes: Mapping[int, int], rank: int, signals: LauncherSignals) -> End:
    """Return the end of a start in which ranks failed, and print one line for the user.

    Args:
        exit_codes: by rank.
        rank: the rank that failed first.
    """
    codes = set(exit_codes.values())
    code = exit_codes[rank]
    if signals.number is not None:
        return End(signals.exit_code(codes), is_final=True)
    if EXIT_HANG in codes:
        return End(EXIT_HANG, "a rank hung")  # The rank that found it has printed the hang report.
    if EXIT_BROKEN_PIPE in codes:
        cause = "the reader of the output has closed the pipe; all ranks were stopped"
        print(f"error: {cause}", file=sys.stderr)
        return End(EXIT_BROKEN_PIPE, cause)
    # Saves failed, or only this rank got a signal; ranks that lost their neighbour because of it end with 1.
    if code == EXIT_STOPPED:
        return End(EXIT_STOPPED, "the ranks have stopped, to be started again")
    cause = f"rank {rank} {describe_exit(code)}"
    if code != EXIT_USER_ERROR:  # The rank has printed the error of the user.
        print(f"error: {cause} The other ranks were stopped.", file=sys.stderr)
    is_final = code in (EXIT_USER_ERROR, EXIT_DIVERGED)  # Another start would end in the same way.
    return End(code if is_final else EXIT_FAILED_RANK, cause)


def describe_exit(exit_code: int) -> str:
    """Describe the end of a rank in words; negative codes are signals."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}; its output is above."
    remark = " The usual reason is that memory ran out." if -exit_code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-exit_code).name}.{remark}"
