"""A server as the pool sees it, whatever its kind, and the checks of every reply."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError, RefusedError, call, exchange
from glm46.tasks.rl.rollout.records import FINISHES, Completion, Request, SamplingRules, VersionSpan
from glm46.tasks.rl.rollout.weight_group import WeightGroup

QUICK_SECONDS = 10.0
"""Deadline of calls that a healthy server answers at once."""


class InferenceServer(Protocol):
    """One server by its URL. All methods raise `CallError`, within a bounded time."""

    url: str
    dtype: str
    """Type that it computes in, after `check`."""
    context: int | None
    """Most tokens of prompt and completion, after `check`; None: it does not say."""
    note: str
    """What to say of it when it joins, after `check`; perhaps nothing."""

    def check(self, *, routes: bool) -> None:
        """Compare what it runs with what is needed.

        Raises:
            UserError: it was started in another way; the message has the option to start it with.
        """

    def alive(self) -> None:
        """Return if it answers."""

    def generate(self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float) -> Completion:
        """Generate one completion. `name` is for `abort`; requests of another `salt` share no cache with it."""

    def ended_by(self, token: int, stop: Sequence[int], seconds: float) -> tuple[list[int], str]:
        """Tokens and finish of a completion of at most two tokens, whose logits have only `token` as a choice."""

    def abort(self, names: Sequence[str]) -> None:
        """End requests; their calls return what they have generated, with finish "abort"."""

    def load(self, folder: Path, version: int, seconds: float) -> None:
        """Take the weights of a folder, or its adapters beside the weights that it was started with: all requests
        pause, and go on only if the whole update has succeeded.

        Raises:
            UserError: it was started without what these adapters need.
        """

    def join(self, version: int, seconds: float) -> WeightGroup:
        """Pause all requests, and have its workers wait for weights in a group.

        Raises:
            UserError: it was started in a way that no group can be made for.
        """

    def receive(self, group: WeightGroup, version: int, seconds: float) -> None:
        """Go on, behind the broadcast, if all workers have loaded the weights of a version."""

    def prompt_logprobs(self, tokens: list[int], top_k: int, seconds: float) -> list[dict[int, float]]:
        """Log-probabilities at temperature 1, given the tokens before, of each token but the first and of the ``top_k``
        most likely ones in its place, by their ids."""


ADAPTER = "glm46-version-"
"""Names of adapters begin so. Each version has another one: requests name their adapter, and vLLM takes the cache of a
prompt for that of all adapters of a name."""


def unload_adapters(url: str, path: str) -> None:
    """Remove the adapters of the version before, and of a run that was killed, by the call at `path`."""
    for model in call(url, "/v1/models", seconds=QUICK_SECONDS)["data"]:
        if model["id"].startswith(ADAPTER):
            exchange(url, path, {"lora_name": model["id"]}, seconds=QUICK_SECONDS)  # vLLM answers in words


def group_backend(device: str) -> str:
    """Of a broadcast to workers on a device."""
    return "nccl" if device == "cuda" and torch.cuda.is_available() else "gloo"


def score(server: InferenceServer, tokens: list[int], seconds: float) -> list[float]:
    """Log-probability of each token but the first, given those before it, at temperature 1."""
    places = server.prompt_logprobs(tokens, 0, seconds)
    try:
        return [place[token] for token, place in zip(tokens[1:], places, strict=True)]
    except (KeyError, ValueError):
        raise CallError("no log-probabilities of the prompt (those of other tokens)") from None


MOST_BIAS = 100.0
"""Largest that both servers take for a logit."""


def check_stop(server: InferenceServer, stop: Sequence[int]) -> None:
    """Require that each stop token ends a completion: the chat format has three, a server's defaults perhaps one.

    A server that takes no bias of a token, such as vLLM with drafts, cannot be asked. Each reply is checked, too.

    Raises:
        UserError: the server continues after one.
        CallError: it does not answer.
    """
    for token in sorted(stop):
        try:
            tokens, finish = server.ended_by(token, stop, QUICK_SECONDS)
        except RefusedError:
            return
        if tokens[:1] != [token]:
            return
        if len(tokens) > 1 or finish != "stop":
            raise UserError(
                f"rollout.urls: {server.url} does not end a completion at the stop token {token}: it has {tokens}, "
                f'finish reason "{finish}"; start it with the release of docs/rollout_servers.md'
            )


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
