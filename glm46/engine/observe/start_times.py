"""Seconds of a start, from the command or from a failure to the end of the first step.

A start passes through several processes: the driver of a hostfile, launchers, ranks. Each of them hands on when it
began, and the main rank reports it.
"""

import json
import time
from collections.abc import Mapping

VARIABLE = "GLM46_START_TIMES"
"""By which a launcher hands the begin to its ranks."""


class StartTimes:
    """The begin of one start.

    Args:
        event: what began it, "the command" or "the failure".
        began: its time, in seconds since 1970; None for now.
    """

    def __init__(self, event: str, began: float | None = None):
        self._event, self._began = event, time.time() if began is None else began
        self._is_over = False

    @classmethod
    def inherited(cls, variables: Mapping[str, str]) -> "StartTimes":
        """The begin that the process before has put into its variables, as `to_text`; without it, or in the form of
        another version, now."""
        event, *began = json.loads(variables.get(VARIABLE, '["the command"]'))
        return cls(event, *(began if [type(one) for one in began] == [float] else ()))

    def to_text(self) -> str:
        """The begin as one line."""
        return json.dumps([self._event, self._began])

    def first_step(self) -> str | None:
        """The sum at the end of the first step; None after later ones. Clocks of hosts may differ by some of it."""
        if self._is_over:
            return None
        self._is_over = True
        return f"first step {time.time() - self._began:.1f} s after {self._event}"
