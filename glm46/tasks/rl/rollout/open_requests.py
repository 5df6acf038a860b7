"""Requests that servers answer as they come, each to its end: through faults of servers, halts and updates of the
weights."""

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

_GRACE_SECONDS = 15.0  # for the partial completion of an aborted request
_TICK_SECONDS = 0.2


@dataclass(eq=False)
class OpenRequest:
    """A request until it is answered."""

    request: Request
    done: Callable[[Completion], object] = lambda completion: None
    """Gets the completion, in a thread of the engine; also one that was aborted at its deadline."""
    generated: Completion = NOTHING
    """At the last halt."""
    failed_on: list[ServerState] = field(default_factory=list)
    """Since the last halt."""
    state: ServerState = field(init=False)
    """On its way: of its server."""
    abort_at: float = field(init=False)


class Requests(Protocol):
    """Takes requests of conversations and of samples."""

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """Answer requests."""

    def drop(self, asked: OpenRequest) -> None:
        """End a request without an answer."""


Inbox = queue.SimpleQueue[tuple[str, Future[Completion] | list[OpenRequest] | OpenRequest]]
"""Calls that have ended, by the name of the request; without a name requests to answer, or one to drop."""


class OpenRequests:
    """See `Requests`. All samples of one prompt go to one server, which then computes the prompt once; a prompt goes to
    the server with the fewest requests. A request that fails is sent again, to another server if there is one. After
    its deadline it is aborted, and its completion is what was there by then.

    Methods may be called from any thread, `start` and `halt` from one at a time. Each HTTP call has a daemon thread: a
    server that hangs does not keep the process from ending.

    Args:
        goes_on: requests go on where a halt has ended them, with other samples than without it. Otherwise they are
            generated anew, so that the same weights give the same samples.
    """

    def __init__(self, pool: ServerPool, rules: SamplingRules, *, goes_on: bool = True):
        self._pool, self._rules, self.goes_on = pool, rules, goes_on
        self._open: dict[OpenRequest, None] = {}
        self._lock = threading.Lock()
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._inbox: Inbox = queue.SimpleQueue()
        self.error: BaseException | None = None
        """Of the servers: nothing is generated any more."""
        self.failed: Callable[[], None] = lambda: None
        """Is called when `error` is set."""

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """See `Requests.ask`; while it is halted they wait."""
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
        """Generate; each new token is of the weights that the servers have now."""

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
        """End all calls and keep their tokens; whether it was generating. Returns within the deadlines of the
        servers."""
        if self._thread is None:
            return False
        self._halt.set()
        self._inbox.put(("", []))
        self._thread.join()
        with self._lock:
            self._thread = None
        return True

    def run(self, asked: Sequence[OpenRequest], *, stays: bool) -> None:
        """Answer requests, those that come meanwhile too, if it ``stays`` until the halt.

        Raises:
            EngineError: no server is left, or one request failed several times.
            UserError: all servers refuse a request.
        """
        self._waiting = deque[list[OpenRequest]]()
        self._sent: dict[str, OpenRequest] = {}
        self._halted_at, self._look_at = math.inf, 0.0
        try:
            self._pool.join_again()
            for one in asked:
                one.failed_on.clear()  # servers have recovered, or have other weights
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
                    elif name in self._sent:  # else of a server that was lost meanwhile
                        self._take(name, outcome)
        finally:
            self._pool.abort_all()  # nothing, unless an error ends it

    def _forget(self, dropped: OpenRequest) -> None:
        """Abort a request, or do not send it."""
        self._abort_now([dropped])
        left = ([one for one in group if one is not dropped] for group in self._waiting)
        self._waiting = deque(group for group in left if group)

    def _abort_now(self, some: Iterable[OpenRequest]) -> None:
        self._look_at = 0.0
        for one in some:
            one.abort_at = 0.0

    def _send(self) -> None:
        """Send the groups that servers have room for."""
        while self._waiting:
            ready = self._pool.ready()
            group = self._waiting[0]
            fresh = [state for state in ready if state not in group[0].failed_on] or ready
            state = min(fresh, key=lambda state: len(state.running))
            if state.running and len(state.running) + len(group) > self._pool.most_running:
                return
            for one in self._waiting.popleft():
                self._begin(one, state)

    def _begin(self, one: OpenRequest, state: ServerState) -> None:
        name, deadline = self._pool.new_name(), self._pool.deadline
        salt = f"{name.partition('-')[0]}-{self._pool.version}"
        call = (rest(one.request, one.generated), self._rules, salt, deadline + _GRACE_SECONDS)
        state.running.add(name)
        one.state, one.abort_at = state, time.monotonic() + deadline
        self._sent[name], inbox = one, self._inbox
        in_thread(lambda: state.server.generate(name, *call)).add_done_callback(lambda done: inbox.put((name, done)))

    def _end_early(self) -> None:
        """Give up what is not sent, abort what is, and after the time for that what no server has returned."""
        if self._halted_at == math.inf:
            self._halted_at = time.monotonic()
            self._abort_now(self._sent.values())
        self._waiting.clear()
        if time.monotonic() > self._halted_at + _GRACE_SECONDS:
            for name, one in self._sent.items():
                one.state.running.discard(name)
            self._sent.clear()

    def _abort_overdue(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _TICK_SECONDS
        overdue: dict[ServerState, list[str]] = defaultdict(list)
        for name, one in self._sent.items():
            if now > one.abort_at:
                overdue[one.state].append(name)
        for state, names in overdue.items():
            for name in names:
                self._sent[name].abort_at = math.inf
            try:
                state.server.abort(names)
            except CallError as error:
                self._lose(state, str(error))

    def _take(self, name: str, call: Future[Completion]) -> None:
        one = self._sent.pop(name)
        state, was_told = one.state, not time.monotonic() < one.abort_at < math.inf
        state.running.discard(name)
        if (outcome := call.exception() or _fault(call.result(), self._pool.version, was_told=was_told)) is None:
            state.failures = 0
            self._end(one, call.result())
            return
        if isinstance(outcome, RefusedError) and self._pool.ready() == [state]:
            raise UserError(f"rollout.urls: {state.server.url} refuses a request: {outcome}")
        self._waiting.appendleft([one])
        if isinstance(outcome, (RefusedError, ForgottenError)):
            self._lose(state, str(outcome))
            return
        one.failed_on.append(state)
        if (reason := state.fault_behind(outcome)) is not None:
            self._lose(state, reason)
        if len(one.failed_on) >= MOST_FAILURES:
            raise EngineError(
                f"rollout.urls: a request failed {MOST_FAILURES} times, the last time on {state.server.url}: "
                f"{outcome}. Look into the servers' logs, then start this run "
                "again: it goes on from its last checkpoint"
            )

    def _end(self, one: OpenRequest, completion: Completion) -> None:
        """Give a completion to who has asked, unless a halt has cut it."""
        if self._halted_at < math.inf and completion.finish == "abort":
            if len(completion.tokens) < rest(one.request, one.generated).max_new_tokens:
                if self.goes_on:
                    one.generated = one.generated.extended([], completion)
                return
            completion = completion._replace(finish="length")  # halted behind its last token
        with self._lock:
            is_open = self._open.pop(one, self) is None
        if is_open:
            one.generated = one.generated.extended([], completion)
            one.done(one.generated)

    def _lose(self, state: ServerState, reason: str) -> None:
        """Take a server out, and give its requests to others."""
        self._pool.lose(state, reason)
        self._waiting.extendleft([self._sent.pop(name)] for name in state.running if name in self._sent)
        state.running.clear()


def _by_prompt(asked: Iterable[OpenRequest]) -> Iterable[list[OpenRequest]]:
    groups: dict[tuple[int, ...], list[OpenRequest]] = defaultdict(list)
    for one in asked:
        groups[(*one.request.prompt, *one.generated.tokens)].append(one)
    return groups.values()


def _fault(completion: Completion, version: int, *, was_told: bool) -> CallError | None:
    """An error if other weights than these gave a completion, or it was aborted and the server was not told to."""
    if completion.finish == "abort" and not was_told:
        return CallError("it aborted a request by itself")  # as a server that is told to end does
    generated_by = {span.version for span in completion.spans}
    if generated_by != {version} and completion.tokens:
        return ForgottenError(f"generated with version {sorted(generated_by)} of the weights, not {version}")
    return None


def answers(pool: ServerPool, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
    """Completions in the order of the requests. Raises what `OpenRequests.run` does."""
    asked, answered = [OpenRequest(request) for request in requests], OpenRequests(pool, rules)
    answered.ask(asked)
    answered.run(asked, stays=False)
    return [one.generated for one in asked]
