"""Interface of an inference server of any kind, and checks of every reply."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError, ForgottenError, RefusedError, call, exchange
from glm46.tasks.rl.rollout.records import FINISHES, Completion, Request, SamplingRules, token_versions
from glm46.tasks.rl.rollout.weight_group import WeightGroup

QUICK_SECONDS = 10.0
"""Deadline in seconds of calls that a healthy server answers immediately."""
ADAPTER = "glm46-version-"
"""Prefix of adapter names. Each version needs its own name: requests name their adapter, and vLLM shares the prompt
cache between all adapters with the same name."""
_MOST_BIAS = 100.0
"""Largest logit bias that both kinds of servers accept."""


class InferenceServer(ABC):
    """One server by its URL. All methods return or raise `CallError` within a bounded time."""

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
        self._bias = dict.fromkeys(map(str, padding), -_MOST_BIAS)
        self._facts = dict[str, Any]()
        """The server's report of dtype, device and sizes, set by `check`."""
        self._adapter = dict[str, str]()
        """Adapter key added to each request; empty for the server's base weights."""

    @abstractmethod
    def check(self, *, routes: bool) -> None:
        """Compare the server's configuration with the required one.

        Raises:
            UserError: it was started with wrong options; the message names the right one.
        """

    def alive(self) -> None:
        """Return if the server answers."""
        call(self.url, self._health, seconds=QUICK_SECONDS)

    def generate(self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float) -> Completion:
        """Generate one completion. `name` is for `abort`; requests with different `salt` share no cache."""
        with known_form(f"{self._path}: unknown reply"):
            fields = self._generated(name, request, rules, salt, seconds, self._bias)
        return checked(request, rules, *fields)

    @abstractmethod
    def _generated(
        self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float, bias: dict[str, float]
    ) -> tuple[list[int], list[float], str, list[tuple[int, int]], np.ndarray | None]:
        """Return tokens, log-probabilities, finish, version spans and experts of a completion, with a logit bias."""

    def check_stop(self, stop: Sequence[int]) -> None:
        """Require that each stop token ends a completion: the chat format has three, server defaults perhaps one.

        Skipped for a server that refuses a logit bias, such as vLLM with drafts. Each reply is checked as well.

        Raises:
            UserError: the server continues after one.
        """
        rules = SamplingRules(1.0, frozenset(stop), vocab_size=0)
        for token in sorted(stop):
            name = f"stop-{uuid4().hex}"  # servers refuse a name that is still in use
            bias = {str(token): _MOST_BIAS}
            request = Request([token], seed=0, max_new_tokens=2)
            try:
                with known_form(f"{self._path}: unknown reply"):
                    tokens, _, finish, *_ = self._generated(name, request, rules, "stop", QUICK_SECONDS, bias)
            except RefusedError:
                return
            if tokens[:1] != [token]:
                return
            if len(tokens) > 1 or finish != "stop":
                raise UserError(
                    f"rollout.urls: {self.url} does not end a completion at the stop token {token}: it has {tokens}, "
                    f'finish reason "{finish}"; start it with the release of docs/rollout_servers.md'
                )

    @abstractmethod
    def abort(self, names: Sequence[str]) -> None:
        """Abort requests; their calls return the tokens so far, with finish "abort"."""

    @abstractmethod
    def load(self, folder: Path, version: int, seconds: float) -> None:
        """Load the weights of a folder, or its adapters in addition to the initial weights. All requests pause, and
        continue only if the whole update succeeds.

        Raises:
            UserError: it was started without the options that these adapters need.
        """

    @abstractmethod
    def join(self, version: int, seconds: float) -> WeightGroup:
        """Pause all requests, and have the workers wait for weights in a group.

        Raises:
            UserError: it was started with options that do not allow a group.
        """

    @abstractmethod
    def receive(self, group: WeightGroup, version: int, seconds: float) -> None:
        """Resume after the broadcast once every worker has loaded this version."""

    def score(self, tokens: list[int], seconds: float) -> list[float]:
        """Return the log-probability of each token except the first, given the tokens before it, at temperature 1."""
        with known_form("no log-probabilities of the prompt"):
            return self._score_prompt(tokens, seconds)

    @abstractmethod
    def _score_prompt(self, tokens: list[int], seconds: float) -> list[float]: ...

    def _ask(self, body: dict[str, Any], seconds: float) -> Any:
        """Return the reply to a request for tokens, generated with the weights of the last update."""
        try:
            return call(self.url, self._path, body | self._adapter, seconds=seconds)
        except RefusedError as error:
            if self._adapter and self._forgotten in str(error):
                raise ForgottenError(str(error)) from None
            raise

    def _unload_adapters(self, path: str) -> None:
        """Remove the adapters of the previous version, and of a killed run, by the call at `path`."""
        for model in call(self.url, "/v1/models", seconds=QUICK_SECONDS)["data"]:
            if model["id"].startswith(ADAPTER):
                exchange(
                    self.url, path, {"lora_name": model["id"]}, seconds=QUICK_SECONDS
                )  # vLLM answers in plain text

    @property
    def _group_backend(self) -> str:
        """Backend of a broadcast to the workers."""
        return "nccl" if self._facts["device"] == "cuda" and torch.cuda.is_available() else "gloo"


@contextmanager
def known_form(message: str) -> Iterator[None]:
    """Raise errors in reading a reply as `CallError`, whose message begins with this one."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CallError(f"{message} ({type(error).__name__}: {error})") from None


def checked(
    request: Request,
    rules: SamplingRules,
    tokens: list[int],
    logprobs: list[float],
    finish: str,
    spans: list[tuple[int, int]],
    routes: np.ndarray | None = None,
) -> Completion:
    """Return the completion if it is valid.

    Raises:
        CallError: it is not valid.
    """
    if finish not in FINISHES:
        raise CallError(f"finish reason {finish!r}")
    are_possible = all(isinstance(value, (int, float)) and math.isfinite(value) and value < 1e-3 for value in logprobs)
    if len(tokens) != len(logprobs) or not are_possible:
        raise CallError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities, {logprobs[:3]} ...")
    if not tokens and finish != "abort" or len(tokens) > request.max_new_tokens:
        raise CallError(f"{len(tokens)} tokens, asked for 1 to {request.max_new_tokens}")
    wrong = [token for token in tokens if not 0 <= token < rules.vocab_size]
    ended = bool(tokens) and tokens[-1] in rules.stop
    if wrong or ended != (finish == "stop") or rules.stop.intersection(tokens[:-1]):
        raise CallError(f"tokens {wrong or tokens[-1:]} with finish reason {finish!r}")
    if finish == "length" and len(tokens) < request.max_new_tokens:
        raise CallError(f"it ended after {len(tokens)} of {request.max_new_tokens} tokens: its context is full")
    if rules.routes and tokens:
        fed = len(request.prompt) + len(tokens) - 1
        if routes is None or routes.ndim != 3 or len(routes) < fed:
            raise CallError(f"experts {None if routes is None else routes.shape} of {fed} tokens")
        routes = routes[:fed]
    return Completion(tokens, logprobs, finish, token_versions(spans, len(tokens)), routes)


def version_of(text: object) -> int:
    """Parse the version that a server reports; -1 for a name that this client did not set, such as the default of a
    restarted server."""
    return int(str(text)) if str(text).isdecimal() else -1
