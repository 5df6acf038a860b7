"""A server as the pool sees it, whatever its kind, and the checks of every reply."""

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
from glm46.tasks.rl.rollout.records import FINISHES, Completion, Request, SamplingRules, VersionSpan
from glm46.tasks.rl.rollout.weight_group import WeightGroup

QUICK_SECONDS = 10.0
"""Deadline of calls that a healthy server answers at once."""
ADAPTER = "glm46-version-"
"""Names of adapters begin so. Each version has another one: requests name their adapter, and vLLM takes the cache of a
prompt for that of all adapters of a name."""
_MOST_BIAS = 100.0
"""Largest that both servers take for a logit."""


class InferenceServer(ABC):
    """One server by its URL. All methods raise `CallError`, within a bounded time."""

    _health: str
    """The path that a server answers at once, also one that is paused."""
    _path: str
    """Of requests for tokens."""
    _forgotten: str
    """In the refusal of such a request for an adapter that a server does not have any more."""

    def __init__(self, url: str, padding: range, routed: tuple[int, int] = (0, 0)):
        """
        Args:
            padding: ids of the head's padding rows, which must not be generated.
            routed: layers with experts, and experts of a token in one.
        """
        self.url, self._routed = url, routed
        self.dtype = ""
        """Type that it computes in, after `check`."""
        self.context: int | None = None
        """Most tokens of prompt and completion, after `check`; None: it does not say."""
        self.note = ""
        """Text behind the message that it has joined, after `check`; may be empty."""
        self._bias = dict.fromkeys(map(str, padding), -_MOST_BIAS)
        self._facts = dict[str, Any]()
        """Its own report of type, device and sizes, after `check`."""
        self._adapter = dict[str, str]()
        """Of each request: none for the server's own weights."""

    @abstractmethod
    def check(self, *, routes: bool) -> None:
        """Compare what it runs with what is needed.

        Raises:
            UserError: it was started in another way; the message has the option to start it with.
        """

    def alive(self) -> None:
        """Return if it answers."""
        call(self.url, self._health, seconds=QUICK_SECONDS)

    def generate(self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float) -> Completion:
        """Generate one completion. `name` is for `abort`; requests of another `salt` share no cache with it."""
        with known_form(f"{self._path}: unknown reply"):
            found = self._generated(name, request, rules, salt, seconds, self._bias)
        return checked(request, rules, *found)

    @abstractmethod
    def _generated(
        self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float, bias: dict[str, float]
    ) -> tuple[list[int], list[float], str, list[VersionSpan], np.ndarray | None]:
        """Tokens, log-probabilities, finish, versions and experts of a completion, with a bias of tokens."""

    def check_stop(self, stop: Sequence[int]) -> None:
        """Require that each stop token ends a completion: the chat format has three, a server's defaults perhaps one.

        A server that takes no bias of a token, such as vLLM with drafts, cannot be asked. Each reply is checked, too.

        Raises:
            UserError: the server continues after one.
        """
        rules = SamplingRules(1.0, frozenset(stop), vocab_size=0)
        for token in sorted(stop):
            name = f"stop-{uuid4().hex}"  # an earlier one that the server still has would be refused
            bias, asked = {str(token): _MOST_BIAS}, Request([token], seed=0, max_new_tokens=2)
            try:
                with known_form(f"{self._path}: unknown reply"):
                    tokens, _, finish, *_ = self._generated(name, asked, rules, "stop", QUICK_SECONDS, bias)
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
        """End requests; their calls return what they have generated, with finish "abort"."""

    @abstractmethod
    def load(self, folder: Path, version: int, seconds: float) -> None:
        """Take the weights of a folder, or its adapters beside the weights that it was started with: all requests
        pause, and go on only if the whole update has succeeded.

        Raises:
            UserError: it was started without what these adapters need.
        """

    @abstractmethod
    def join(self, version: int, seconds: float) -> WeightGroup:
        """Pause all requests, and have its workers wait for weights in a group.

        Raises:
            UserError: it was started in a way that no group can be made for.
        """

    @abstractmethod
    def receive(self, group: WeightGroup, version: int, seconds: float) -> None:
        """Go on, behind the broadcast, if all workers have loaded the weights of a version."""

    def prompt_logprobs(self, tokens: list[int], top_k: int, seconds: float) -> list[dict[int, float]]:
        """Log-probabilities at temperature 1, given the tokens before, of each token but the first and of the ``top_k``
        most likely ones in its place, by their ids."""
        with known_form("no log-probabilities of the prompt"):
            return self._of_prompt(tokens, top_k, seconds)

    @abstractmethod
    def _of_prompt(self, tokens: list[int], top_k: int, seconds: float) -> list[dict[int, float]]: ...

    def score(self, tokens: list[int], seconds: float) -> list[float]:
        """Log-probability of each token but the first, given those before it, at temperature 1."""
        places = self.prompt_logprobs(tokens, 0, seconds)
        try:
            return [place[token] for token, place in zip(tokens[1:], places, strict=True)]
        except (KeyError, ValueError):
            raise CallError("no log-probabilities of the prompt (those of other tokens)") from None

    def _ask(self, body: dict[str, Any], seconds: float) -> Any:
        """The reply to a request for tokens, from the weights of the last update."""
        try:
            return call(self.url, self._path, body | self._adapter, seconds=seconds)
        except RefusedError as error:
            if self._adapter and self._forgotten in str(error):
                raise ForgottenError(str(error)) from None
            raise

    def _unload_adapters(self, path: str) -> None:
        """Remove the adapters of the version before, and of a run that was killed, by the call at `path`."""
        for model in call(self.url, "/v1/models", seconds=QUICK_SECONDS)["data"]:
            if model["id"].startswith(ADAPTER):
                exchange(self.url, path, {"lora_name": model["id"]}, seconds=QUICK_SECONDS)  # vLLM answers in words

    @property
    def _group_backend(self) -> str:
        """Of a broadcast to its workers."""
        return "nccl" if self._facts["device"] == "cuda" and torch.cuda.is_available() else "gloo"


@contextmanager
def known_form(said: str) -> Iterator[None]:
    """Errors in reading a reply as `CallError`, whose message begins with this."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CallError(f"{said} ({type(error).__name__}: {error})") from None


def checked(
    request: Request, rules: SamplingRules, tokens: list[int], logprobs: list[float], finish: str,
    spans: list[VersionSpan], routes: np.ndarray | None = None,
) -> Completion:  # fmt: skip
    """The completion, if it is possible at all.

    Raises:
        CallError: it is not.
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
    return Completion(tokens, logprobs, finish, spans, routes)


def version_of(text: object) -> int:
    """The version that a server names; -1 for a name that no update of ours gave, such as that of a restarted
    server."""
    return int(str(text)) if str(text).isdecimal() else -1
