"""Alarm of a hung run, in the store that all ranks share.

The first rank that answers an alarm reports for all ranks. Only this rank reads all answers. Each other rank makes a
fixed number of calls with one key each, because a single process serves the store of thousands of ranks.
"""

import json
import os
import socket
import time
from typing import Any

from glm46.compat import Store
from glm46.engine.reliability.hang_answers import Answers

_PREFIX = "glm46/hang/"
_SET = _PREFIX + "alarm"
_ANSWERED = _PREFIX + "answered"
"""Key with the number of ranks that have answered."""
_COMPLETE = _PREFIX + "complete"
"""Key that is set when all ranks have answered."""
_REPORTED = _PREFIX + "reported"
_PROCESSES = _PREFIX + "processes"
"""Key with a line for each rank: [rank, [host, process id]]."""
_ANSWERS = _PREFIX + "answers"
"""Key with a line for each rank that has answered: [rank, answer]."""
_HUNG = _PREFIX + "hung/"
"""Prefix of keys with the name of a host, for the process ids of its ranks that do not answer."""
_POLL_SECONDS = 0.1


class Alarm:
    """The alarm from the view of one rank; the constructor registers the rank. Every call may hang or raise
    RuntimeError.

    Args:
        store: a connection that nothing else uses.
    """

    def __init__(self, store: Store, rank: int, world_size: int):
        self._store: Any = store  # torch's annotations lack `append`
        self._rank = rank
        self._world_size = world_size
        self._append(_PROCESSES, [socket.gethostname(), os.getpid()])

    def is_set(self) -> bool:
        """True if some rank has found a hang."""
        is_set: bool = self._store.check([_SET])
        return is_set

    def is_reported(self) -> bool:
        """True if the hang has been reported, so that all ranks that answered should end."""
        is_reported: bool = self._store.check([_REPORTED])
        return is_reported

    def answer(self, answer: dict[str, Any]) -> int:
        """Set the alarm, and answer it. Returns the number of ranks that have answered so far."""
        self._store.set(_SET, "1")
        self._append(_ANSWERS, answer)
        number: int = self._store.add(_ANSWERED, 1)
        if number == self._world_size:
            self._store.set(_COMPLETE, "1")
        return number

    def answers(self, end: float) -> tuple[Answers, dict[int, tuple[str, int]]]:
        """Wait for answers until ``end``, a time of `time.monotonic`. Returns the answers by rank, and the host and
        process id of every rank."""
        self._wait(_COMPLETE, end)
        return self._by_rank(_ANSWERS), self._by_rank(_PROCESSES)

    def report(self, silent: list[tuple[str, int]]) -> None:
        """Tell all ranks to end.

        Args:
            silent: host and process id of each rank that has not answered.
        """
        for host in {host for host, _ in silent}:
            self._store.set(
                _HUNG + host, json.dumps([process_id for silent_host, process_id in silent if silent_host == host])
            )
        self._store.set(_REPORTED, "1")

    def hung_here(self, end: float) -> list[int]:
        """Wait for the report until ``end``, a time of `time.monotonic`. Returns the process ids of the ranks of this
        host that have not answered; empty without a report."""
        self._wait(_REPORTED, end)
        key = _HUNG + socket.gethostname()
        return json.loads(self._store.get(key)) if self._store.check([key]) else []

    def _append(self, key: str, value: object) -> None:
        self._store.append(key, f"{json.dumps([self._rank, value])}\n")

    def _by_rank(self, key: str) -> dict[int, Any]:
        return dict(map(json.loads, self._store.get(key).splitlines()))

    def _wait(self, key: str, end: float) -> None:
        while time.monotonic() < end and not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
