"""Several inference servers: who generates, who is left out, and who comes back; and those that a run starts on its own
machine, which end with it."""

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
_LAST_LINES = 15
_STOP_SECONDS = 10
# Sets PR_SET_PDEATHSIG, of linux/prctl.h, and becomes the server, which keeps it: a killed run leaves no server.
_END_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


class ServerPool:
    """Generates completions on the servers that answer, with weights that were compared with the trainer's."""

    def __init__(
        self, servers: Sequence[InferenceServer], *, rules: SamplingRules, longest: int, most_running: int,
        deadline: float, restart: float, say: Callable[[str], None], still_starting: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """See `ServerState` for the other ones.

        Args:
            most_running: requests that one server gets at a time.
            restart: seconds to wait for a server to come back when none is left.
            say: takes a line for the log.
            still_starting: raises EngineError if no server can come up any more.
        """
        self._states = [ServerState(server, rules, longest, deadline) for server in servers]
        self.most_running, self.deadline, self._restart = most_running, deadline, restart
        self._say, self._still_starting = say, still_starting
        self._newest: Weights | None = None
        self.send: Callable[[Sequence[WeightGroup]], None] | None = None
        """Broadcasts the present weights to servers that have joined groups. None: not now, all ranks are elsewhere."""
        self._names = itertools.count()
        self._session = f"{time.time_ns():x}"  # a server knows the requests of an earlier run

    def update(self, weights: Weights) -> None:
        """Load new weights into all servers that answer, those that were lost too. After `CHANGED` ones none generates
        before the next update.

        Raises:
            EngineError: none took them.
        """
        self._newest = weights
        self._join(self._states)
        self.ready()
        if weights.version == CHANGED:
            for state in self._serving():
                state.lost = NEVER_JOINED

    @property
    def awaited(self) -> list[str]:
        """Addresses of the servers that do not generate, and may come."""
        return [state.server.url for state in self._states if state.lost is not None and not state.is_refused]

    def first_samples(self, requests: Sequence[Request], *, at_start: bool) -> dict[ServerState, list[Completion]]:
        """Completions of these requests by each server that has generated none since it joined. One that fails is lost.

        Raises:
            UserError: a server refuses a request, at the start of the run or when no other one generates.
        """
        new = [state for state in self._serving() if not state.is_checked]
        salt, found = f"{self._session}-{self.version}", dict[ServerState, list[Completion]]()
        calls = {
            state: [
                in_thread(partial(state.server.generate, self.new_name(), request, state.rules, salt, self.deadline))
                for request in requests
            ]
            for state in new
        }
        for state, of in calls.items():
            error = next(filter(None, [call.exception() for call in of]), None)
            if isinstance(error, RefusedError) and (at_start or self._serving() == [state]):
                raise UserError(f"rollout.urls: {state.server.url} refuses a request: {error}")
            completions = [] if error is not None else [call.result() for call in of]
            if error is not None or not all(one.tokens for one in completions):
                self.lose(state, str(error or "it was told to abort its first completions"))
            else:
                found[state] = completions
        return found

    def judge(self, state: ServerState, said: str, *, is_right: bool) -> None:
        """Let a server generate after what was said of its first samples, or leave it out for good."""
        state.is_checked, state.is_refused = is_right, not is_right
        if is_right:
            self._say(f"rollout: {state.server.url}: {said}{state.server.note}")
        else:
            self.lose(state, said)

    def abort_all(self) -> None:
        """End the requests that are still on their way."""
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
        """Of the weights that all servers generate with."""
        return self._weights.version

    def new_name(self) -> str:
        """A name of a request that no server has had."""
        return f"{self._session}-{next(self._names)}"

    def lose(self, state: ServerState, reason: str) -> None:
        """Leave a server out."""
        if state.lost is None:
            self._say(f"rollout: {state.server.url} is left out: {reason}")
            state.lost = reason

    def _serving(self) -> list[ServerState]:
        return [state for state in self._states if state.lost is None]

    def join_again(self) -> None:
        """Ask the servers that are lost; see `ready`."""
        self._join([state for state in self._states if state.lost and state.refused != self.version])
        self.ready()

    def _join(self, states: Sequence[ServerState]) -> None:
        """Bring servers to the present weights, all at once; those that fail are lost."""
        states = [state for state in states if not state.is_refused]
        if not states:
            return

        weights, reasons = self._weights, dict[ServerState, str | None]()
        try:
            with ThreadPoolExecutor(len(states)) as threads:  # all its calls have deadlines
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
                self._say(f"rollout: {state.server.url} is left out: {reason}")
            state.is_checked &= state.lost is None
            state.lost, state.failures = reason, 0

    def ready(self) -> list[ServerState]:
        """The servers that generate; if none is left, wait for one.

        Raises:
            EngineError: none came back.
        """
        end = time.monotonic() + self._restart
        while not self._serving():
            if time.monotonic() > end:
                reasons = "; ".join(f"{state.server.url}: {state.lost}" for state in self._states)
                raise EngineError(
                    f"rollout.urls: no server is left, and none came back within {self._restart:g} s: {reasons}. Start "
                    "them again, then start this run again: it goes on from its last checkpoint"
                )
            self._still_starting()
            time.sleep(min(_RESTART_TICK_SECONDS, self._restart))
            self._join(self._states)
        return self._serving()


class LaunchedServers:
    """One process for each address, with one command. Use it on rank 0, in the main thread: the processes end with the
    thread that started them."""

    def __init__(self, command: Sequence[str], urls: Sequence[str], logs: Path, say: Callable[[str], None]):
        """
        Args:
            command: its words; ``{folder}`` and ``{port}`` stand for a Hugging Face folder and the port of an address.
            logs: folder of the servers' output.
        """
        self._command, self._logs, self._say = command, logs, say
        self._ports = [urlsplit(url).port or 80 for url in urls] if command else []
        self._running: dict[int, subprocess.Popen] = {}
        self._folders: dict[int, Path] = {}
        atexit.register(self.stop)

    def folder_of(self, url: str) -> Path | None:
        """That the server at an address was started with."""
        return self._folders.get(urlsplit(url).port or 80)

    def ensure(self, folder: Path) -> None:
        """Start the servers that do not run, with the model of a folder.

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
        """Return if a server may still come up.

        Raises:
            EngineError: all of them have ended; with the end of the output of one.
        """
        if self._running and all(process.poll() is not None for process in self._running.values()):
            port, process = next(iter(self._running.items()))
            lines = self._log(port).read_text(errors="replace").splitlines()[-_LAST_LINES:]
            said = "\n".join(["", *lines])
            raise EngineError(
                f"rollout.launch: {' '.join(self._command)} ended with exit code {process.returncode}; correct it, or "
                f"the server. The end of {self._log(port)}:{said}"
            )

    def stop(self) -> None:
        """End the servers: a request to end, then by force."""
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
