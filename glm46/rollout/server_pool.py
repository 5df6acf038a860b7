"""Several inference servers: who draws, who is left out, and who comes back."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from glm46.config.errors import UserError
from glm46.rollout.dispatch import Dispatch
from glm46.rollout.http_calls import CallError
from glm46.rollout.inference_server import InferenceServer, check_stop
from glm46.rollout.records import Completion, Request, SamplingRules
from glm46.rollout.server_state import CHANGED, NEVER_JOINED, EngineError, ServerState, Weights
from glm46.rollout.weight_group import WeightGroup

_RESTART_TICK_SECONDS = 2.0


class ServerPool:
    """Draws completions on the servers that answer, with weights that were compared with the trainer's."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        deadline: float,
        restart: float,
        say: Callable[[str], None],
        still_starting: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            deadline: seconds for one completion, and for one server's update.
            restart: seconds to wait for a server to come back when none is left.
            say: takes a line for the log.
            still_starting: raises EngineError if no server can come up any more.
        """
        self._states = [ServerState(server) for server in servers]
        self.deadline, self._restart, self._say, self._still_starting = deadline, restart, say, still_starting
        self._weights: Weights | None = None
        self.send: Callable[[Sequence[WeightGroup]], None] | None = None
        """Broadcasts the present weights to servers that have joined groups. None: not now, all ranks are elsewhere."""
        self._routes = False
        self._names = itertools.count()
        self._session = f"{time.time_ns():x}"  # a server knows the requests of an earlier run

    def update(self, weights: Weights) -> None:
        """Load new weights into all servers that answer, those that were lost too. After `CHANGED` ones no server draws
        before the next update.

        Raises:
            EngineError: none took them.
        """
        self._weights = weights
        self._join(self._states)
        self.ready()
        if weights.version == CHANGED:
            for state in self._drawing():
                state.lost = NEVER_JOINED

    def generate(
        self,
        requests: Sequence[Request],
        rules: SamplingRules,
        halt: threading.Event | None = None,
        on_finish: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the requests. All samples of one prompt go to one server, which then computes the
        prompt once; a prompt goes to the server with the fewest requests. A request that fails is sent again, to
        another server if there is one. After its deadline it is aborted, and its completion is what was drawn by then.

        Args:
            halt: when it is set, all requests are aborted, and what is not finished is returned as it is.
            on_finish: gets number and completion of each request when it is drawn, or aborted after its deadline.

        Raises:
            EngineError: no server is left, or one request failed several times.
            UserError: the servers refuse a request, or its tokens do not fit into their context.
        """
        if not requests:
            return []
        if rules.routes and not self._routes:  # recording begins with the check
            self._routes = True
            for state in self._drawing():
                state.server.check(routes=True)
        self._join([state for state in self._states if state.lost and state.refused != self.version])
        self.ready()
        self._require_context(requests)
        self._require_ends(rules)
        try:
            return Dispatch(self, requests, rules, halt, on_finish).run()
        finally:
            self._abort_all()  # nothing, unless an error ends the call

    def _abort_all(self) -> None:
        """End the requests that are still on their way."""
        for state in self._drawing():
            if state.running:
                with contextlib.suppress(CallError):
                    state.server.abort(list(state.running))
                state.running.clear()

    @property
    def version(self) -> int:
        return self._weights.version

    def new_name(self) -> str:
        """See `dispatch.Pool`."""
        return f"{self._session}-{next(self._names)}"

    def lose(self, state: ServerState, reason: str) -> None:
        """See `dispatch.Pool`."""
        if state.lost is None:
            self._say(f"rollout: {state.server.url} is left out: {reason}")
            state.lost = reason

    def _drawing(self) -> list[ServerState]:
        return [state for state in self._states if state.lost is None]

    def _join(self, states: Sequence[ServerState]) -> None:
        """Bring servers to the present weights, all at once; those that fail are lost."""
        if not states:
            return

        weights, deadline = self._weights, self.deadline
        with ThreadPoolExecutor(len(states)) as threads:  # all its calls have deadlines
            if weights.folder is None and self.send is None:
                reasons = dict.fromkeys(states, "it waits for the weights of the next update")
            else:
                begin = partial(ServerState.begin, weights=weights, routes=self._routes, deadline=deadline)
                reasons = dict(zip(states, threads.map(begin, states), strict=True))
            begun = [state for state in states if reasons[state] is None]
            if begun and weights.folder is None:
                self.send([state.group for state in begun])
            complete = partial(ServerState.complete, weights=weights, deadline=deadline)
            reasons |= dict(zip(begun, threads.map(complete, begun), strict=True))
        for state, reason in reasons.items():
            if reason is None and state.lost is not None and self.version != CHANGED:
                self._say(f"rollout: {state.server.url} draws with version {self._weights.version}")
            if reason is not None and state.lost != reason:
                self._say(f"rollout: {state.server.url} is left out: {reason}")
            state.lost, state.failures = reason, 0

    def ready(self) -> list[ServerState]:
        """See `dispatch.Pool`."""
        end = time.monotonic() + self._restart
        while not self._drawing():
            if time.monotonic() > end:
                reasons = "; ".join(f"{state.server.url}: {state.lost}" for state in self._states)
                raise EngineError(
                    f"rollout.urls: no server is left, and none came back within {self._restart:g} s "
                    f"(rollout.restart_seconds): {reasons}. Start them again, then start this run again: it goes on "
                    "from its last checkpoint"
                )
            self._still_starting()
            time.sleep(min(_RESTART_TICK_SECONDS, self._restart))
            self._join(self._states)
        return self._drawing()

    def _require_ends(self, rules: SamplingRules) -> None:
        """`check_stop` of the servers that have not drawn yet."""
        for state in self._drawing():
            if not state.has_ended:
                try:
                    check_stop(state.server, rules.stop)
                except CallError as error:
                    self.lose(state, str(error))
                state.has_ended = True
        self.ready()

    def _require_context(self, requests: Sequence[Request]) -> None:
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        for state in self._drawing():
            context = state.server.context
            if context is not None and longest > context:
                raise UserError(
                    f"rollout.urls: {state.server.url} has a context of {context} tokens, but a prompt with "
                    f"rollout.max_new_tokens has up to {longest}; start it with --max-model-len {longest}, or lower "
                    "rollout.max_new_tokens or the longest prompt"
                )
