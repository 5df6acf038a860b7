"""Servers that a run starts on its own machine and that end with it."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from glm46.compute.distributed.environment import environment_without_ranks
from glm46.tasks.rl.rollout.served_policy import EngineError

_LAST_LINES = 15
_STOP_SECONDS = 10
# Sets PR_SET_PDEATHSIG (linux/prctl.h) and execs the server, which inherits it: a killed run leaves no server.
_END_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


class LaunchedServers:
    """Starts one process per address, all with the same command. Use it on rank 0, in the main thread: the processes
    end with the thread that started them."""

    def __init__(self, command: Sequence[str], urls: Sequence[str], logs: Path, say: Callable[[str], None]):
        """
        Args:
            command: words of the command; ``{folder}`` and ``{port}`` are replaced by a Hugging Face folder and the
                port of an address.
            logs: folder of the servers' output.
        """
        self._command = command
        self._logs = logs
        self._say = say
        self._ports = [urlsplit(url).port or 80 for url in urls] if command else []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._folders: dict[int, Path] = {}
        atexit.register(self.stop)

    def folder_of(self, url: str) -> Path | None:
        """Return the folder that the server at an address was started with."""
        return self._folders.get(urlsplit(url).port or 80)

    def ensure(self, folder: Path) -> None:
        """Start the servers that do not run, with the model in a folder.

        Raises:
            EngineError: the command cannot be run.
        """
        for port in self._ports:
            if port not in self._running or self._running[port].poll() is not None:
                self._start(port, folder)

    def _start(self, port: int, folder: Path) -> None:
        words = [
            word.replace("{folder}", str(folder.absolute())).replace("{port}", str(port)) for word in self._command
        ]
        self._logs.mkdir(parents=True, exist_ok=True)
        self._folders[port] = folder
        with self._log(port).open("wb") as output:
            self._running[port] = subprocess.Popen(
                [sys.executable, "-c", _END_WITH_PARENT, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment_without_ranks(),
            )
        self._say(f"rollout: starts {words[0]} at port {port}; its output is in {self._log(port)}")

    def require_running(self) -> None:
        """Return if a server may still start.

        Raises:
            EngineError: all servers have ended; the message has the end of the output of one.
        """
        if self._running and all(process.poll() is not None for process in self._running.values()):
            port, process = next(iter(self._running.items()))
            lines = self._log(port).read_text(errors="replace").splitlines()[-_LAST_LINES:]
            tail = "\n".join(["", *lines])
            raise EngineError(
                f"rollout.launch: {' '.join(self._command)} ended with exit code {process.returncode}; correct it, or "
                f"the server. The end of {self._log(port)}:{tail}"
            )

    def stop(self) -> None:
        """End the servers with SIGTERM, then with SIGKILL."""
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal_)
            for process in self._running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)  # a driver may hold even a killed one
        self._running.clear()

    def _log(self, port: int) -> Path:
        return self._logs / f"server-{port}.log"
