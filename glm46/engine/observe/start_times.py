"""Seconds of each part of a start, from the command or from a failure to the end of the first step.

A start passes through several processes: the driver of a hostfile, launchers, ranks. Each of them adds the parts that
it has seen, and hands the times on; the main rank reports them.
"""

import json
import time
from collections.abc import Mapping

VARIABLE = "GLM46_START_TIMES"
"""By which a launcher hands the times to its ranks."""


class StartTimes:
    """The ends of the parts of one start, in seconds since 1970.

    Args:
        event: what began it, "the command" or "the failure".
        began: its time; None for now.
    """

    def __init__(self, event: str, began: float | None = None):
        self._event = event
        self._marks = [("", time.time() if began is None else began)]
        self._is_over = False

    @classmethod
    def inherited(cls, variables: Mapping[str, str]) -> "StartTimes":
        """The times that the process before has put into its variables, as `to_text`; without them, new ones."""
        times = cls("the command")
        if VARIABLE in variables:
            times._event, times._marks = json.loads(variables[VARIABLE])
        return times

    def to_text(self) -> str:
        """These times as one line."""
        return json.dumps([self._event, self._marks])

    def ends(self, part: str) -> None:
        """A part has ended now; it began with the end of the part before."""
        self._marks.append((part, time.time()))

    def first_step(self) -> str | None:
        """The parts and their sum, in seconds, at the end of the first step; None after later ones. Clocks of hosts may
        differ: a part then has less or more than its time."""
        if self._is_over:
            return None
        self.ends("first step")
        self._is_over = True
        ends = [end for _, end in self._marks]
        parts = [f"{part} {end - begin:.1f}" for (part, end), begin in zip(self._marks[1:], ends, strict=False)]
        return f"first step {ends[-1] - ends[0]:.1f} s after {self._event}: {', '.join(parts)}"
