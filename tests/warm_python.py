"""A Python with torch and glm46 imported: a program that starts as ``python ARGUMENTS``, without seconds of imports.

`WarmPython` makes an executable file and a server process. The file sends its arguments, folder, variables and outputs
to the server, and the server forks a process that runs them and answers with the exit code.
"""

import contextlib
import gc
import json
import os
import runpy
import shlex
import socket
import socketserver
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FILE = """#!/bin/sh
exec {python} -IS {folder}/send.py "$0" "$@"
"""
_SEND = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(__file__), "socket"))
socket.send_fds(server, [b"-"], [0, 1, 2])
server.sendall(json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode() + b"\\n")
code = server.recv(16)
sys.exit(int(code) if code else 137)  # without an answer the process was killed
"""


class WarmPython:
    """The server's side of the tests; ``file`` is the path of the executable file."""

    def __init__(self, folder: Path):
        self.file = folder / "python"
        (folder / "send.py").write_text(_SEND)
        self.file.write_text(_FILE.format(python=shlex.quote(sys.executable), folder=shlex.quote(str(folder))))
        self.file.chmod(0o755)
        command = [sys.executable, "-m", "tests.warm_python", folder / "socket", str(os.getpid())]
        self._server = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        while not (folder / "socket").exists():
            assert self._server.poll() is None, "the server ended"
            time.sleep(0.02)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(60)


class _Fork(socketserver.StreamRequestHandler):
    """In a forked process: run what was sent as an interpreter does."""

    def handle(self) -> None:
        _, descriptors, *_ = socket.recv_fds(self.request, 1, 3)
        folder, environment, (sys.executable, *sys.argv) = json.loads(self.rfile.readline())
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        code = 0
        try:
            if sys.argv[0] == "-c":
                exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # it must end here, whatever happened
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        self.request.sendall(str(code).encode())


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    parent = 0

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self.parent:  # the tests were killed
            raise SystemExit


def main(address: str, parent: str) -> None:
    """Serve until terminated."""
    import torch

    import glm46.operate.launch.host_group
    import glm46.storage.checkpoint.gathering
    import glm46.storage.checkpoint.manager  # noqa: F401

    torch.set_num_threads(1)
    # As in tests/ranks/forked_ranks.py: the pool of a fork is made anew by one thread, before there are others.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    gc.freeze()  # no garbage collection of a fork looks at what was imported
    _Server.parent = int(parent)
    with contextlib.suppress(KeyboardInterrupt), _Server(address + ".new", _Fork) as server:
        os.rename(address + ".new", address)  # from here on it listens
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
