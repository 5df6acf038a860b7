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
        signals: signals that end it; others keep their handlers.
    """

    def on_signal(number: int) -> None:
        exit_now(code(number), f"stopped by {signal.Signals(number).name}")

    return SignalListener(on_signal, signals)


def wait_if_ending() -> None:
    """Wait forever if `exit_now` is ending this process. Its descendants end too, and errors that other threads
    raise about their end must not decide the exit code."""
    while is_ending.is_set():
        time.sleep(_WAIT_SECONDS)


def started_ranks(launcher: int | None = None) -> list[int]:
    """Return the process ids of the ranks of a launcher, by default of this process. Ranks are living children that
    lead a process group; workers that prepare data lead groups too, and are excluded."""
    launcher = launcher or os.getpid()
    workers = {worker.pid for worker in multiprocessing.active_children()}
    return [
        process
        for process, (parent, group) in living_processes().items()
        if group == process and parent == launcher and process not in workers
    ]
