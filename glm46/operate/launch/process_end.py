"""The end of a process of the command line, and the ranks that it has started. Needs no torch."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence

from glm46.engine.reliability.stop import SIGNALS, SignalListener, exit_now, is_ending, living_processes

EXIT_BROKEN_PIPE = 141
"""Exit code of a process that the closed pipe of its output has cut off: 128 + SIGPIPE, as a shell reports it."""
_WAIT_SECONDS = 1.0
ENDING_SIGNALS = (*SIGNALS, signal.SIGQUIT)


def end_on_signals(code: Callable[[int], int], signals: Sequence[int] = ENDING_SIGNALS) -> SignalListener:
    """End this process and its descendants on a signal.

    Args:
        code: number of the signal -> exit code.
        signals: those that end it; others keep their handlers.
    """

    def on_signal(number: int) -> None:
        exit_now(code(number), f"stopped by {signal.Signals(number).name}")

    return SignalListener(on_signal, signals)


def wait_if_ending() -> None:
    """Never return while `exit_now` ends this process: what other threads make of the end of its descendants, such as
    an error and its exit code, must not be what the process ends with."""
    while is_ending.is_set():
        time.sleep(_WAIT_SECONDS)


def started_ranks(launcher: int | None = None) -> list[int]:
    """Process ids of the ranks of a launcher, by default of this one: living leaders of a process group among children
    of it and of its server. Workers that prepare data are leaders too; they and their programs are left out."""
    me, table = launcher or os.getpid(), living_processes()
    workers = {worker.pid for worker in multiprocessing.active_children()}
    return [
        process
        for process, (parent, group) in table.items()
        if group == process and me in (parent, table.get(parent, (0, 0))[0]) and workers.isdisjoint((process, parent))
    ]
