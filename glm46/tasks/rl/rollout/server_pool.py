"""A pool of inference servers, from which failing servers are excluded until they return, and servers that a run starts
on its own machine and that end with it."""

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from glm46.compute.distributed.environment import environment_without_ranks
from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError, RefusedError, in_thread
from glm46.tasks.rl.rollout.inference_server import InferenceServer
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules
from glm46.tasks.rl.rollout.server_state import CHANGED, NEVER_JOINED, EngineError, ServerState, Weights
from glm46.tasks.rl.rollout.weight_group import WeightGroup

_RESTART_TICK_SECONDS = 2.0
_WAITING_SECONDS = 15.0
"""Seconds between two log lines that name the awaited servers."""
_LAST_LINES = 15
_STOP_SECONDS = 10
# Sets PR_SET_PDEATHSIG (linux/prctl.h) and execs the server, which inherits it: a killed run leaves no server.
_END_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


class ServerPool:
    """Generates completions on responsive servers whose weights have been compared with the trainer's."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        rules: SamplingRules,
        longest: int,
        most_running: int,
        deadline: float,
        restart: float,
        say: Callable[[str], None],
        still_starting: Callable[[], None] = lambda: None,
    ):
        """See `ServerState` for the other arguments.

        Args:
            most_running: maximum number of running requests of one server.
            restart: seconds to wait for a server to come back when none is left.
            say: takes a line for the log.
            still_starting: raises EngineError if no server can start any more.
        """
        self._states = [ServerState(server, rules, longest, deadline) for server in servers]
        self.most_running = most_running
        self.deadline = deadline
        self._restart = restart
        self._say = say
        self._still_starting = still_starting
        self._newest: Weights | None = None
        self.send: Callable[[Sequence[WeightGroup]], None] | None = None
        """Broadcasts the current weights to servers that have joined groups; None while the ranks do other work."""
        self._names = itertools.count()
        self._session = f"{time.time_ns():x}"  # servers remember request names of earlier runs

    def update(self, weights: Weights) -> None:
        """Load new weights into all responsive servers, including lost ones. After `CHANGED` weights no server
        generates before the next update.

        Raises:
            EngineError: no server loaded them.
        """
        self._newest = weights
        self._join(self._states)
        self.ready()
        if weights.version == CHANGED:
            for state in self._serving():
                state.lost = NEVER_JOINED

    @property
    def awaited(self) -> list[str]:
        """Addresses of the servers that do not generate but may join."""
        return [state.server.url for state in self._states if state.lost is not None and not state.is_refused]

    def first_samples(self, requests: Sequence[Request], *, at_start: bool) -> dict[ServerState, list[Completion]]:
        """Return completions of these requests from each server that has not been checked since it joined. A server
        that fails is lost.

        Raises:
            UserError: a server refuses a request, at the start of the run or when no other server generates.
        """
        new = [state for state in self._serving() if not state.is_checked]
        salt = f"{self._session}-{self.version}"
        samples = dict[ServerState, list[Completion]]()
        calls = {
            state: [
                in_thread(partial(state.server.generate, self.new_name(), request, state.rules, salt, self.deadline))
                for request in requests
            ]
            for state in new
        }
        for state, futures in calls.items():
            error = next(filter(None, [call.exception() for call in futures]), None)
            if isinstance(error, RefusedError) and (at_start or self._serving() == [state]):
                raise UserError(f"rollout.urls: {state.server.url} refuses a request: {error}")
            completions = [] if error is not None else [call.result() for call in futures]
            if error is not None or not all(completion.tokens for completion in completions):
                self.lose(state, str(error or "it was told to abort its first completions"))
            else:
                samples[state] = completions
        return samples

    def judge(self, state: ServerState, report: str, *, is_right: bool) -> None:
        """Admit a server after the check of its first samples, or exclude it permanently."""
        state.is_checked = is_right
        state.is_refused = not is_right
        if is_right:
            self._say(f"rollout: {state.server.url}: {report}{state.server.note}")
        else:
            self.lose(state, report)

    def abort_all(self) -> None:
        """Abort all running requests."""
        for state in self._serving():
            if state.running:
                with contextlib.suppress(CallError):
                    state.server.abort(list(state.running))
                state.running.clear()

    @property
    def _weights(self) -> Weights:
        assert self._newest is not None, "no server is asked before the first update"
        return self._newest

    @property
    def version(self) -> int:
        """Version of the weights that all servers generate with."""
        return self._weights.version

    def new_name(self) -> str:
        """Return a request name that no server has seen."""
        return f"{self._session}-{next(self._names)}"

    def lose(self, state: ServerState, reason: str) -> None:
        """Exclude a server until it joins again."""
        if state.lost is None:
            self._say(f"rollout: {state.server.url} is excluded: {reason}")
            state.lost = reason

    def _serving(self) -> list[ServerState]:
        return [state for state in self._states if state.lost is None]

    def join_again(self) -> None:
        """Try to bring lost servers back; see `ready`."""
        self._join([state for state in self._states if state.lost and state.refused != self.version])
        self.ready()

    def _join(self, states: Sequence[ServerState]) -> None:
        """Load the current weights into servers in parallel; servers that fail are lost."""
        states = [state for state in states if not state.is_refused]
        if not states:
            return

        weights, reasons = self._weights, dict[ServerState, str | None]()
        try:
            with ThreadPoolExecutor(len(states)) as threads:  # all calls have deadlines
                if weights.folder is None and self.send is None:
                    reasons = dict.fromkeys(states, "it waits for the weights of the next update")
                else:
                    reasons = dict(zip(states, threads.map(lambda state: state.begin(weights), states), strict=True))
                begun = [state for state in states if reasons[state] is None]
                groups = [state.group for state in begun if state.group is not None]
                if groups and self.send is not None:
                    self.send(groups)
                reasons |= dict(zip(begun, threads.map(lambda state: state.complete(weights), begun), strict=True))
        finally:  # an error of one server, or in the broadcast, must not leave the others waiting
            for state in states:
                state.leave_group()
        for state, reason in reasons.items():
            if reason is None and state.lost is not None and self.version != CHANGED:
                self._say(f"rollout: {state.server.url} generates with version {self._weights.version}")
            if reason is not None and state.lost != reason:
                self._say(f"rollout: {state.server.url} is excluded: {reason}")
            state.is_checked &= state.lost is None
            state.lost = reason
            state.failures = 0

    def ready(self) -> list[ServerState]:
        """Return the servers that generate. If there is none, wait for one, and log this now and every 15 seconds.

        Raises:
            EngineError: no server came back.
        """
        start = time.monotonic()
        next_line = start
        while not self._serving():
            now = time.monotonic()
            if now > start + self._restart or not self.awaited:
                raise self._no_server_left()
            if now >= next_line:
                self._say(f"rollout: waiting for {self._reasons()} ({now - start:.0f} of {self._restart:g} s)")
                next_line = now + _WAITING_SECONDS
            self._still_starting()
            time.sleep(min(_RESTART_TICK_SECONDS, self._restart))
            self._join(self._states)
        return self._serving()

    def _no_server_left(self) -> EngineError:
        waited = f", and none came back within {self._restart:g} s" if self.awaited else ""
        return EngineError(
            f"rollout.urls: no server is left{waited}: {self._reasons()}. Start them again, then start this run again: "
            "it continues from its last checkpoint"
        )

    def _reasons(self) -> str:
        """List each address and why its server does not generate."""
        return "; ".join(f"{state.server.url}: {state.lost}" for state in self._states)


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
        self._running: dict[int, subprocess.Popen] = {}
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
        for signal_, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, None)):
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal_)
            for process in self._running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
        self._running.clear()

    def _log(self, port: int) -> Path:
        return self._logs / f"server-{port}.log"
