"""One inference server of any kind: its calls, and its state: whether it may generate, and with which weights."""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError, ForgottenError, RefusedError, call, exchange
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules
from glm46.tasks.rl.rollout.replies import checked, known_form
from glm46.tasks.rl.rollout.served_policy import CHANGED, EngineError, Weights
from glm46.tasks.rl.rollout.weight_group import WeightGroup

QUICK_SECONDS = 10.0
"""Deadline in seconds of calls that a healthy server answers immediately."""
ADAPTER = "glm46-version-"
"""Prefix of adapter names. Each version needs its own name: requests name their adapter, and vLLM shares the prompt
cache between all adapters with the same name."""
MAX_FAILURES = 3
"""Failures in a row after which a server is excluded, or after which a request ends the run."""
NEVER_JOINED = "not asked yet"
_MAX_BIAS = 100.0
"""Largest logit bias that both kinds of servers accept."""


class Server(ABC):
    """One server by its URL. All coroutines return or raise `CallError` within a bounded time. Used in one loop."""

    _health: str
    """Path that a server answers immediately, even while paused."""
    _path: str
    """Path of requests for tokens."""
    _forgotten: str
    """Text in the refusal of a token request whose adapter the server no longer has."""

    def __init__(self, url: str, padding: range, routed: tuple[int, int] = (0, 0)):
        """
        Args:
            padding: token ids of the head's padding rows, which must not be generated.
            routed: number of layers with experts, and of experts per token.
        """
        self.url = url
        self._routed = routed
        self.dtype = ""
        """Compute dtype, set by `check`."""
        self.context: int | None = None
        """Maximum tokens of prompt and completion, set by `check`; None if the server does not report it."""
        self.note = ""
        """Suffix for the message that it has joined, set by `check`; may be empty."""
        self._bias = dict.fromkeys(map(str, padding), -_MAX_BIAS)
        self._facts = dict[str, Any]()
        """The server's report of dtype, device and sizes, set by `check`."""
        self._adapter = dict[str, str]()
        """Adapter key added to each request; empty for the server's base weights."""

        self.lost: str | None = NEVER_JOINED
        """Why it generates nothing; None if it generates."""
        self.is_checked = False
        """True if its samples were compared with the policy since it joined."""
        self.is_refused = False
        """True if it samples from another distribution. No update changes that, so it is never retried."""
        self.failed_version: int | None = None
        """Version that it failed to load; it is retried with the next one, or if no other server is left."""
        self.failures = 0
        """Failed requests since the last one that succeeded."""
        self.running = set[str]()
        """Names of its running requests."""
        self.group: WeightGroup | None = None
        """Group in which it waits for a broadcast."""
        self._scores = list[list[float]]()
        """Its log-probabilities of the probe with the previous version."""
        self._expected = list[list[float]]()
        """The trainer's log-probabilities of the probe with the previous version."""

    async def begin(self, weights: Weights, rules: SamplingRules, max_tokens: int, seconds: float) -> str | None:
        """Check the options of the server and, for a broadcast, have it join a group. Return why it cannot join, or
        None if it can.

        Args:
            rules: sampling rules of training rollouts.
            max_tokens: maximum number of tokens of a prompt and its completion.
            seconds: time to join.

        Raises:
            UserError: it was started with wrong options, and has never generated.
        """

        async def prepare() -> None:
            await self.alive()
            if self.lost is not None:
                await self.check(routes=rules.routes)
                _require_context(self, max_tokens)
            self.failed_version = weights.version  # until `complete` succeeds
            if weights.folder is None:
                self.group = await self.join(weights.version, seconds)

        return await self._fault_of(prepare())

    async def complete(self, weights: Weights, rules: SamplingRules, seconds: float) -> str | None:
        """Load the weights of a folder, or wait until broadcast weights are loaded, and compare scores of the probe.
        Return why the server cannot generate with them, or None if it can.

        Args:
            seconds: time to load, and for each sequence of the probe.

        Raises:
            UserError: it was started with wrong options, and has never generated.
            EngineError: it did not load the changed tensors of the check at the start.
        """
        scores: list[list[float]] = []

        async def load() -> None:
            if weights.folder is None:
                assert self.group is not None, "it has joined the broadcast"
                await self.receive(self.group, weights.version, seconds)
            else:
                await self.load(weights.folder, weights.version, seconds)
            scores.extend([await self.score(tokens, seconds) for tokens in weights.probe])
            if self.lost is not None and weights.version != CHANGED:
                await self.check_stop(list(rules.stop))

        if (fault := await self._fault_of(load())) is not None:
            return fault
        fault = weights.difference(scores, self.dtype)
        if fault is None and scores == self._scores and weights.has_moved_from(self._expected):
            fault = f"after the update to {weights.name} it computes what it did before: its weights are old"
        if fault is not None and weights.version == CHANGED:
            raise EngineError(
                f"rollout.urls: {self.url} does not have the weights that it said to have loaded: {fault}; "
                "start it with the release and the options of docs/rollout_servers.md"
            )
        self._scores = scores
        self._expected = weights.expected
        if fault is None:
            self.failed_version = None
        return fault

    async def _fault_of(self, work: Coroutine[Any, Any, None]) -> str | None:
        try:
            await work
        except CallError as error:
            return str(error)
        except (UserError, LookupError, TypeError, AttributeError, ValueError) as error:
            if self.lost == NEVER_JOINED:  # at the start, before work is done
                raise
            return str(error) if isinstance(error, UserError) else f"a reply has an unknown form: {error!r}"
        return None

    def leave_group(self) -> None:
        """End the broadcast for this server if it is still open."""
        if self.group is not None:
            self.group.close()
        self.group = None

    async def fault_after(self, failure: BaseException) -> str | None:
        """Return why the server can generate nothing more after a failed request; None if it still can."""
        self.failures += 1
        try:
            await self.alive()
        except CallError as error:
            return f"{failure}; then {error}"
        return str(failure) if self.failures >= MAX_FAILURES else None

    @abstractmethod
    async def check(self, *, routes: bool) -> None:
        """Compare the server's configuration with the required one.

        Raises:
            UserError: it was started with wrong options; the message names the right one.
        """

    async def alive(self) -> None:
        """Return if the server answers."""
        await call(self.url, self._health, seconds=QUICK_SECONDS)

    async def generate(
        self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float
    ) -> Completion:
        """Generate one completion. `name` is for `abort`; requests with different `salt` share no cache."""
        with known_form(f"{self._path}: unknown reply"):
            completion = await self._generated(name, request, rules, salt, seconds, self._bias)
        return checked(request, rules, completion)

    @abstractmethod
    async def _generated(
        self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float, bias: dict[str, float]
    ) -> Completion:
        """Generate a completion with a logit bias, and return it unchecked."""

    async def check_stop(self, stop: Sequence[int]) -> None:
        """Require that each stop token ends a completion: the chat format has three, server defaults perhaps one.

        Skipped for a server that refuses a logit bias, such as vLLM with drafts. Each reply is checked as well.

        Raises:
            UserError: the server continues after one.
        """
        rules = SamplingRules(1.0, frozenset(stop), vocab_size=0)
        for token in sorted(stop):
            name = f"stop-{uuid4().hex}"  # servers refuse a name that is still in use
            bias = {str(token): _MAX_BIAS}
            request = Request([token], seed=0, max_new_tokens=2)
            try:
                with known_form(f"{self._path}: unknown reply"):
                    completion = await self._generated(name, request, rules, "stop", QUICK_SECONDS, bias)
            except RefusedError:
                return
            tokens = completion.tokens
            if tokens[:1] != [token]:
                return
            if len(tokens) > 1 or completion.finish != "stop":
                raise UserError(
                    f"rollout.urls: {self.url} does not end a completion at the stop token {token}: it has {tokens}, "
                    f'finish reason "{completion.finish}"; start it with the release of docs/rollout_servers.md'
                )

    @abstractmethod
    async def abort(self, names: Sequence[str]) -> None:
        """Abort requests; their calls return the tokens so far, with finish "abort"."""

    @abstractmethod
    async def load(self, folder: Path, version: int, seconds: float) -> None:
        """Load the weights of a folder, or its adapters in addition to the initial weights. All requests pause, and
        continue only if the whole update succeeds.

        Raises:
            UserError: it was started without the options that these adapters need.
        """

    @abstractmethod
    async def join(self, version: int, seconds: float) -> WeightGroup:
        """Pause all requests, and have the workers wait for weights in a group.

        Raises:
            UserError: it was started with options that do not allow a group.
        """

    @abstractmethod
    async def receive(self, group: WeightGroup, version: int, seconds: float) -> None:
        """Resume after the broadcast once every worker has loaded this version."""

    async def score(self, tokens: list[int], seconds: float) -> list[float]:
        """Return the log-probability of each token except the first, given the tokens before it, at temperature 1."""
        with known_form("no log-probabilities of the prompt"):
            return await self._score_prompt(tokens, seconds)

    @abstractmethod
    async def _score_prompt(self, tokens: list[int], seconds: float) -> list[float]: ...

    async def _request_tokens(self, body: dict[str, Any], seconds: float) -> Any:
        """Return the reply to a request for tokens, generated with the weights of the last update."""
        try:
            return await call(self.url, self._path, body | self._adapter, seconds=seconds)
        except RefusedError as error:
            if self._adapter and self._forgotten in str(error):
                raise ForgottenError(str(error)) from None
            raise

    async def _unload_adapters(self, path: str) -> None:
        """Remove the adapters of the previous version, and of a killed run, by the call at `path`."""
        for model in (await call(self.url, "/v1/models", seconds=QUICK_SECONDS))["data"]:
            if model["id"].startswith(ADAPTER):
                # Not `call`: vLLM answers in plain text.
                await exchange(self.url, path, {"lora_name": model["id"]}, seconds=QUICK_SECONDS)


def group_backend(device: str) -> str:
    """Return the backend of a broadcast to workers on devices of this type."""
    return "nccl" if device == "cuda" and torch.cuda.is_available() else "gloo"


def _require_context(server: Server, max_tokens: int) -> None:
    if server.context is not None and max_tokens > server.context:
        raise UserError(
            f"rollout.urls: {server.url} has a context of {server.context} tokens, but a prompt with "
            f"rollout.max_new_tokens has up to {max_tokens}; start it with --max-model-len {max_tokens}, or lower "
            "rollout.max_new_tokens or the longest prompt"
        )
