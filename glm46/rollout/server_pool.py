"""Several inference servers: who draws which completion, who is left out, and who comes back."""

import contextlib
import itertools
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from glm46.config.errors import UserError
from glm46.rollout.http_calls import CallError, RefusedError
from glm46.rollout.inference_server import InferenceServer
from glm46.rollout.records import Completion, Request, SamplingRules

_MOST_RUNNING = 1024
"""Requests of one server at a time: each has a thread and a connection."""
_TOLERANCES = {"float32": (1e-3, 1e-4), "bfloat16": (0.5, 0.05), "float16": (0.2, 0.02)}
"""By type of a server: largest and mean difference of log-probabilities from the trainer's. Rounding was measured at
4e-6 in FP32, and at 0.16 and 0.005 in BF16, most of it from tokens near a tie that take another expert; a server with
half of its weights was 0.6 off, one with old ones 3."""
_MOST_FAILURES = 3
"""In a row, of one server; or of one request on all servers."""
_GRACE_SECONDS = 15.0
"""For the partial completion of an aborted request."""
_NEVER_JOINED = "not asked yet"
_TICK_SECONDS = 0.2
_RESTART_TICK_SECONDS = 2.0


class EngineError(UserError):
    """No server is left. What was drawn before is kept by who has it; weights and optimizer are untouched."""


class Weights(NamedTuple):
    """One version of the policy, and how to recognise it."""

    version: int
    folder: Path
    probe: list[list[int]]
    """Sequences of tokens."""
    expected: list[list[float]]
    """The trainer's log-probability of each of their tokens but the first."""


@dataclass(eq=False)
class _State:
    server: InferenceServer
    lost: str | None = _NEVER_JOINED
    """Why it draws nothing."""
    failures: int = 0
    running: set[int] = field(default_factory=set)
    scores: list[list[float]] = field(default_factory=list)
    """Of the probe, by the version before."""
    expected: list[list[float]] = field(default_factory=list)


class _Sent(NamedTuple):
    """A request on its way."""

    index: int
    state: _State
    name: str
    abort_at: float


class ServerPool:
    """Draws completions on the servers that answer, with weights that were compared with the trainer's."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        deadline: float,
        restart: float,
        say: Callable[[str], None],
    ):
        """
        Args:
            deadline: seconds for one completion, and for one server's update.
            restart: seconds to wait for a server to come back when none is left.
            say: takes a line for the log.
        """
        self._states = [_State(server) for server in servers]
        self._deadline, self._restart, self._say = deadline, restart, say
        self._weights: Weights | None = None
        self._routes = False
        self._serials = itertools.count()
        self._session = f"{time.time_ns():x}"  # a server knows the requests of an earlier run

    def update(self, weights: Weights) -> None:
        """Load new weights into all servers that answer, those that were lost too.

        Raises:
            EngineError: none took them.
        """
        self._weights = weights
        self._join(self._states)
        self._require_one()

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """Completions in the order of the requests. All samples of one prompt go to one server, which then computes the
        prompt once; a prompt goes to the server with the fewest requests. A request that fails is sent again, to
        another server if there is one. After its deadline it is aborted, and its completion is what was drawn by then.

        Raises:
            EngineError: no server is left, or one request failed several times.
            UserError: the servers refuse a request, or its tokens do not fit into their context.
        """
        if rules.routes and not self._routes:  # recording begins with the check
            self._routes = True
            for state in self._ready():
                state.server.check(routes=True)
        self._join([state for state in self._states if state.lost])
        self._require_one()
        self._require_context(requests)
        try:
            return _Call(self, requests, rules).run()
        finally:
            self._abort_all()  # nothing, unless an error ends the call

    def _abort_all(self) -> None:
        """End the requests that are still on their way."""
        for state in self._ready():
            if state.running:
                with contextlib.suppress(CallError):
                    state.server.abort([f"{self._session}-{serial}" for serial in state.running])
                state.running.clear()

    def _ready(self) -> list[_State]:
        return [state for state in self._states if state.lost is None]

    def _join(self, states: Sequence[_State]) -> None:
        """Bring servers to the present weights, all at once; those that fail are lost."""
        if not states:
            return
        with ThreadPoolExecutor(len(states)) as threads:  # all its calls have deadlines
            for state, reason in zip(states, threads.map(self._take_weights, states), strict=True):
                if reason is None and state.lost is not None:
                    self._say(f"rollout: {state.server.url} draws with version {self._weights.version}")
                if reason is not None and state.lost != reason:
                    self._say(f"rollout: {state.server.url} is left out: {reason}")
                state.lost, state.failures = reason, 0

    def _take_weights(self, state: _State) -> str | None:
        """Why the server cannot draw with the present weights; None if it can."""
        server, weights = state.server, self._weights
        try:
            server.alive()
            if state.lost is not None:
                server.check(routes=self._routes)
            server.load(weights.folder, weights.version, self._deadline)
            scores = [server.score(tokens, self._deadline) for tokens in weights.probe]
        except CallError as error:
            return str(error)
        except UserError as error:
            if state.lost == _NEVER_JOINED:  # at the start, before work is done
                raise
            return str(error)
        reason = self._wrong_scores(state, scores)
        state.scores, state.expected = scores, weights.expected
        return reason

    def _wrong_scores(self, state: _State, scores: list[list[float]]) -> str | None:
        weights, (most, mean) = self._weights, _TOLERANCES[state.server.dtype]
        gaps = _gaps(scores, weights.expected)
        if not (max(gaps) <= most and sum(gaps) / len(gaps) <= mean):  # NaN too
            return (
                f"after the update to version {weights.version} its log-probabilities differ from the trainer's by up "
                f"to {max(gaps):.2g}, {sum(gaps) / len(gaps):.2g} in the mean; {state.server.dtype} explains "
                f"{most:g} and {mean:g}"
            )
        moved = max(_gaps(weights.expected, state.expected)) if state.expected else 0.0
        if scores == state.scores and moved > 1e-5:
            return f"after the update to version {weights.version} it computes what it did before: its weights are old"
        return None

    def _require_one(self) -> None:
        """Wait for a server if there is none."""
        end = time.monotonic() + self._restart
        while not self._ready():
            if time.monotonic() > end:
                reasons = "; ".join(f"{state.server.url}: {state.lost}" for state in self._states)
                raise EngineError(
                    f"rollout.urls: no server is left, and none came back within {self._restart:g} s "
                    f"(rollout.restart_seconds): {reasons}. Start them again, then start this run again: it goes on "
                    "from its last checkpoint"
                )
            time.sleep(min(_RESTART_TICK_SECONDS, self._restart))
            self._join(self._states)

    def _require_context(self, requests: Sequence[Request]) -> None:
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        for state in self._ready():
            context = state.server.context
            if context is not None and longest > context:
                raise UserError(
                    f"rollout.urls: {state.server.url} has a context of {context} tokens, but a prompt with "
                    f"rollout.max_new_tokens has up to {longest}; start it with --max-model-len {longest}, or lower "
                    "rollout.max_new_tokens or the longest prompt"
                )


def _gaps(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    return [abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]


class _Call:
    """One call of `ServerPool.generate`. Only the calling thread changes its state: other threads make one HTTP call
    each, and are daemons, so that a server that hangs does not keep the process from ending."""

    def __init__(self, pool: ServerPool, requests: Sequence[Request], rules: SamplingRules):
        self._pool, self._requests, self._rules = pool, requests, rules
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[tuple(request.prompt)].append(index)
        self._waiting = deque(groups.values())
        self._sent: dict[int, _Sent] = {}
        self._outcomes: queue.SimpleQueue[tuple[int, Completion | CallError]] = queue.SimpleQueue()
        self._failed_on: dict[int, list[_State]] = defaultdict(list)
        self._completions: dict[int, Completion] = {}
        self._look_at = 0.0

    def run(self) -> list[Completion]:
        """See `ServerPool.generate`."""
        while len(self._completions) < len(self._requests):
            self._send()
            self._abort_overdue()
            try:
                serial, outcome = self._outcomes.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                continue
            sent = self._sent.pop(serial, None)
            if sent is None:  # of a server that was lost meanwhile; the request is somewhere else
                continue
            sent.state.running.discard(serial)
            self._take(sent, outcome)
        return [self._completions[index] for index in range(len(self._requests))]

    def _send(self) -> None:
        """Send the groups that servers have room for."""
        while self._waiting:
            ready = self._pool._ready()
            if not ready:
                self._pool._require_one()
                continue
            group = self._waiting[0]
            fresh = [state for state in ready if state not in self._failed_on[group[0]]] or ready
            state = min(fresh, key=lambda state: len(state.running))
            if state.running and len(state.running) + len(group) > _MOST_RUNNING:
                return
            for index in self._waiting.popleft():
                self._start(index, state)

    def _start(self, index: int, state: _State) -> None:
        serial, deadline = next(self._pool._serials), self._pool._deadline
        name = f"{self._pool._session}-{serial}"
        salt = f"{self._pool._session}-{self._pool._weights.version}"

        def ask() -> None:
            outcome: Completion | CallError = CallError("the client failed; see the traceback above")
            try:
                seconds = deadline + _GRACE_SECONDS
                outcome = state.server.generate(name, self._requests[index], self._rules, salt, seconds)
            except CallError as error:
                outcome = error
            finally:
                self._outcomes.put((serial, outcome))

        state.running.add(serial)
        self._sent[serial] = _Sent(index, state, name, time.monotonic() + deadline)
        threading.Thread(target=ask, daemon=True).start()

    def _abort_overdue(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _TICK_SECONDS
        overdue: dict[int, list[int]] = defaultdict(list)
        for serial, sent in self._sent.items():
            if now > sent.abort_at:
                overdue[id(sent.state)].append(serial)
        for serials in overdue.values():
            for serial in serials:
                self._sent[serial] = self._sent[serial]._replace(abort_at=float("inf"))
            try:
                self._sent[serials[0]].state.server.abort([self._sent[serial].name for serial in serials])
            except CallError as error:
                self._lose(self._sent[serials[0]].state, str(error))

    def _take(self, sent: _Sent, outcome: Completion | CallError) -> None:
        state, version = sent.state, self._pool._weights.version
        if isinstance(outcome, Completion):
            drawn_by = {span.version for span in outcome.spans}
            if drawn_by == {version} or not outcome.tokens:
                state.failures = 0
                self._completions[sent.index] = outcome
                return
            self._waiting.appendleft([sent.index])
            self._lose(state, f"drew with version {sorted(drawn_by)} of the weights, not {version}")
            return
        if isinstance(outcome, RefusedError):
            raise UserError(f"rollout.urls: {state.server.url} refuses a request: {outcome}")
        self._failed_on[sent.index].append(state)
        self._waiting.appendleft([sent.index])
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

    def _lose(self, state: _State, reason: str) -> None:
        """Take a server out, and give its requests to others."""
        if state.lost is None:
            self._pool._say(f"rollout: {state.server.url} is left out: {reason}")
            state.lost = reason
        self._waiting.extendleft(
            [self._sent.pop(serial).index] for serial in list(state.running) if serial in self._sent
        )
        state.running.clear()
