"""Wishes to stop: Ctrl-C, and the signals by which job systems announce the end."""

import signal

EXIT_STOPPED = 75
"""Exit code of a rank that was asked to stop and has saved: start the same command again. Source: EX_TEMPFAIL of
sysexits.h, which job systems know as a reason to try again."""

EXIT_HANG = 76
"""Exit code of a run that was ended because a rank had gone silent."""

STOPPED = "stopped"
"""File in the dump folder that says after which step a run was stopped by a signal and saved."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """Remembers that this rank was asked to stop. The ranks agree on it between two steps, so that all stop after the
    same one; until then the signal only sets a flag, and a second one changes nothing."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous = {number: signal.signal(number, self._remember) for number in _SIGNALS}

    def _remember(self, number: int, _frame) -> None:
        self.signal_name = signal.Signals(number).name

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
