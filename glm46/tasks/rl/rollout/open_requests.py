"""Requests that servers answer as they arrive, across server failures, halts and weight updates."""

import math
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError, ForgottenError, RefusedError, in_thread
from glm46.tasks.rl.rollout.records import NOTHING, Completion, Request, SamplingRules, rest
from glm46.tasks.rl.rollout.server_pool import ServerPool
from glm46.tasks.rl.rollout.server_state import MOST_FAILURES, EngineError, ServerState

_GRACE_SECONDS = 15.0  # to return the partial completion of an aborted request
_TICK_SECONDS = 0.2


@dataclass(eq=False)
class OpenRequest:
    """A request until it is answered."""

    request: Request
    done: Callable[[Completion], object] = lambda completion: None
    """Called with the completion in a thread of the engine, even if it was aborted at its deadline."""
    generated: Completion = NOTHING
    """Tokens generated until the last halt."""
    failed_on: list[ServerState] = field(default_factory=list)
    """Servers that failed since the last halt."""
    state: ServerState = field(init=False)
    """Server of a running request."""
    abort_at: float = field(init=False)


class Requests(Protocol):
    """Takes requests of conversations and of samples."""

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """Answer requests."""

    def drop(self, asked: OpenRequest) -> None:
        """End a request without an answer."""


Inbox = queue.SimpleQueue[tuple[str, Future[Completion] | list[OpenRequest] | OpenRequest]]
"""Finished calls with the name of their request; with an empty name, requests to answer or one to drop."""


class OpenRequests:
    """See `Requests`. All samples of a prompt go to one server, the one with the fewest requests, which then computes
    the prompt once. A failed request is sent again, to another server if possible. After its deadline a request is
    aborted and keeps the tokens so far.

    Methods may be called from any thread, `start` and `halt` from one at a time. Each HTTP call has a daemon thread, so
    that a server that hangs does not block the exit of the process.

    Args:
        goes_on: requests continue where a halt stopped them; their samples then differ from a run without the halt.
            Otherwise they are generated again, so that the same weights give the same samples.
    """

    def __init__(self, pool: ServerPool, rules: SamplingRules, *, goes_on: bool = True):
        self._pool = pool
        self._rules = rules
        self.goes_on = goes_on
        self._open: dict[OpenRequest, None] = {}
        self._lock = threading.Lock()
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._inbox: Inbox = queue.SimpleQueue()
        self.error: BaseException | None = None
        """Error that stopped the generation."""
        self.failed: Callable[[], None] = lambda: None
        """Called when `error` is set."""

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """See `Requests.ask`; requests wait during a halt."""
        with self._lock:
            self._open |= dict.fromkeys(asked)
            if self._thread is not None:
                self._inbox.put(("", list(asked)))

    def drop(self, asked: OpenRequest) -> None:
        """See `Requests.drop`."""
        with self._lock:
            is_open = self._open.pop(asked, self) is None
            if is_open and self._thread is not None:
                self._inbox.put(("", asked))

    def start(self) -> None:
        """Start generating with the current weights of the servers."""

        def work() -> None:
            try:
                self.run(asked, stays=True)
            except BaseException as error:
                self.error = error
                self.failed()
                if not isinstance(error, Exception):
                    raise

        with self._lock:
            if self._thread is not None:
                return
            asked = list(self._open)
            self._halt.clear()
            self._inbox = queue.SimpleQueue()
            self._thread = threading.Thread(target=work, daemon=True)
            self._thread.start()

    def halt(self) -> bool:
        """End all calls and keep their tokens, within the deadlines of the servers. Return True if it was running."""
        if self._thread is None:
            return False
        self._halt.set()
        self._inbox.put(("", []))
        self._thread.join()
        with self._lock:
            self._thread = None
        return True

    def run(self, asked: Sequence[OpenRequest], *, stays: bool) -> None:
        """Answer requests; with ``stays`` also those that arrive until a halt.

        Raises:
            EngineError: no server is left, or one request failed several times.
            UserError: all servers refuse a request.
        """
        self._waiting = deque[list[OpenRequest]]()
        self._sent: dict[str, OpenRequest] = {}
        self._halted_at = math.inf
        self._look_at = 0.0
        try:
            self._pool.join_again()
            for pending in asked:
                pending.failed_on.clear()  # servers may have recovered, or have new weights
            self._waiting += _by_prompt(asked)
            while self._waiting or self._sent or (stays and self._halted_at == math.inf):
                if self._halt.is_set():
                    self._end_early()
                else:
                    self._send()
                self._abort_overdue()
                if not self._sent and (self._waiting or self._halted_at < math.inf):
                    continue
                with suppress(queue.Empty):
                    name, outcome = self._inbox.get(timeout=_TICK_SECONDS)
                    if isinstance(outcome, list):
                        self._waiting += _by_prompt(outcome)
                    elif isinstance(outcome, OpenRequest):
                        self._forget(outcome)
                    elif name in self._sent:  # otherwise its server was lost in the meantime
                        self._take(name, outcome)
        finally:
            self._pool.abort_all()  # requests are still running only after an error

    def _forget(self, dropped: OpenRequest) -> None:
        """Abort a request, or remove it before it is sent."""
        self._abort_now([dropped])
        groups = ([pending for pending in group if pending is not dropped] for group in self._waiting)
        self._waiting = deque(group for group in groups if group)

    def _abort_now(self, requests: Iterable[OpenRequest]) -> None:
        self._look_at = 0.0
        for pending in requests:
            pending.abort_at = 0.0

    def _send(self) -> None:
        """Send groups while servers have room."""
        while self._waiting:
            ready = self._pool.ready()
            group = self._waiting[0]
            fresh = [state for state in ready if state not in group[0].failed_on] or ready
            state = min(fresh, key=lambda state: len(state.running))
            if state.running and len(state.running) + len(group) > self._pool.most_running:
                return
            for pending in self._waiting.popleft():
                self._begin(pending, state)

    def _begin(self, pending: OpenRequest, state: ServerState) -> None:
        name = self._pool.new_name()
        deadline = self._pool.deadline
        salt = f"{name.partition('-')[0]}-{self._pool.version}"
        call = (rest(pending.request, pending.generated), self._rules, salt, deadline + _GRACE_SECONDS)
        state.running.add(name)
        pending.state = state
        pending.abort_at = time.monotonic() + deadline
        self._sent[name], inbox = pending, self._inbox
        in_thread(lambda: state.server.generate(name, *call)).add_done_callback(lambda done: inbox.put((name, done)))

    def _end_early(self) -> None:
        """Drop unsent requests and abort running ones; after the grace time, drop those without a reply."""
        if self._halted_at == math.inf:
            self._halted_at = time.monotonic()
            self._abort_now(self._sent.values())
        self._waiting.clear()
        if time.monotonic() > self._halted_at + _GRACE_SECONDS:
            for name, pending in self._sent.items():
                pending.state.running.discard(name)
            self._sent.clear()

    def _abort_overdue(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _TICK_SECONDS
        overdue: dict[ServerState, list[str]] = defaultdict(list)
        for name, pending in self._sent.items():
            if now > pending.abort_at:
                overdue[pending.state].append(name)
        for state, names in overdue.items():
            for name in names:
                self._sent[name].abort_at = math.inf
            try:
                state.server.abort(names)
            except CallError as error:
                self._lose(state, str(error))

    def _take(self, name: str, call: Future[Completion]) -> None:
        pending = self._sent.pop(name)
        state = pending.state
        was_told = not time.monotonic() < pending.abort_at < math.inf
        state.running.discard(name)
        if (outcome := call.exception() or _fault(call.result(), self._pool.version, was_told=was_told)) is None:
            state.failures = 0
            self._end(pending, call.result())
            return
        if isinstance(outcome, RefusedError) and self._pool.ready() == [state]:
            raise UserError(f"rollout.urls: {state.server.url} refuses a request: {outcome}")
        self._waiting.appendleft([pending])
        if isinstance(outcome, (RefusedError, ForgottenError)):
            self._lose(state, str(outcome))
            return
        pending.failed_on.append(state)
        if (reason := state.fault_behind(outcome)) is not None:
            self._lose(state, reason)
        if len(pending.failed_on) >= MOST_FAILURES:
            raise EngineError(
                f"rollout.urls: a request failed {MOST_FAILURES} times, the last time on {state.server.url}: "
                f"{outcome}. Look into the servers' logs, then start this run "
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

    def _lose(self, state: ServerState, reason: str) -> None:
        """Exclude a server, and send its requests to others."""
        self._pool.lose(state, reason)
        self._waiting.extendleft([self._sent.pop(name)] for name in state.running if name in self._sent)
        state.running.clear()


def _by_prompt(asked: Iterable[OpenRequest]) -> Iterable[list[OpenRequest]]:
    groups: dict[tuple[int, ...], list[OpenRequest]] = defaultdict(list)
    for pending in asked:
        groups[(*pending.request.prompt, *pending.generated.tokens)].append(pending)
    return groups.values()


def _fault(completion: Completion, version: int, *, was_told: bool) -> CallError | None:
    """Return an error if a completion is from other weights, or was aborted without an order to the server."""
    if completion.finish == "abort" and not was_told:
        return CallError("it aborted a request by itself")  # for example because it is shutting down
    generated_by = set(completion.versions)
    if generated_by != {version} and completion.tokens:
        return ForgottenError(f"generated with version {sorted(generated_by)} of the weights, not {version}")
    return None


def answers(pool: ServerPool, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
    """Return completions in the order of the requests. Raises the errors of `OpenRequests.run`."""
    pending = [OpenRequest(request) for request in requests]
    answered = OpenRequests(pool, rules)
    answered.ask(pending)
    answered.run(pending, stays=False)
    return [request.generated for request in pending]
