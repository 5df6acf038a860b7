"""One process that has imported torch and glm46, and forks the programs of tests: seconds of imports are paid once.

tests                                   server
outputs, folder, variables, words ---->  forks a process that runs them as ``python WORDS``
process id                        <----
exit code                         <----  once it has ended
"""

import ctypes
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from tests.processes import wait_until

ROOT = Path(__file__).parents[1]
_SEND = """#!/bin/sh
exec {python} -ISc '
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address})
socket.send_fds(server, [b"-"], [0, 1, 2])
server.sendall(json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode() + b"\\n")
_, code = server.makefile()
sys.exit(int(code) if int(code) >= 0 else 128 - int(code))
' "$0" "$@"
"""


class ForkServer:
    """The server as the tests see it. ``file`` is an executable file: a Python without imports.

    Args:
        folder: for the file and the address.
        modules: what is imported before.
    """

    def __init__(self, folder: Path, *modules: str):
        self.file, self._address = folder / "python", str(folder / "socket")
        self.file.write_text(_SEND.format(python=shlex.quote(sys.executable), address=json.dumps(self._address)))
        self.file.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", self._address, *modules],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE,
        )  # fmt: skip
        wait_until(lambda: os.path.exists(self._address) or self._process.poll() is not None)
        assert self._process.poll() is None, "the server ended"

    def start(self, words: Sequence[str], output: BinaryIO, variables: Mapping[str, str]) -> tuple[int, socket.socket]:
        """Start a program without input; its process id, and the connection from which its exit code will come."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(connection, [b"-"], [nothing.fileno(), output.fileno(), output.fileno()])
        request = [str(ROOT), {**os.environ, **variables}, [sys.executable, *words]]
        connection.sendall(json.dumps(request).encode() + b"\n")
        return int(read_line(connection)), connection

    def close(self) -> None:
        """End it, and what it has started."""
        self._process.stdin.close()
        self._process.wait()


def read_line(connection: socket.socket) -> bytes:
    """The next line of a connection, and no byte behind it; without the line if the other side has ended."""
    line = b""
    while not line.endswith(b"\n") and (byte := connection.recv(1)):
        line += byte
    return line


def main(address: str, *modules: str) -> None:
    """Serve until the input is closed: the tests have ended, or were killed."""
    import torch

    for module in ("tests.harness", *modules):
        import_module(module)
    torch.set_num_threads(1)
    # Processes that programs spawn, such as those of rewards, would import this module, which takes 4 s of a core.
    this = sys.modules["__main__"]
    this.__spec__ = None
    del this.__file__
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would look at all that was imported, and copy its memory
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it for all that it starts
    woken, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address + ".new")
        listener.listen()
        os.rename(address + ".new", address)  # from here on it listens
        while 0 not in (readable := select.select([0, woken, listener], [], [])[0]):
            if listener in readable:
                connection, _ = listener.accept()
                process = _fork(connection)
                running[process] = connection
                _answer(connection, process)
            if woken in readable:
                os.read(woken, 4096)
                for process, connection in [*running.items()]:
                    done, status = os.waitpid(process, os.WNOHANG)
                    if done:
                        del running[process]
                        _answer(connection, os.waitstatus_to_exitcode(status))
                        connection.close()
    for process in running:
        with suppress(ProcessLookupError):  # it has not called setsid yet, and ends with its parent
            os.killpg(process, signal.SIGKILL)


def _answer(connection: socket.socket, number: int) -> None:
    with suppress(ConnectionError):  # nobody waits for it
        connection.sendall(f"{number}\n".encode())


def _fork(connection: socket.socket) -> int:
    from tests.harness import end_with

    process = os.fork()
    if process == 0:
        end_with(lambda: _run(connection))
    return process


def _run(connection: socket.socket) -> int:
    """Be the program, in a process of its own. It reads its request itself: a client that has gone ends this process
    alone, and not the server."""
    os.setsid()
    # Ranks end with their parent, a launcher does not: it would go on training after the tests were killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, *_ = socket.recv_fds(connection, 1, 3)
    folder, variables, words = json.loads(read_line(connection))
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
    os.closerange(3, 512)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.executable, *sys.argv = words
    if sys.argv[0] == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
