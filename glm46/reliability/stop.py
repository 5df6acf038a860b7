"""Signals that ask for the end: Ctrl-C, and those by which job systems announce it."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from glm46.config.errors import UserError

EXIT_STOPPED = 75
"""Exit code of a rank that was asked to stop and has saved: start the same command again. Source: EX_TEMPFAIL of
sysexits.h, which job systems know as a reason to try again."""

EXIT_HANG = 76
"""Exit code of a run that was ended because a rank had gone silent."""

EXIT_DIVERGED = 77
"""Exit code of a run that was ended because its steps or its weights went bad and no way back was left."""

EXIT_SIGNAL = 128
"""Exit code of what a signal has ended, less the number of the signal."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

REPEAT_SECONDS = 1.0
"""Terminals, `timeout` and job systems may send one signal to a process and once more to its group."""


# A forked process, such as a worker of a loader, must not tell its parent of its own signals.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class SignalListener:
    """Calls a function in a thread of its own for each signal, at once, whatever the main thread does: it may wait in
    code that no signal ends. No exception is raised, because an exception can get lost in an import or a callback."""

    def __init__(self, hear: Callable[[int], None], signals: Sequence[int] = SIGNALS) -> None:
        self._hear = hear
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        # Python writes the number of each signal there the moment it comes, whatever the interpreter does.
        self._wakeup_before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        # Started by `nohup`, a process lives on when its terminal closes.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._previous = {number: signal.signal(number, lambda *_: None) for number in set(signals) - ignored}
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def restore(self) -> None:
        """Give the signals back to the handlers before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._sender)

    def _listen(self) -> None:
        while numbers := os.read(self._receiver, 64):
            for number in numbers:
                if number in self._previous:
                    self._hear(number)
        os.close(self._receiver)


class Diverged(UserError):
    """Steps or weights went bad, and no way back is left."""

    exit_code = EXIT_DIVERGED
    remedy = "lower optimizer.lr, or look at the samples named in log.txt"


class StopRequest:
    """Remembers that this rank was asked to stop. The ranks agree on it between two steps, so that all stop after the
    same one; until then the signal only sets a flag.

    Before training begins there is nothing to save, and a signal ends the process at once; so does a second one at any
    time, even while the main thread waits for other ranks.

    Attributes:
        signal_name: of the first signal; None while there was none.
        has_started: set by the trainer when all ranks begin; from then on there is something to save before the end.
        has_ended: set by the trainer when it has stopped and saved; from then on signals change nothing. Torchrun sends
            one to the ranks that have not left when the first one has.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0
        self.has_started = False
        self.has_ended = False
        self._listener = SignalListener(self._hear)

    def restore(self) -> None:
        """Give the signals back to the handlers before."""
        self._listener.restore()

    def _hear(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        self.signal_name = self.signal_name or name
        if self.has_ended:
            return
        if not self.has_started:
            exit_now(code_before_training(number), f"stopped by {name} before training began; nothing is lost")
        if not self._first_at:
            self._first_at = now
        elif now - self._first_at > REPEAT_SECONDS:
            exit_now(EXIT_SIGNAL + number, f"a second signal, {name}: ended at once, without a save")


def code_before_training(number: int) -> int:
    """Exit code of a run that a signal ends while there is nothing to save: a job system may start it again; a person
    who pressed a key has ended it."""
    return EXIT_SIGNAL + number if number in (signal.SIGINT, signal.SIGQUIT) else EXIT_STOPPED


def end_on_signals(code: Callable[[int], int]) -> SignalListener:
    """From now on a signal ends this process and all that it started, with the exit code of the signal."""

    def hear(number: int) -> None:
        exit_now(code(number), f"stopped by {signal.Signals(number).name}")

    return SignalListener(hear, (*SIGNALS, signal.SIGQUIT))


def exit_now(code: int, reason: str) -> None:
    """End this process and all that it started, from any thread, whatever the others do."""
    for process in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    show_cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""  # a progress bar hides it
    # The end must not wait for a pipe that is full and not read.
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{show_cursor}{reason}\n".encode())
    os._exit(code)


def started_ranks() -> list[int]:
    """Process ids of the living children of this process that lead a group, as torchrun starts its ranks."""
    me = os.getpid()
    return [process for process, (parent, group) in _processes().items() if parent == me and group == process]


def _descendants(process: int) -> list[int]:
    table, found = _processes(), [process]
    for ancestor in found:  # grows
        found += [child for child, (parent, _) in table.items() if parent == ancestor]
    return found[1:]


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and group of each living process."""
    table = {}
    for pid, state, parent, group in _process_lines():
        if state[0] not in "ZX":
            table[int(pid)] = (int(parent), int(group))
    return table


def _process_lines() -> Iterator[list[str]]:
    if not os.path.exists("/proc/self/stat"):  # macOS
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,stat=,ppid=,pgid="], capture_output=True, text=True, check=False
        )
        yield from map(str.split, listed.stdout.splitlines())
        return
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                yield [name, *file.read().rpartition(")")[2].split()[:3]]
        except OSError:  # it has ended
            continue
