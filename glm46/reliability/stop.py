"""Wishes to stop: Ctrl-C, and the signals by which job systems announce the end."""

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

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

STOPPED = "stopped"
"""File in the dump folder that is there while a run that ends loses nothing: before training, and behind its last save,
whose step it names."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

_SAME_WISH_SECONDS = 1.0
"""Job systems and terminals may tell a rank and the launcher, which tells the rank again: that is one wish."""


class Diverged(UserError):
    """Steps or weights went bad, and no way back is left."""

    exit_code = EXIT_DIVERGED
    remedy = "lower optimizer.lr, or look at the samples named in log.txt"


class StopRequest:
    """Remembers that this rank was asked to stop. The ranks agree on it between two steps, so that all stop after the
    same one; until then the signal only sets a flag.

    Before training begins there is nothing to save, and a signal ends the process at once; so does a second one at any
    time. A thread sees to that, because the main thread may be waiting for other ranks in code that no signal ends.

    Attributes:
        signal_name: of the first signal; None while there was none.
        has_begun: set by the trainer when all ranks begin; from then on there is something to save before the end.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0
        self.has_begun = False
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        # Python writes the number of each signal there the moment it comes, whatever the interpreter does.
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._sender.close()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name

    def _listen(self) -> None:
        while numbers := self._receiver.recv(64):
            for number in numbers:
                if number in SIGNALS:
                    self._hear(number)
        self._receiver.close()

    def _hear(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not self.has_begun:
            # Ctrl-C is no wish to start again.
            code = EXIT_SIGNAL + number if number == signal.SIGINT else EXIT_STOPPED
            _leave(code, f"stopped by {name} before training began; nothing is lost")
        if not self._first_at:
            self._first_at = now
        elif now - self._first_at > _SAME_WISH_SECONDS:
            _leave(EXIT_SIGNAL + number, f"a second signal, {name}: ended at once, without a save")


def _leave(code: int, reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(code)
