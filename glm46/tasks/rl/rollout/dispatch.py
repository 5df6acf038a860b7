"""The requests of one call, on their way to servers and back."""

import math
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError, ForgottenError, RefusedError
from glm46.tasks.rl.rollout.records import NOTHING, Completion, Request, SamplingRules
from glm46.tasks.rl.rollout.server_state import EngineError, ServerState

_MOST_FAILURES = 3
"""In a row, of one server; or of one request on all servers."""
_GRACE_SECONDS = 15.0
"""For the partial completion of an aborted request."""
_TICK_SECONDS = 0.2


Inbox = queue.SimpleQueue[tuple[str, Any]]
"""Queue of the outcomes of calls, by the name of the server. Entries with an empty name come from the caller: a list of
further requests, or the index of a request to end."""


class _Sent(NamedTuple):
    """A request on its way."""

    index: int
    state: ServerState
    abort_at: float


class Servers(Protocol):
    """The part of `ServerPool`, which imports this file, that a dispatch uses."""

    deadline: float
    most_running: int

    @property
    def version(self) -> int:
        """See `ServerPool.version`."""

    def ready(self) -> list[ServerState]:
        """See `ServerPool.ready`."""

    def new_name(self) -> str:
        """See `ServerPool.new_name`."""

    def lose(self, state: ServerState, reason: str) -> None:
        """See `ServerPool.lose`."""


class Dispatch:
    """One call of `ServerPool.generate`. Only the calling thread changes its state: other threads make one HTTP call
    each, and are daemons, so that a server that hangs does not keep the process from ending."""

    def __init__(
        self, pool: Servers, requests: Sequence[Request], rules: SamplingRules, halt: threading.Event | None = None,
        on_finish: Callable[[int, Completion], None] | None = None, inbox: Inbox | None = None,
    ):  # fmt: skip
        self._pool, self._rules = pool, rules
        self._halt, self._on_finish = halt, on_finish
        self._halted_at: float | None = None
        self._requests: list[Request] = []
        self._waiting: deque[list[int]] = deque()
        self._sent: dict[str, _Sent] = {}
        self._stays, self._inbox = inbox is not None, inbox or Inbox()
        self._failed_on: dict[int, list[ServerState]] = defaultdict(list)
        self._completions: dict[int, Completion] = {}
        self._look_at = 0.0
        self._arrive(requests)

    def run(self) -> list[Completion]:
        """See `ServerPool.generate`."""
        while len(self._completions) < len(self._requests) or (self._stays and self._halted_at is None):
            if self._halt is not None and self._halt.is_set():
                self._end_early()
            else:
                self._send()
            self._abort_overdue()
            if not self._sent and (self._waiting or self._halted_at is not None):
                continue
            try:
                name, outcome = self._inbox.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                continue
            if not name:
                (self._arrive if isinstance(outcome, list) else self._drop)(outcome)
                continue
            sent = self._sent.pop(name, None)
            if sent is None:  # of a server that was lost meanwhile; the request is somewhere else
                continue
            sent.state.running.discard(name)
            self._take(sent, outcome)
        return [self._completions[index] for index in range(len(self._requests))]

    def _arrive(self, requests: Sequence[Request]) -> None:
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests, len(self._requests)):
            groups[tuple(request.prompt)].append(index)
        self._requests += requests
        self._waiting += groups.values()

    def _drop(self, index: int) -> None:
        """Abort a request, or do not send it."""
        self._look_at = 0.0
        of = [name for name, sent in self._sent.items() if sent.index == index]
        self._sent |= {name: self._sent[name]._replace(abort_at=0.0) for name in of}
        for group in [group for group in self._waiting if index in group]:
            self._completions[index] = NOTHING
            group.remove(index)
            if not group:
                self._waiting.remove(group)

    def _send(self) -> None:
        """Send the groups that servers have room for."""
        while self._waiting:
            ready = self._pool.ready()
            group = self._waiting[0]
            fresh = [state for state in ready if state not in self._failed_on[group[0]]] or ready
            state = min(fresh, key=lambda state: len(state.running))
            if state.running and len(state.running) + len(group) > self._pool.most_running:
                return
            for index in self._waiting.popleft():
                self._start(index, state)

    def _start(self, index: int, state: ServerState) -> None:
        name, deadline = self._pool.new_name(), self._pool.deadline
        salt = f"{name.partition('-')[0]}-{self._pool.version}"

        def ask() -> None:
            outcome: Completion | CallError = CallError("the client failed; see the traceback above")
            try:
                seconds = deadline + _GRACE_SECONDS
                outcome = state.server.generate(name, self._requests[index], self._rules, salt, seconds)
            except CallError as error:
                outcome = error
            finally:
                self._inbox.put((name, outcome))

        state.running.add(name)
        self._sent[name] = _Sent(index, state, time.monotonic() + deadline)
        threading.Thread(target=ask, daemon=True).start()

    def _end_early(self) -> None:
        """Give up what is not sent, abort what is, and after the time for that what no server has returned."""
        if self._halted_at is None:
            self._halted_at = time.monotonic()
            self._sent = {name: sent._replace(abort_at=0.0) for name, sent in self._sent.items()}
            self._look_at = 0.0
        given_up = [index for group in self._waiting for index in group]
        self._waiting.clear()
        if time.monotonic() > self._halted_at + _GRACE_SECONDS:
            given_up += [sent.index for sent in self._sent.values()]
            for name, sent in self._sent.items():
                sent.state.running.discard(name)
            self._sent.clear()
        self._completions |= dict.fromkeys(given_up, NOTHING)

    def _abort_overdue(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _TICK_SECONDS
        overdue: dict[ServerState, list[str]] = defaultdict(list)
        for name, sent in self._sent.items():
            if now > sent.abort_at:
                overdue[sent.state].append(name)
        for state, names in overdue.items():
            for name in names:
                self._sent[name] = self._sent[name]._replace(abort_at=math.inf)
            try:
                state.server.abort(names)
            except CallError as error:
                self._lose(state, str(error))

    def _take(self, sent: _Sent, outcome: Completion | CallError) -> None:
        state, version = sent.state, self._pool.version
        was_told = not time.monotonic() < sent.abort_at < math.inf
        if isinstance(outcome, Completion) and outcome.finish == "abort" and not was_told:
            outcome = CallError("it aborted a request by itself")  # as a server that is told to end does
        if isinstance(outcome, Completion):
            generated_by = {span.version for span in outcome.spans}
            if generated_by == {version} or not outcome.tokens:
                state.failures = 0
                self._completions[sent.index] = outcome
                is_final = self._halted_at is None or outcome.finish != "abort"
                if self._on_finish is not None and is_final:
                    self._on_finish(sent.index, outcome)
                return
            self._waiting.appendleft([sent.index])
            self._lose(state, f"generated with version {sorted(generated_by)} of the weights, not {version}")
            return
        if isinstance(outcome, RefusedError) and self._pool.ready() == [state]:
            raise UserError(f"rollout.urls: {state.server.url} refuses a request: {outcome}")
        self._waiting.appendleft([sent.index])
        if isinstance(outcome, (RefusedError, ForgottenError)):
            self._lose(state, str(outcome))
            return
        self._failed_on[sent.index].append(state)
        state.failures += 1
        reason = str(outcome)
        try:
            state.server.alive()
        except CallError as error:
            self._lose(state, f"{reason}; then {error}")
        else:
            if state.failures >= _MOST_FAILURES:
                self._lose(state, reason)
        if len(self._failed_on[sent.index]) >= _MOST_FAILURES:
            raise EngineError(
                f"rollout.urls: a request failed {_MOST_FAILURES} times, the last time on {state.server.url}: "
                f"{reason}. Look into the servers' logs, then start this run again: it goes on from its last checkpoint"
            )

    def _lose(self, state: ServerState, reason: str) -> None:
        """Take a server out, and give its requests to others."""
        self._pool.lose(state, reason)
        self._waiting.extendleft([self._sent.pop(name).index] for name in state.running if name in self._sent)
        state.running.clear()
