"""Graceful stop on Ctrl-C and on the signals of job systems, and the exit codes of a run."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from glm46.config.errors import UserError
from glm46.files.threads import start_daemon

EXIT_STOPPED = 75
"""Exit code of a rank that has stopped on request and has saved: run the same command again. Source: EX_TEMPFAIL of
sysexits.h, on which job systems retry."""

EXIT_HANG = 76
"""Exit code of a run that was ended because a rank hung."""

EXIT_DIVERGED = 77
"""Exit code of a run that diverged and cannot roll back."""

EXIT_SIGNAL = 128
"""Base of the exit code of a process that a signal ended; the number of the signal is added."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

is_ending = threading.Event()
"""Event that is set when `exit_now` ends this process."""

REPEAT_SECONDS = 1.0
"""Signals within this time count as one: terminals, `timeout` and job systems may send a signal to a process and
again to its group."""


# A forked process, such as a worker of a loader, would otherwise write its signals into the pipe of its parent.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class SignalListener:
    """Calls a function in a thread for each signal, immediately, even while the main thread waits in code that no
    signal interrupts. Raises no exception in the main thread, where it could be lost in an import or a callback."""

    def __init__(self, on_signal: Callable[[int], None], signals: Sequence[int] = SIGNALS) -> None:
        self._on_signal = on_signal
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        # Python writes the number of each signal to this pipe on arrival, even if the interpreter is busy.
        self._wakeup_before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        # A process started by `nohup` ignores SIGHUP.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._previous = {number: signal.signal(number, lambda *_: None) for number in set(signals) - ignored}
        start_daemon(self._listen, "signals")

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._sender)  # ends the thread

    def _listen(self) -> None:
        while numbers := os.read(self._receiver, 64):
            for number in numbers:
                if number in self._previous:
                    self._on_signal(number)
        os.close(self._receiver)


class Diverged(UserError):
    """Raised if steps or weights are bad and the run cannot roll back."""

    exit_code = EXIT_DIVERGED
    remedy = "lower optimizer.lr, or look at the samples named in log.txt"


class StopRequest:
    """Stop requests to this rank. The ranks agree on a stop between two steps and stop after the same step; until then
    the signal only sets a flag.

    Before training starts there is nothing to save, and a signal ends the process immediately. A second signal does so
    at any time, even while the main thread waits for other ranks.

    Attributes:
        signal_name: name of the first signal; None if there was none.
        has_started: True after the first exchange of all ranks has begun; from then on a stop saves first.
        has_ended: set by the trainer after the last save; from then on signals are ignored. Torchrun signals the
            remaining ranks when the first one exits.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0  # time of the first signal
        self._is_asked = threading.Event()
        self.has_started = self.has_ended = False
        self._listener = SignalListener(self._on_signal)

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        self._listener.restore()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Wrap each exchange of stop requests. A signal during the first exchange does not end this process, because
        another rank may have completed it and be training. If the exchange fails, a rank has ended, perhaps on a signal
        that this rank is about to receive."""
        is_first = not self.has_started
        self.has_started = True
        try:
            yield
        except RuntimeError as error:
            if is_first and self._is_asked.wait(REPEAT_SECONDS) and self.signal_name:
                self._end_before_training(signal.Signals[self.signal_name], f"{error}\n")
            raise

    def _end_before_training(self, number: int, cause: str = "") -> None:
        message = f"{cause}stopped by {signal.Signals(number).name} before training began; nothing is lost"
        exit_now(code_before_training(number), message)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        self.signal_name = self.signal_name or name
        self._is_asked.set()
        if self.has_ended:
            return
        if not self.has_started:
            self._end_before_training(number)
        self._first_at = self._first_at or now
        if now - self._first_at > REPEAT_SECONDS:
            exit_now(EXIT_SIGNAL + number, f"a second signal, {name}: ended at once, without a save")


def code_before_training(number: int) -> int:
    """Return the exit code of a run that a signal ends before there is anything to save. SIGINT and SIGQUIT come from
    the keyboard and must not return the code on which job systems retry."""
    return EXIT_SIGNAL + number if number in (signal.SIGINT, signal.SIGQUIT) else EXIT_STOPPED


def exit_now(code: int, reason: str) -> None:
    """End this process and its descendants immediately, from any thread, and print the reason."""
    is_ending.set()
    try:
        for process in _descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        # A progress bar has hidden the cursor.
        show_cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
        # A write to a full pipe without a reader would block.
        with suppress(OSError):
            if select.select([], [2], [], 0)[1]:
                os.write(2, f"{show_cursor}{reason}\n".encode())
    finally:
        os._exit(code)


def _descendants(process: int) -> list[int]:
    table = living_processes()
    processes = [process]
    for ancestor in processes:  # grows inside the loop
        processes += [child for child, (parent, _) in table.items() if parent == ancestor]
    return processes[1:]


def living_processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the group of each living process."""
    table = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                state, parent, group = file.read().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                table[int(pid)] = (int(parent), int(group))
    return table
