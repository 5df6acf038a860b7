"""Duration of a start, from the command or from a failure to the end of the first step.

A start passes through several processes: the driver of a hostfile, launchers, ranks. Each of them passes on the time at
which the start began, and the main rank reports the duration.
"""

import json
import time
from collections.abc import Mapping

VARIABLE = "GLM46_START_TIMES"
"""Environment variable by which a launcher passes the begin to its ranks."""


class StartTimes:
    """Event that began a start, and its time.

    Args:
        event: "the command" or "the failure".
        began: time of the event, in seconds since 1970; None for now.
    """

    def __init__(self, event: str, began: float | None = None):
        self._event = event
        self._began = time.time() if began is None else began
        self._is_over = False

    @classmethod
    def inherited(cls, variables: Mapping[str, str]) -> "StartTimes":
        """Read the begin that the parent process has set in its environment with `to_text`; if it is missing, or in the
        format of another version, the start begins now."""
        event, *began = json.loads(variables.get(VARIABLE, '["the command"]'))
        return cls(event, *(began if [type(value) for value in began] == [float] else ()))

    def to_text(self) -> str:
        """Return the begin as one line."""
        return json.dumps([self._event, self._began])

    def first_step(self) -> str | None:
        """Return the line about the duration at the end of the first step; None after later steps. Clocks of hosts may
        differ, and the duration includes that difference."""
        if self._is_over:
            return None
        self._is_over = True
        return f"first step {time.time() - self._began:.1f} s after {self._event}"
