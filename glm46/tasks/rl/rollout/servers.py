"""The inference servers of a run, from which failing ones are excluded until they return. Used on rank 0."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.event_loop import EventLoop, all_results
from glm46.tasks.rl.rollout.http_calls import CallError, RefusedError, guarded
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules
from glm46.tasks.rl.rollout.served_policy import CHANGED, EngineError, Weights
from glm46.tasks.rl.rollout.server import NEVER_JOINED, Server
from glm46.tasks.rl.rollout.weight_group import WeightGroup

_RESTART_TICK_SECONDS = 2.0
_WAITING_SECONDS = 15.0
"""Seconds between two log lines that name the awaited servers."""


class Servers:
    """Generates completions on responsive servers whose weights have been compared with the trainer's.

    Coroutines run in `loop`; other threads use its `EventLoop.run`.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        rules: SamplingRules,
        max_tokens: int,
        max_running: int,
        deadline: float,
        restart: float,
        say: Callable[[str], None],
        still_starting: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            rules: sampling rules of training rollouts.
            max_tokens: maximum number of tokens of a prompt and its completion.
            max_running: maximum number of running requests of one server.
            deadline: seconds for one completion, and for one update of a server.
            restart: seconds to wait for a server to come back when none is left.
            say: takes a line for the log.
            still_starting: raises EngineError if no server can start any more.
        """
        self.loop = EventLoop()
        self._servers = servers
        self._rules = rules
        self._max_tokens = max_tokens
        self.max_running = max_running
        self.deadline = deadline
        self._restart = restart
        self._say = say
        self._still_starting = still_starting
        self._newest: Weights | None = None
        self.send: Callable[[Sequence[WeightGroup]], Awaitable[None]] | None = None
        """Broadcasts the current weights to servers that have joined groups; None while the ranks do other work."""
        self._names = itertools.count()
        self._session = f"{time.time_ns():x}"  # servers remember request names of earlier runs

    async def update(self, weights: Weights) -> None:
        """Load new weights into all responsive servers, including lost ones. After `CHANGED` weights no server
        generates before the next update.

        Raises:
            EngineError: no server loaded them.
        """
        self._newest = weights
        await self._join(self._servers)
        await self.ready()
        if weights.version == CHANGED:
            for server in self._serving():
                server.lost = NEVER_JOINED

    @property
    def awaited(self) -> list[str]:
        """Addresses of the servers that do not generate but may join."""
        return [server.url for server in self._servers if server.lost is not None and not server.is_refused]

    async def first_samples(self, requests: Sequence[Request], *, at_start: bool) -> dict[Server, list[Completion]]:
        """Return completions of these requests from each server that has not been checked since it joined. A server
        that fails is lost.

        Raises:
            UserError: a server refuses a request, at the start of the run or when no other server generates.
        """
        unchecked = [server for server in self._serving() if not server.is_checked]
        salt = self.salt

        async def generate(server: Server) -> tuple[list[Completion], CallError | None]:
            calls = [
                guarded(partial(server.generate, self.new_name(), request, self._rules, salt, self.deadline))
                for request in requests
            ]
            try:
                return await all_results(calls), None
            except CallError as error:
                return [], error

        samples = dict[Server, list[Completion]]()
        outcomes = await all_results(map(generate, unchecked))
        for server, (completions, error) in zip(unchecked, outcomes, strict=True):
            if isinstance(error, RefusedError) and (at_start or self._serving() == [server]):
                raise UserError(f"rollout.urls: {server.url} refuses a request: {error}")
            if error is not None or not all(completion.tokens for completion in completions):
                self.lose(server, str(error or "it was told to abort its first completions"))
            else:
                samples[server] = completions
        return samples

    def judge(self, server: Server, report: str, *, is_right: bool) -> None:
        """Admit a server after the check of its first samples, or exclude it permanently."""
        server.is_checked = is_right
        server.is_refused = not is_right
        if is_right:
            self._say(f"rollout: {server.url}: {report}{server.note}")
        else:
            self.lose(server, report)

    async def abort_all(self) -> None:
        """Abort all running requests."""
        for server in self._serving():
            if server.running:
                with contextlib.suppress(CallError):
                    await server.abort(list(server.running))
                server.running.clear()

    @property
    def _weights(self) -> Weights:
        assert self._newest is not None, "no server is asked before the first update"
        return self._newest

    @property
    def version(self) -> int:
        """Version of the weights that all servers generate with."""
        return self._weights.version

    @property
    def salt(self) -> str:
        """Salt of requests: those of other weights or runs share no cache with them."""
        return f"{self._session}-{self.version}"

    def new_name(self) -> str:
        """Return a request name that no server has seen."""
        return f"{self._session}-{next(self._names)}"

    def lose(self, server: Server, reason: str) -> None:
        """Exclude a server until it joins again."""
        if server.lost is None:
            self._say(f"rollout: {server.url} is excluded: {reason}")
            server.lost = reason

    def _serving(self) -> list[Server]:
        return [server for server in self._servers if server.lost is None]

    async def join_again(self) -> None:
        """Try to bring lost servers back; see `ready`."""
        await self._join([server for server in self._servers if server.lost and server.failed_version != self.version])
        await self.ready()

    async def _join(self, servers: Sequence[Server]) -> None:
        """Load the current weights into servers concurrently; servers that fail are lost."""
        servers = [server for server in servers if not server.is_refused]
        weights = self._weights
        reasons: dict[Server, str | None]
        if weights.folder is None and self.send is None:
            reasons = dict.fromkeys(servers, "it waits for the weights of the next update")
        else:
            reasons = await self._load(servers, weights)
        for server, reason in reasons.items():
            if reason is None and server.lost is not None and self.version != CHANGED:
                self._say(f"rollout: {server.url} generates with version {weights.version}")
            if reason is not None and server.lost != reason:
                self._say(f"rollout: {server.url} is excluded: {reason}")
            server.is_checked &= server.lost is None
            server.lost = reason
            server.failures = 0

    async def _load(self, servers: Sequence[Server], weights: Weights) -> dict[Server, str | None]:
        """Load weights into servers. Returns why each cannot generate with them; None if it can."""
        try:
            beginnings = [server.begin(weights, self._rules, self._max_tokens, self.deadline) for server in servers]
            reasons = dict(zip(servers, await all_results(beginnings), strict=True))
            begun = [server for server in servers if reasons[server] is None]
            groups = [server.group for server in begun if server.group is not None]
            if groups and self.send is not None:
                await self.send(groups)
            completions = [server.complete(weights, self._rules, self.deadline) for server in begun]
            reasons |= dict(zip(begun, await all_results(completions), strict=True))
            return reasons
        finally:  # an error of one server, or in the broadcast, must not leave the others waiting
            for server in servers:
                server.leave_group()

    async def ready(self) -> list[Server]:
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
            await asyncio.sleep(min(_RESTART_TICK_SECONDS, self._restart))
            await self._join(self._servers)
        return self._serving()

    def _no_server_left(self) -> EngineError:
        waited = f", and none came back within {self._restart:g} s" if self.awaited else ""
        return EngineError(
            f"rollout.urls: no server is left{waited}: {self._reasons()}. Start them again, then start this run again: "
            "it continues from its last checkpoint"
        )

    def _reasons(self) -> str:
        """List each address and why its server does not generate."""
        return "; ".join(f"{server.url}: {server.lost}" for server in self._servers)
