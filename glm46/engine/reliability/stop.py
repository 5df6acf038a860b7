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

EXIT_STOPPED = 75
"""Exit code of a rank that was asked to stop and has saved: run the same command again. Source: EX_TEMPFAIL of
sysexits.h, on which job systems retry."""

EXIT_HANG = 76
"""Exit code of a run that was ended because a rank hung."""

EXIT_DIVERGED = 77
"""Exit code of a run whose steps or weights went bad and that cannot roll back."""

EXIT_SIGNAL = 128
"""Exit code of a process that a signal ended, minus the number of the signal."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

before_exit: list[Callable[[], None]] = []
"""What `exit_now` calls before the end. Each call gets a second, because a disk may not answer."""
_CLEAN_SECONDS = 1.0
is_ending = threading.Event()
"""Set by `exit_now`."""

REPEAT_SECONDS = 1.0
"""Signals within this time count as one: terminals, `timeout` and job systems may send a signal to a process and
again to its group."""


# A forked process, such as a worker of a loader, would otherwise write its signals into the pipe of its parent.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class SignalListener:
    """Calls a function in a thread for each signal, at once, even while the main thread waits in code that no signal
    interrupts. Raises no exception in the main thread: it could get lost in an import or a callback."""

    def __init__(self, on_signal: Callable[[int], None], signals: Sequence[int] = SIGNALS) -> None:
        self._on_signal = on_signal
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        # Python writes the number of each signal to this pipe when it arrives, whatever the interpreter is doing.
        self._wakeup_before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        # A process started by `nohup` ignores SIGHUP.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._previous = {number: signal.signal(number, lambda *_: None) for number in set(signals) - ignored}
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._sender)

    def _listen(self) -> None:
        while numbers := os.read(self._receiver, 64):
            for number in numbers:
                if number in self._previous:
                    self._on_signal(number)
        os.close(self._receiver)


class Diverged(UserError):
    """Steps or weights went bad, and the run cannot roll back."""

    exit_code = EXIT_DIVERGED
    remedy = "lower optimizer.lr, or look at the samples named in log.txt"


class StopRequest:
    """Records that this rank was asked to stop. The ranks agree on it between two steps and stop after the same one;
    until then the signal only sets a flag.

    Before training starts there is nothing to save, and a signal ends the process at once. A second signal does so at
    any time, even while the main thread waits for other ranks.

    Attributes:
        signal_name: name of the first signal; None if there was none.
        has_started: True from the first exchange of all ranks on; from then on a stop saves first.
        has_ended: set by the trainer after the last save; from then on signals are ignored. Torchrun signals the
            remaining ranks when the first one exits.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0
        self._is_asked = threading.Event()
        self.has_started = self.has_ended = False
        self._listener = SignalListener(self._on_signal)

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        self._listener.restore()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around each exchange of stop requests. A signal in the first one does not end this process, because another
        rank may have left it and be training. If it fails, a rank has ended, maybe on a signal that is on its way."""
        is_first, self.has_started = not self.has_started, True
        try:
            yield
        except RuntimeError as error:
            if is_first and self._is_asked.wait(REPEAT_SECONDS) and self.signal_name:
                self._end_before_training(signal.Signals[self.signal_name], f"{error}\n")
            raise

    def _end_before_training(self, number: int, cause: str = "") -> None:
        said = f"{cause}stopped by {signal.Signals(number).name} before training began; nothing is lost"
        exit_now(code_before_training(number), said)

    def _on_signal(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
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
    """Exit code of a run that a signal ends while there is nothing to save. SIGINT and SIGQUIT come from the keyboard
    and must not return the code on which job systems retry."""
    return EXIT_SIGNAL + number if number in (signal.SIGINT, signal.SIGQUIT) else EXIT_STOPPED


def exit_now(code: int, reason: str) -> None:
    """End this process and its descendants at once, from any thread, and print the reason."""
    is_ending.set()
    try:
        for process in _descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for clean in before_exit:
            cleaner = threading.Thread(target=clean, daemon=True)
            cleaner.start()
            cleaner.join(_CLEAN_SECONDS)
        # A progress bar has hidden the cursor.
        show_cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
        # A write to a full pipe without a reader would block.
        with suppress(OSError):
            if select.select([], [2], [], 0)[1]:
                os.write(2, f"{show_cursor}{reason}\n".encode())
    finally:
        os._exit(code)


def _descendants(process: int) -> list[int]:
    table, found = living_processes(), [process]
    for ancestor in found:  # grows inside the loop
        found += [child for child, (parent, _) in table.items() if parent == ancestor]
    return found[1:]


def living_processes() -> dict[int, tuple[int, int]]:
    """Parent and group of each living process."""
    table = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                state, parent, group = file.read().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                table[int(pid)] = (int(parent), int(group))
    return table
