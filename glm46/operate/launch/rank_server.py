"""The process of a node that forks its ranks. It has imported what they need, so a start takes no imports: each node
does them once, while the launcher checks and prepares or waits as a spare.

    launcher                         server                               rank
    starts the server          ----> imports, then reads orders
    order: arguments, variables ---> forks                          ----> runs the command line
    process id                 <----
    exit code, at once         <---- is told by the system          <---- ends

The server has one thread, and never uses a GPU: a process that was forked after the driver had been initialised could
not use one. If a library opens the driver while it is imported, each rank starts a new interpreter instead.
"""

import atexit
import ctypes
import gc
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import cast

from glm46.compute.distributed.environment import replace_variables
from glm46.compute.distributed.process_control import die_with_parent
from glm46.engine.observe.start_times import VARIABLE as START_TIMES
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import EXIT_HANG, EXIT_STOPPED, SIGNALS

_PR_SET_NAME = 15  # of linux/prctl.h
_FOLLOW_SECONDS = 3.0
"""For the other ranks of a node to end by themselves after one has failed. The newest checkpoint is complete, and what
they could still do is to print their own errors."""
_HANG_FOLLOW_SECONDS = 10.0
"""The same after a hang: each rank writes its stacks and its collectives."""


class RankProcess:
    """A rank, with those attributes of `subprocess.Popen` that torchrun uses."""

    def __init__(self, pid: int, server: "RankServer"):
        self.pid, self._server = pid, server
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        """The rank has ended with this exit code, negative for a signal."""
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end, and after the failure of a rank of this node not longer than it takes to report errors.

        Raises:
            subprocess.TimeoutExpired: it runs on; torchrun kills it then.
        """
        if not self._ended.wait(min(timeout, self._server.seconds_to_follow())):
            raise subprocess.TimeoutExpired("rank", timeout)
        return cast(int, self.returncode)


class RankServer:
    """The server as the launcher sees it. The process starts at once, and again if it has been killed.

    Make it in the main thread: the system kills the server when the thread that started it ends.

    Args:
        modules: what the server imports; an import that fails will fail again in the ranks, which report it.

    Attributes:
        failed_at: `time.time` when the first rank of the last start failed; None before.
        first_failed: process id of that rank; 0 before.
    """

    def __init__(self, modules: Sequence[str]):
        self._modules = list(modules)
        self._ranks: dict[int, RankProcess] = {}
        self.failed_at: float | None = None
        self.first_failed, self._follow_until = 0, float("inf")
        self._begin()

    def begin_start(self) -> None:
        """Forget the ranks of the start before."""
        self._ranks, self.failed_at, self.first_failed, self._follow_until = {}, None, 0, float("inf")
        if self._process.poll() is not None:
            self._begin()

    def start(self, command: Sequence[str], variables: Mapping[str, str], times: StartTimes) -> RankProcess:
        """Start a rank.

        Args:
            command: with the arguments of ``python -m glm46`` behind the name of the package.
            variables: all environment variables of the rank.
            times: of this start.

        Raises:
            RuntimeError: the server was killed.
        """
        arguments = command[command.index("glm46") + 1 :]
        order = {"arguments": arguments, "variables": {**variables, START_TIMES: times.to_text()}}
        with suppress(OSError):
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        pid = self._started.get()
        if pid is None:
            raise RuntimeError("the process that starts the ranks was killed")
        return self._ranks[pid]

    def seconds_to_follow(self) -> float:
        """Time that the ranks still have to end, after one of them has failed."""
        return max(self._follow_until - time.monotonic(), 0.0)

    def close(self) -> None:
        """End the server, and with it ranks that still run."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _begin(self) -> None:
        self._started: queue.Queue[int | None] = queue.Queue()
        self._socket, theirs = socket.socketpair()
        # Signals of terminals and job systems, which reach all processes, are for the launcher and the ranks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGQUIT))
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", __name__, str(theirs.fileno()), *self._modules], pass_fds=[theirs.fileno()]
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        threading.Thread(target=self._listen, args=(self._socket, self._started), name="ranks", daemon=True).start()

    def _listen(self, connection: socket.socket, started: queue.Queue[int | None]) -> None:
        with suppress(OSError), connection.makefile() as lines:
            for line in lines:
                pid, code = json.loads(line)
                if code is None:
                    self._ranks[pid] = RankProcess(pid, self)
                    started.put(pid)
                elif pid in self._ranks:
                    self._end(self._ranks[pid], code)
        for rank in list(self._ranks.values()):
            if rank.returncode is None:  # the system has killed it with the server
                self._end(rank, -signal.SIGKILL)
        started.put(None)

    def _end(self, rank: RankProcess, code: int) -> None:
        if code not in (0, EXIT_STOPPED) and self.failed_at is None:
            self.failed_at, self.first_failed = time.time(), rank.pid
            self._follow_until = time.monotonic() + (_HANG_FOLLOW_SECONDS if code == EXIT_HANG else _FOLLOW_SECONDS)
        rank.end(code)


def serve(descriptor: int, modules: Sequence[str]) -> list[str] | None:
    """Fork ranks until the launcher has ended.

    Args:
        descriptor: socket of the launcher.
        modules: what to import before.

    Returns:
        In a rank, its command line; in the server None.
    """
    for module in ("glm46.cli", *modules):
        with suppress(Exception):
            import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise write to, and so copy, what all ranks share
    woken, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children, received = set[int](), b""
    while True:
        readable, _, _ = select.select([descriptor, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            for pid in [*children]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    children.remove(pid)
                    _send(descriptor, pid, os.waitstatus_to_exitcode(status))
        if descriptor in readable:
            data = os.read(descriptor, 1 << 16)
            if not data:
                return None
            *orders, received = (received + data).split(b"\n")
            for order in map(json.loads, orders):
                server, pid = os.getpid(), os.fork()
                if pid == 0:
                    for inherited in (descriptor, woken, sender):
                        os.close(inherited)
                    return _become_rank(server, **order)
                children.add(pid)
                _send(descriptor, pid, None)


def _send(descriptor: int, pid: int, code: int | None) -> None:
    with suppress(OSError):  # the launcher has ended
        os.write(descriptor, f"[{pid}, {json.dumps(code)}]\n".encode())


def _become_rank(server: int, arguments: list[str], variables: dict[str, str]) -> list[str]:
    """Give this forked process what a new interpreter would have; returns its command line."""
    os.setsid()
    atexit.register(gc.unfreeze)  # what is still frozen at the end, Triton's library reports as leaks
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    replace_variables(variables)
    die_with_parent(server)
    if _driver_is_open():
        os.execve(sys.executable, [sys.executable, "-u", "-m", "glm46", *arguments], variables)
    _set_process_name(f"glm46-rank{variables['RANK']}")
    return arguments


def _driver_is_open() -> bool:
    """True if this process has a file of a GPU driver open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return any(link.startswith(("/dev/nvidia", "/dev/kfd")) for link in links)


def _set_process_name(name: str) -> None:
    """Set the name of this process that ``ps -o comm`` and ``pgrep`` show; they cut it off after 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    command_line = serve(int(sys.argv[1]), sys.argv[2:])
    if command_line is None:
        os._exit(0)
    sys.argv[1:] = command_line
    sys.exit(import_module("glm46.__main__").run())
