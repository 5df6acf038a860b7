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
MARK = "GLM46_TEST"
"""A variable that all descendants of a started program inherit, by which those left behind are found."""


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
"""Addresses without a file, one of each port, held until this process and its forks have ended."""


def free_port(behind: int = 0) -> int:
    """A port of this machine that nothing listens on and that no other test gets, now or after a pause.

    It is below those that the system gives to connections, one of which could have it when it is used.

    Args:
        behind: so many ports behind it are kept as well: a launcher takes the next one at each restart.
    """
    for port in random.Random(os.urandom(8)).sample(range(10_000, 29_000), 1000):
        reserved = []
        try:
            for number in range(port, port + behind + 1):
                reserved.append(socket.socket(socket.AF_UNIX))
                reserved[-1].bind(f"\0glm46-test-port-{number}")
                socket.create_server(("", number)).close()
        except OSError:
            for one in reserved:
                one.close()
            continue
        _RESERVED.extend(reserved)
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
    """True for a process that torchrun has started as a rank. Its children inherit its variables, not its session."""
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        return os.getsid(process) == process and any(word.startswith(b"LOCAL_RANK=") for word in variables)
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_alive(process: int) -> bool:
    """True for a process that exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_behind(mark: str) -> list[int]:
    """Living processes that inherited the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            has_mark = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if has_mark and is_alive(int(folder.name)):
            found.append(int(folder.name))
    return found
