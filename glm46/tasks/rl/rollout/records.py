"""Requests to an engine and its replies: the only types that engines and reinforcement learning share."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np

Finish = Literal["stop", "length", "abort"]
FINISHES: tuple[Finish, ...] = get_args(Finish)
"""In files and messages a finish is its index here."""


class Request(NamedTuple):
    """One sample to draw."""

    prompt: list[int]
    seed: int
    """Decides the draws: request, weights and rules give the same tokens in any batch, on any number of ranks."""
    max_new_tokens: int


class SamplingRules(NamedTuple):
    """The sampling of all requests of a call: from the whole distribution, without top-p and top-k."""

    temperature: float
    """Logits are divided by it; 0 takes the most likely token, with its log-probability at 1."""
    stop: frozenset[int]
    """Ids that end a completion."""
    vocab_size: int
    """Ids from here on are padding rows of the head; their probability is 0."""
    routes: bool = False
    """Return the chosen experts."""


class VersionSpan(NamedTuple):
    """The tokens of a completion from `start` on were drawn by this version of the weights."""

    start: int
    version: int


class Completion(NamedTuple):
    """A drawn sample."""

    tokens: list[int]
    """With the stop token, if it was drawn."""
    logprobs: list[float]
    """Of each token, of the distribution that it was drawn from (at the temperature), natural logarithm."""
    finish: Finish
    spans: list[VersionSpan]
    routes: np.ndarray | None
    """uint8 or uint16 [prompt + tokens - 1, MoE layers, top_k]: the chosen experts of each token that was fed."""
    replies: tuple[tuple[int, int], ...] = ()
    """Start and end, among the tokens, of those that were not drawn: an environment has replied with them, and their
    log-probability is 0."""
    drafted: int = 0
    """Tokens that prediction layers of the local engine drafted for it."""
    accepted: int = 0
    """Those of them that were kept."""

    def extended(self, reply: list[int], turn: "Completion") -> "Completion":
        """This completion with a reply and the turn that was drawn behind it."""
        start = len(self.tokens)
        end = start + len(reply)
        spans = [*self.spans, *(VersionSpan(end + span.start, span.version) for span in turn.spans)]
        logprobs = [*self.logprobs, *[0.0] * len(reply), *turn.logprobs]
        return turn._replace(
            tokens=[*self.tokens, *reply, *turn.tokens],
            logprobs=logprobs,
            spans=spans,
            routes=appended_routes(self.routes, turn.routes),
            replies=(*self.replies, (start, end)),
            drafted=self.drafted + turn.drafted,
            accepted=self.accepted + turn.accepted,
        )


def appended_routes(first: np.ndarray | None, then: np.ndarray | None) -> np.ndarray | None:
    """Routes of a completion whose second part was drawn behind the first. Those of the first part are kept: its
    log-probabilities belong to them, and tokens that are computed again, by other weights or in another batch, may be
    routed in another way."""
    if first is None or then is None:
        return first if then is None else then
    return np.concatenate([first, then[len(first) :]])


class Engine(Protocol):
    """Draws completions with weights of the policy network."""

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """Completions of all requests of the job, in their order.

        Collective for the in-process engine: every rank passes all requests and gets all completions.
        """
        ...

    def update(self, version: int) -> None:
        """Make the engine's weights those of the policy network, and name them by `version`. Collective."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...
