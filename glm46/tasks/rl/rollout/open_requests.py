"""Requests that servers answer as they arrive, across server failures, halts and weight updates."""

import asyncio
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.event_loop import all_results
from glm46.tasks.rl.rollout.http_calls import CallError, ForgottenError, RefusedError, guarded
from glm46.tasks.rl.rollout.records import NOTHING, Completion, Request, SamplingRules, rest
from glm46.tasks.rl.rollout.served_policy import EngineError
from glm46.tasks.rl.rollout.server import MAX_FAILURES, Server
from glm46.tasks.rl.rollout.servers import Servers

_GRACE_SECONDS = 15.0  # to return the partial completion of an aborted request
_TICK_SECONDS = 0.2


@dataclass(eq=False)
class OpenRequest:
    """A request until it is answered."""

    request: Request
    done: Callable[[Completion], object] = lambda completion: None
    """Called with the completion in the thread of the servers' loop, even if it was aborted at its deadline."""
    generated: Completion = NOTHING
    """Tokens generated until the last halt."""
    failed_on: list[Server] = field(default_factory=list)
    """Servers that failed since the last halt."""
    server: Server = field(init=False)
    """Server of a running request."""
    abort_at: float = field(init=False)


class Requests(Protocol):
    """Takes requests of conversations and of samples."""

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """Answer requests."""

    def drop(self, asked: OpenRequest) -> None:
        """End a request without an answer."""


Event: TypeAlias = Callable[[], Awaitable[None]]
"""What a request, a halt or the end of a call changes."""
Inbox: TypeAlias = asyncio.Queue[Event]


class OpenRequests:
    """See `Requests`. All samples of a prompt go to one server, the one with the fewest requests, which then computes
    the prompt once. A failed request is sent again, to another server if possible. After its deadline a request is
    aborted and keeps the tokens so far.

    `ask` and `drop` may be called from any thread, `start` and `halt` from one at a time. Coroutines run in the loop of
    the servers, which handles one event after another.

    Args:
        goes_on: requests continue where a halt stopped them; their samples then differ from a run without the halt.
            Otherwise they are generated again, so that the same weights give the same samples.
    """

    def __init__(self, servers: Servers, rules: SamplingRules, *, goes_on: bool = True):
        self._servers = servers
        self._rules = rules
        self.goes_on = goes_on
        self._open: dict[OpenRequest, None] = {}
        self._lock = threading.Lock()
        self._is_halting = False
        self._working: Future[None] | None = None
        self._inbox: Inbox = asyncio.Queue()
        self.error: BaseException | None = None
        """Error that stopped the generation."""
        self.failed: Callable[[], None] = lambda: None
        """Called when `error` is set."""

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """See `Requests.ask`; requests wait during a halt."""
        with self._lock:
            self._open |= dict.fromkeys(asked)
            if self._working is not None:
                self._post(partial(self._enqueue, list(asked)))

    def drop(self, asked: OpenRequest) -> None:
        """See `Requests.drop`."""
        with self._lock:
            is_open = self._open.pop(asked, self) is None
            if is_open and self._working is not None:
                self._post(partial(self._forget, asked))

    def _post(self, event: Event) -> None:
        self._servers.loop.call(self._inbox.put_nowait, event)

    def start(self) -> None:
        """Start generating with the current weights of the servers."""
        with self._lock:
            if self._working is None:
                self._is_halting = False
                self._inbox = asyncio.Queue()
                self._working = self._servers.loop.begin(self._work(list(self._open)))

    async def _work(self, asked: Sequence[OpenRequest]) -> None:
        try:
            await self.run(asked, stays=True)
        except BaseException as error:
            self.error = error
            self.failed()
            raise

    def halt(self, seconds: float | None = None) -> bool:
        """End all calls and keep their tokens, within the deadlines of the servers. Return True if it was running.

        Args:
            seconds: give up the calls that have not ended after this time.
        """
        working = self._working
        if working is None:  # perhaps another thread has halted it
            return False
        self._is_halting = True
        self._post(partial(self._enqueue, []))
        if wait([working], seconds).not_done:
            working.cancel()
        with self._lock:
            self._working = None
        return True

    async def run(self, asked: Sequence[OpenRequest], *, stays: bool) -> None:
        """Answer requests; with ``stays`` also those that arrive until a halt.

        Raises:
            EngineError: no server is left, or one request failed several times.
            UserError: all servers refuse a request.
        """
        self._waiting = deque[list[OpenRequest]]()
        self._sent: dict[str, OpenRequest] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._halted_at = math.inf
        self._next_look = 0.0
        try:
            await self._servers.join_again()
            for pending in asked:
                pending.failed_on.clear()  # servers may have recovered, or have new weights
            await self._enqueue(asked)
            while self._waiting or self._sent or (stays and self._halted_at == math.inf):
                if self._is_halting:
                    self._end_early()
                else:
                    await self._send()
                await self._abort_overdue()
                if not self._sent and (self._waiting or self._halted_at < math.inf):
                    continue
                if (event := await self._next_event()) is not None:
                    await event()
        finally:
            await self._servers.abort_all()  # requests are still running only after an error
            for call in self._calls.values():
                call.cancel()

    async def _next_event(self) -> Event | None:
        """Wait for an event; return None after a tick, when it is time to look at deadlines."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_TICK_SECONDS):
                return await self._inbox.get()
        return None

    async def _enqueue(self, asked: Iterable[OpenRequest]) -> None:
        groups: dict[tuple[int, ...], list[OpenRequest]] = defaultdict(list)
        for pending in asked:
            groups[(*pending.request.prompt, *pending.generated.tokens)].append(pending)
        self._waiting += groups.values()

    async def _forget(self, dropped: OpenRequest) -> None:
        """Abort a request, or remove it before it is sent."""
        self._abort_soon([dropped])
        groups = ([pending for pending in group if pending is not dropped] for group in self._waiting)
        self._waiting = deque(group for group in groups if group)

    def _abort_soon(self, requests: Iterable[OpenRequest]) -> None:
        self._next_look = 0.0
        for pending in requests:
            pending.abort_at = 0.0

    async def _send(self) -> None:
        """Send groups while servers have room."""
        while self._waiting:
            ready = await self._servers.ready()
            group = self._waiting[0]
            untried = [server for server in ready if server not in group[0].failed_on] or ready
            server = min(untried, key=lambda server: len(server.running))
            if server.running and len(server.running) + len(group) > self._servers.max_running:
                return
            for pending in self._waiting.popleft():
                self._begin(pending, server)

    def _begin(self, pending: OpenRequest, server: Server) -> None:
        name = self._servers.new_name()
        deadline = self._servers.deadline
        server.running.add(name)
        pending.server = server
        pending.abort_at = time.monotonic() + deadline
        self._sent[name] = pending
        request = rest(pending.request, pending.generated)
        seconds = deadline + _GRACE_SECONDS
        generate = partial(server.generate, name, request, self._rules, self._servers.salt, seconds)
        self._calls[name] = asyncio.create_task(self._call(name, generate, self._inbox))

    async def _call(self, name: str, generate: Callable[[], Awaitable[Completion]], inbox: Inbox) -> None:
        outcome: Completion | CallError
        try:
            outcome = await guarded(generate)
        except CallError as error:
            outcome = error
        self._calls.pop(name, None)
        inbox.put_nowait(partial(self._take, name, outcome))

    def _end_early(self) -> None:
        """Drop unsent requests and abort running ones; after the grace time, drop those without a reply."""
        if self._halted_at == math.inf:
            self._halted_at = time.monotonic()
            self._abort_soon(self._sent.values())
        self._waiting.clear()
        if time.monotonic() > self._halted_at + _GRACE_SECONDS:
            for name, pending in self._sent.items():
                pending.server.running.discard(name)
            self._sent.clear()

    async def _abort_overdue(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _TICK_SECONDS
        overdue: dict[Server, list[str]] = defaultdict(list)
        for name, pending in self._sent.items():
            if now > pending.abort_at:
                overdue[pending.server].append(name)
                pending.abort_at = math.inf

        async def abort(server: Server, names: Sequence[str]) -> None:
            try:
                await server.abort(names)
            except CallError as error:
                self._lose(server, str(error))

        await all_results(abort(server, names) for server, names in overdue.items())

    async def _take(self, name: str, outcome: Completion | CallError) -> None:
        """Deliver the completion of a call, or send its request again."""
        pending = self._sent.pop(name, None)
        if pending is None:  # its server was lost in the meantime
            return
        server = pending.server
        was_told = not time.monotonic() < pending.abort_at < math.inf
        server.running.discard(name)
        error = outcome if isinstance(outcome, CallError) else _fault(outcome, self._servers.version, was_told=was_told)
        if error is None:
            assert isinstance(outcome, Completion)
            server.failures = 0
            self._end(pending, outcome)
            return
        if isinstance(error, RefusedError) and await self._servers.ready() == [server]:
            raise UserError(f"rollout.urls: {server.url} refuses a request: {error}")
        self._waiting.appendleft([pending])
        if isinstance(error, (RefusedError, ForgottenError)):
            self._lose(server, str(error))
            return
        pending.failed_on.append(server)
        if (reason := await server.fault_after(error)) is not None:
            self._lose(server, reason)
        if len(pending.failed_on) >= MAX_FAILURES:
            raise EngineError(
                f"rollout.urls: a request failed {MAX_FAILURES} times, the last time on {server.url}: "
                f"{error}. Look into the servers' logs, then start this run "
                "again: it goes on from its last checkpoint"
            )

    def _end(self, pending: OpenRequest, completion: Completion) -> None:
        """Deliver a completion, unless a halt has truncated it."""
        if self._halted_at < math.inf and completion.finish == "abort":
            if len(completion.tokens) < rest(pending.request, pending.generated).max_new_tokens:
                if self.goes_on:
                    pending.generated = pending.generated.extended([], completion)
                return
            completion = completion._replace(finish="length")  # halted after its last token
        with self._lock:
            is_open = self._open.pop(pending, self) is None
        if is_open:
            pending.generated = pending.generated.extended([], completion)
            pending.done(pending.generated)

    def _lose(self, server: Server, reason: str) -> None:
        """Exclude a server, and send its requests to others."""
        self._servers.lose(server, reason)
        for name in server.running & self._sent.keys():
            self._waiting.appendleft([self._sent.pop(name)])
            if (call := self._calls.pop(name, None)) is not None:
                call.cancel()
        server.running.clear()


def _fault(completion: Completion, version: int, *, was_told: bool) -> CallError | None:
    """Return an error if a completion is from other weights, or was aborted without an order to the server."""
    if completion.finish == "abort" and not was_told:
        return CallError("it aborted a request by itself")  # for example because it is shutting down
    generated_by = set(completion.versions)
    if generated_by != {version} and completion.tokens:
        return ForgottenError(f"generated with version {sorted(generated_by)} of the weights, not {version}")
    return None


async def answers(servers: Servers, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
    """Return completions in the order of the requests. Raises the errors of `OpenRequests.run`."""
    pending = [OpenRequest(request) for request in requests]
    answered = OpenRequests(servers, rules)
    answered.ask(pending)
    await answered.run(pending, stays=False)
    return [request.generated for request in pending]
