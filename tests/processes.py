"""Waits of the tests, for an event, with a limit that only ends a hang; and what is known of a process."""

import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
HANG_SECONDS = 300.0
"""A test that waits so long has hung: no event of these tests takes so long, on however busy a machine."""
PROGRAM_SECONDS = 1800.0
"""The same for a program that computes many cases."""


def wait_until(find: Callable[[], Found], said: str | Callable[[], str] = "", seconds: float = HANG_SECONDS) -> Found:
    """Wait until a function returns something true, and return that.

    Args:
        said: the message if it does not, or a function that makes it; it may raise its own error before.
        seconds: to wait at most.
    """
    end = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < end, said() if callable(said) else said
        time.sleep(0.01)
    return found


_RESERVED: list[socket.socket] = []
_PORTS_OF_A_RUN = 10
"""A launcher takes the next port at each restart."""


def free_port() -> int:
    """A port of this machine that nothing listens on, with free ones behind it, and that no other test gets.

    It is below those that the system gives to connections, one of which could have it when it is used.
    """
    candidates = range(10_000, 29_000, _PORTS_OF_A_RUN)
    for port in random.Random(os.urandom(8)).sample(candidates, len(candidates)):
        reserved = socket.socket(socket.AF_UNIX)
        try:
            reserved.bind(f"\0glm46-test-port-{port}")  # held until this process and its forks have ended
            for number in range(port, port + _PORTS_OF_A_RUN):
                socket.create_server(("", number)).close()
        except OSError:
            reserved.close()
            continue
        _RESERVED.append(reserved)
        return port
    raise AssertionError("no port is free")


def children_of(process: int) -> list[int]:
    """Process ids of its living children, in the order in which they were started."""
    try:
        listed = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in listed if is_alive(int(child))]


def is_rank(process: int) -> bool:
    """True for a process that a server of ranks has forked as a rank."""
    try:
        return Path(f"/proc/{process}/comm").read_text().startswith("glm46-rank")
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_alive(process: int) -> bool:
    """True for a process that exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
