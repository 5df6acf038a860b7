"""The alarm of a hung run, in the store that all ranks share.

The first rank that answers an alarm speaks for all. It alone reads all answers: the calls of every other rank are as
many on thousands of ranks as on two, and each names one key. One process serves the store.
"""

import json
import os
import socket
import time
from typing import Any

import torch.distributed as dist

from glm46.engine.reliability.hang_report import Answers

_PREFIX = "glm46/hang/"
_SET, _ANSWERED, _COMPLETE, _REPORTED = (_PREFIX + name for name in ("alarm", "answered", "complete", "reported"))
_PROCESSES = _PREFIX + "processes"
"""A line for each rank: [rank, [host, process id]]."""
_ANSWERS = _PREFIX + "answers"
"""A line for each rank that has answered: [rank, answer]."""
_HUNG = _PREFIX + "hung/"
"""Before the name of a host: the process ids of its ranks that do not answer."""
_POLL_SECONDS = 0.1


class Alarm:
    """The alarm as one rank sees it; making it registers the rank. Every call may hang or raise RuntimeError.

    Args:
        store: a connection of its own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self._store: Any = store  # torch's annotations lack `append`
        self._rank, self._world_size = rank, world_size
        self._append(_PROCESSES, [socket.gethostname(), os.getpid()])

    def is_set(self) -> bool:
        """True if some rank has found a hang."""
        return self._store.check([_SET])

    def is_reported(self) -> bool:
        """True if the ranks that answer end now."""
        return self._store.check([_REPORTED])

    def answer(self, answer: dict[str, Any]) -> int:
        """Set the alarm, and answer it; returns the number of ranks that have answered so far."""
        self._store.set(_SET, "1")
        self._append(_ANSWERS, answer)
        number = self._store.add(_ANSWERED, 1)
        if number == self._world_size:
            self._store.set(_COMPLETE, "1")
        return number

    def answers(self, end: float) -> tuple[Answers, dict[int, tuple[str, int]]]:
        """The answers of the ranks that answer until a time of `time.monotonic`, and host and process id of all."""
        self._wait(_COMPLETE, end)
        answers, processes = (dict(map(json.loads, self._store.get(of).splitlines())) for of in (_ANSWERS, _PROCESSES))
        return answers, processes

    def report(self, silent: list[tuple[str, int]]) -> None:
        """Let all ranks end. `silent` are host and process id of those that have not answered."""
        for host in {host for host, _ in silent}:
            self._store.set(_HUNG + host, json.dumps([process_id for of, process_id in silent if of == host]))
        self._store.set(_REPORTED, "1")

    def hung_here(self, end: float) -> list[int]:
        """Process ids of the ranks of this host that have not answered, once that is reported; none at a time of
        `time.monotonic`."""
        self._wait(_REPORTED, end)
        key = _HUNG + socket.gethostname()
        return json.loads(self._store.get(key)) if self._store.check([key]) else []

    def _append(self, key: str, value: Any) -> None:
        self._store.append(key, f"{json.dumps([self._rank, value])}\n")

    def _wait(self, key: str, end: float) -> None:
        while time.monotonic() < end and not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
