"""One server of a pool: whether it may generate, the weights that it must have for it, and the comparisons of what it
says and of what it generates with the policy."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError
from glm46.tasks.rl.rollout.inference_server import InferenceServer
from glm46.tasks.rl.rollout.records import Completion, SamplingRules
from glm46.tasks.rl.rollout.weight_group import WeightGroup

_TOLERANCES = {"float32": (1e-3, 1e-4), "bfloat16": (0.5, 0.05), "float16": (0.2, 0.02), "fp8": (2.0, 0.25)}
"""By type of a server: largest and mean difference of log-probabilities from the trainer's. Rounding was measured at
4e-6 in FP32, and at 0.16 and 0.005 in BF16, most of it from tokens near a tie that take another expert; a server with
half of its weights was 0.6 off, one with old ones 3. Rounding the weights of a debug model to FP8 gives 0.4 to 0.7 and
0.12 in the mean, and servers may round activations too."""
_LEAST_STEP = 1e-5
"""A step of the trainer's log-probabilities that no server computes the same bits before and after."""
_USUAL_MISMATCH, _MOST_MISMATCH = 0.015, 0.15
_DEVIATIONS = 4
"""Of the mean of log-probability and entropy. A server with a wrong sampler had -3.3 nats."""
_WARMER = 1.05
"""Factor of the temperature between which and its inverse entropies are compared."""
MOST_FAILURES = 3
"""In a row, of one server; or of one request on all servers."""
NEVER_JOINED = "not asked yet"
CHANGED = -1
"""The version of a policy with changed tensors, which checks servers at the start and generates nothing."""


class EngineError(UserError):
    """No server is left. What was generated before is kept by who has it; weights and optimizer are untouched."""


class ServedPolicy(NamedTuple):
    """The policy as the ranks that train have it; what uses it is collective."""

    export: Callable[[Path], None]
    """Writes it as a Hugging Face folder under a new path."""
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Its whole tensors by their Hugging Face names, one after another."""
    score: Callable[[list[list[int]], float], tuple[list[list[float]], list[list[float]]]]
    """Its log-probability, at a temperature, of each token but the first of sequences, and the entropy at its place."""
    routed_score: Callable[[list[list[int]], list[np.ndarray], float], tuple[list[list[float]], float]]
    """The log-probabilities of `score` with given experts, [tokens but the last, MoE layers, top_k] of a sequence, and
    the share of tokens and layers for which it would choose other ones."""
    changed: Callable[[], AbstractContextManager[None]]
    """While it is open, a tensor of each kind has other values."""

    def compare(self, generated: Sequence[tuple[list[int], Completion]], temperature: float) -> tuple[str, bool]:
        """Compare prompts and what a server has generated with the policy at the temperature of the samples: their
        log-probabilities, and that log-probability and entropy add up to 0 in the mean, as they do for samples of the
        policy. Of completions with routes also the experts. Equal on all ranks.

        Returns:
            What to say of them, and whether samples of this server can be learned from.
        """
        sequences = [prompt + one.tokens for prompt, one in generated]

        def of_drawn(rows: list[list[float]]) -> np.ndarray:
            return np.array([x for row, (_, one) in zip(rows, generated, strict=True) for x in row[-len(one.tokens) :]])

        ours, entropies = map(of_drawn, self.score(sequences, temperature))
        theirs = np.array([x for _, one in generated for x in one.logprobs])
        gap, mismatch = _mismatch(ours, theirs)
        said = (
            f"{len(ours)} generated tokens differ from the trainer's policy by {gap:.2g} in the mean of the "
            f"log-probability, a KL divergence of {mismatch:.2g}"
        )
        routes = [one.routes for _, one in generated if one.routes is not None]
        if len(routes) == len(generated):
            logprobs, share = self.routed_score(sequences, routes, temperature)
            mean, mismatch = _mismatch(of_drawn(logprobs), theirs)
            others = "" if math.isnan(share) else f", {share:.2%} of which differ from its own,"
            said += f"; with the server's experts{others} by {mean:.2g} and {mismatch:.2g}"
        if not mismatch <= _MOST_MISMATCH:
            return (
                f"{said}; at most {_MOST_MISMATCH:g} can be learned from: it reports log-probabilities of another "
                "distribution than it samples from"
            ), False
        # The derivative of the entropy by the logarithm of the temperature is the variance of the log-probability.
        colder, warmer = (of_drawn(self.score(sequences, t)[1]) for t in (temperature / _WARMER, temperature * _WARMER))
        variance = ((warmer - colder) / (2 * math.log(_WARMER))).clip(0.0).sum()
        surprises = ours + entropies
        # The variance of the policy covers rare tokens that were not generated; the squares cover those that were, each
        # of which is many deviations away. The entropy of a server that rounds in another way differs by about `gap`.
        deviation = math.sqrt(max(variance, (surprises**2).sum())) / len(ours)
        bias = surprises.mean()
        if not abs(bias) <= _DEVIATIONS * deviation + gap:
            return (
                f"log-probability and entropy of {len(ours)} generated tokens add up to {bias:.2g} in the mean, not to "
                f"0 (standard deviation {deviation:.1g}): it samples from another distribution than the policy's"
            ), False
        return said if mismatch <= _USUAL_MISMATCH else f"warning: {said}; {_USUAL_MISMATCH:g} is usual in BF16", True


class Weights(NamedTuple):
    """One version of the policy, and how to recognise it."""

    version: int
    folder: Path | None
    """None: they are broadcast."""
    probe: list[list[int]]
    """Sequences of tokens."""
    expected: list[list[float]]
    """The trainer's log-probability of each of their tokens but the first."""
    is_fp8: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return "one changed tensor of each kind" if self.version == CHANGED else f"version {self.version}"


@dataclass(eq=False)
class ServerState:
    """A server and what the pool knows of it."""

    server: InferenceServer
    rules: SamplingRules
    """Of training rollouts."""
    longest: int
    """Tokens of a prompt and its completion."""
    deadline: float
    """Seconds for one completion, and for one update."""
    lost: str | None = NEVER_JOINED
    """Why it generates nothing."""
    is_checked: bool = False
    """True if what it generates was compared with the policy since it joined."""
    is_refused: bool = False
    """It samples from another distribution; no update changes that, so it is not asked again."""
    refused: int | None = None
    """The version that it could not take; with the next one it is asked again, or when no other server is left."""
    failures: int = 0
    running: set[str] = field(default_factory=set)
    """Names of its requests."""
    group: WeightGroup | None = None
    """In which it waits for a broadcast."""
    scores: list[list[float]] = field(default_factory=list)
    """Of the probe, by the version before."""
    expected: list[list[float]] = field(default_factory=list)

    def begin(self, weights: Weights) -> str | None:
        """Compare the server with what is needed and, for a broadcast, have it join a group; returns why it cannot,
        None if it can.

        Raises:
            UserError: it was started in another way than needed, and has never generated.
        """

        def prepare() -> None:
            self.server.alive()
            if self.lost is not None:
                self.server.check(routes=self.rules.routes)
                self._require_context()
            self.refused = weights.version  # until it has passed
            if weights.folder is None:
                self.group = self.server.join(weights.version, self.deadline)

        return self._fault_of(prepare)

    def complete(self, weights: Weights) -> str | None:
        """Load the weights of a folder, or wait until those of the broadcast are loaded, and compare; returns why the
        server cannot generate with them, None if it can.

        Raises:
            UserError: it was started in another way than needed, and has never generated.
            EngineError: it did not take the changes of the check at the start.
        """
        scores: list[list[float]] = []

        def load() -> None:
            if weights.folder is None:
                assert self.group is not None, "it has joined the broadcast"
                self.server.receive(self.group, weights.version, self.deadline)
            else:
                self.server.load(weights.folder, weights.version, self.deadline)
            scores.extend(self.server.score(tokens, self.deadline) for tokens in weights.probe)
            if self.lost is not None and weights.version != CHANGED:
                self.server.check_stop(list(self.rules.stop))

        if (fault := self._fault_of(load)) is not None:
            return fault
        reason = self._wrong_scores(weights, scores)
        if reason is not None and weights.version == CHANGED:
            raise EngineError(
                f"rollout.urls: {self.server.url} does not have the weights that it said to have loaded: {reason}; "
                "start it with the release and the options of docs/rollout_servers.md"
            )
        self.scores, self.expected = scores, weights.expected
        if reason is None:
            self.refused = None
        return reason

    def fault_behind(self, failure: BaseException) -> str | None:
        """The reason why the server can generate nothing more, now that a request has failed; None if it can."""
        self.failures += 1
        try:
            self.server.alive()
        except CallError as error:
            return f"{failure}; then {error}"
        return str(failure) if self.failures >= MOST_FAILURES else None

    def leave_group(self) -> None:
        """End the broadcast for this server, if that has not ended."""
        if self.group is not None:
            self.group.close()
        self.group = None

    def _require_context(self) -> None:
        context, longest = self.server.context, self.longest
        if context is not None and longest > context:
            raise UserError(
                f"rollout.urls: {self.server.url} has a context of {context} tokens, but a prompt with "
                f"rollout.max_new_tokens has up to {longest}; start it with --max-model-len {longest}, or lower "
                "rollout.max_new_tokens or the longest prompt"
            )

    def _fault_of(self, work: Callable[[], None]) -> str | None:
        try:
            work()
        except CallError as error:
            return str(error)
        except (UserError, LookupError, TypeError, AttributeError, ValueError) as error:
            if self.lost == NEVER_JOINED:  # at the start, before work is done
                raise
            return str(error) if isinstance(error, UserError) else f"a reply has an unknown form: {error!r}"
        return None

    def _wrong_scores(self, weights: Weights, scores: list[list[float]]) -> str | None:
        dtype = "fp8" if weights.is_fp8 else self.server.dtype
        most, mean = _TOLERANCES.get(dtype, _TOLERANCES["bfloat16"])
        gaps = _gaps(scores, weights.expected)
        if not (max(gaps) <= most and sum(gaps) / len(gaps) <= mean):  # NaN too
            return (
                f"after the update to {weights.name} its log-probabilities differ from the trainer's by up "
                f"to {max(gaps):.2g}, {sum(gaps) / len(gaps):.2g} in the mean; {dtype} explains "
                f"{most:g} and {mean:g}"
            )
        moved = max(_gaps(weights.expected, self.expected)) if self.expected else 0.0
        if scores == self.scores and moved > _LEAST_STEP:
            return f"after the update to {weights.name} it computes what it did before: its weights are old"
        return None


def _gaps(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    return [abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]


def _mismatch(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Mean absolute difference of log-probabilities, and the KL divergence."""
    gaps = ours - theirs
    return float(np.abs(gaps).mean()), float((np.exp(np.minimum(gaps, 20.0)) - 1.0 - gaps).mean())
