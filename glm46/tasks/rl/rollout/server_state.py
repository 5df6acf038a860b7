"""The state of one server of a pool: whether it may generate, with which weights, and comparisons of its
log-probabilities and samples with the policy."""

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
"""Largest and mean difference from the trainer's log-probabilities, by dtype of a server. Rounding was measured at 4e-6
in FP32, and at 0.16 and 0.005 in BF16, mostly from tokens near a tie that choose another expert; a server with half of
its weights was off by 0.6, one with old weights by 3. Rounding the weights of a debug model to FP8 gives 0.4 to 0.7,
0.12 in the mean, and servers may round activations too."""
_LEAST_STEP = 1e-5
"""Change of the trainer's log-probabilities above which equal bits from a server mean that its weights are old."""
_USUAL_MISMATCH = 0.015
_MOST_MISMATCH = 0.15
_DEVIATIONS = 4
"""Standard deviations allowed for the mean of log-probability plus entropy. A wrong sampler gave -3.3 nats."""
_WARMER = 1.05
"""Temperature factor: entropies at temperature times and divided by it give the entropy's derivative."""
MOST_FAILURES = 3
"""Failures in a row after which a server is excluded, or after which a request ends the run."""
NEVER_JOINED = "not asked yet"
CHANGED = -1
"""Version of a policy with changed tensors that checks servers at the start and generates nothing."""


class EngineError(UserError):
    """No server is left. Callers keep what was generated before; weights and optimizer are unchanged."""


class ServedPolicy(NamedTuple):
    """Access to the policy on the training ranks; all callables are collective."""

    export: Callable[[Path], None]
    """Writes the policy as a Hugging Face folder at a new path."""
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Yields whole tensors with their Hugging Face names."""
    score: Callable[[list[list[int]], float], tuple[list[list[float]], list[list[float]]]]
    """Returns, at a temperature, log-probability and entropy of each token of the sequences except the first."""
    routed_score: Callable[[list[list[int]], list[np.ndarray], float], tuple[list[list[float]], float]]
    """Returns the log-probabilities of `score` with given experts, [tokens except the last, MoE layers, top_k] of a
    sequence, and the share of tokens and layers for which the policy would choose others."""
    changed: Callable[[], AbstractContextManager[None]]
    """Context in which one tensor of each kind has changed values."""

    def compare(self, generated: Sequence[tuple[list[int], Completion]], temperature: float) -> tuple[str, bool]:
        """Compare completions of a server with the policy at the temperature of the samples: their log-probabilities,
        and the mean of log-probability plus entropy, which is 0 for samples of the policy; for completions with routes
        also the experts. Equal on all ranks.

        Returns:
            A message for the log, and whether the policy can be trained on samples of this server.
        """
        sequences = [prompt + completion.tokens for prompt, completion in generated]

        def of_drawn(rows: list[list[float]]) -> np.ndarray:
            return np.array(
                [
                    x
                    for row, (_, completion) in zip(rows, generated, strict=True)
                    for x in row[-len(completion.tokens) :]
                ]
            )

        ours, entropies = map(of_drawn, self.score(sequences, temperature))
        theirs = np.array([x for _, completion in generated for x in completion.logprobs])
        gap, mismatch = _mismatch(ours, theirs)
        report = (
            f"{len(ours)} generated tokens differ from the trainer's policy by {gap:.2g} in the mean of the "
            f"log-probability, a KL divergence of {mismatch:.2g}"
        )
        routes = [completion.routes for _, completion in generated if completion.routes is not None]
        if len(routes) == len(generated):
            logprobs, share = self.routed_score(sequences, routes, temperature)
            mean, mismatch = _mismatch(of_drawn(logprobs), theirs)
            others = "" if math.isnan(share) else f", {share:.2%} of which differ from its own,"
            report += f"; with the server's experts{others} by {mean:.2g} and {mismatch:.2g}"
        if not mismatch <= _MOST_MISMATCH:
            return (
                f"{report}; at most {_MOST_MISMATCH:g} can be learned from: it reports log-probabilities of another "
                "distribution than it samples from"
            ), False
        # The derivative of the entropy by the logarithm of the temperature is the variance of the log-probability.
        colder, warmer = (of_drawn(self.score(sequences, t)[1]) for t in (temperature / _WARMER, temperature * _WARMER))
        variance = ((warmer - colder) / (2 * math.log(_WARMER))).clip(0.0).sum()
        surprises = ours + entropies
        # The policy's variance covers rare tokens that were not generated; the squares cover those that were, each many
        # deviations away. The entropy of a server that rounds differently is off by about `gap`.
        deviation = math.sqrt(max(variance, (surprises**2).sum())) / len(ours)
        bias = surprises.mean()
        if not abs(bias) <= _DEVIATIONS * deviation + gap:
            return (
                f"log-probability and entropy of {len(ours)} generated tokens add up to {bias:.2g} in the mean, not to "
                f"0 (standard deviation {deviation:.1g}): it samples from another distribution than the policy's"
            ), False
        return (
            report if mismatch <= _USUAL_MISMATCH else f"warning: {report}; {_USUAL_MISMATCH:g} is usual in BF16",
            True,
        )


class Weights(NamedTuple):
    """One version of the policy, and a probe to recognise it."""

    version: int
    folder: Path | None
    """Folder of the weights; None if they are broadcast."""
    probe: list[list[int]]
    """Token sequences to score."""
    expected: list[list[float]]
    """The trainer's log-probability of each token of the probe except the first of each sequence."""
    is_fp8: bool = False

    @property
    def name(self) -> str:
        """Name for messages."""
        return "one changed tensor of each kind" if self.version == CHANGED else f"version {self.version}"


@dataclass(eq=False)
class ServerState:
    """A server and its state in the pool."""

    server: InferenceServer
    rules: SamplingRules
    """Sampling rules of training rollouts."""
    longest: int
    """Maximum number of tokens of a prompt and its completion."""
    deadline: float
    """Seconds for one completion, and for one update."""
    lost: str | None = NEVER_JOINED
    """Why it generates nothing; None if it generates."""
    is_checked: bool = False
    """True if its samples were compared with the policy since it joined."""
    is_refused: bool = False
    """True if it samples from another distribution. No update changes that, so it is never retried."""
    refused: int | None = None
    """Version that the server failed to load; it is retried with the next one, or if no other server is left."""
    failures: int = 0
    running: set[str] = field(default_factory=set)
    """Names of its running requests."""
    group: WeightGroup | None = None
    """Group in which it waits for a broadcast."""
    scores: list[list[float]] = field(default_factory=list)
    """Its log-probabilities of the probe with the previous version."""
    expected: list[list[float]] = field(default_factory=list)

    def begin(self, weights: Weights) -> str | None:
        """Check the options of the server and, for a broadcast, have it join a group. Return why it cannot join, or
        None if it can.

        Raises:
            UserError: it was started with wrong options, and has never generated.
        """

        def prepare() -> None:
            self.server.alive()
            if self.lost is not None:
                self.server.check(routes=self.rules.routes)
                self._require_context()
            self.refused = weights.version  # until `complete` succeeds
            if weights.folder is None:
                self.group = self.server.join(weights.version, self.deadline)

        return self._fault_of(prepare)

    def complete(self, weights: Weights) -> str | None:
        """Load the weights of a folder, or wait until broadcast weights are loaded, and compare scores of the probe.
        Return why the server cannot generate with them, or None if it can.

        Raises:
            UserError: it was started with wrong options, and has never generated.
            EngineError: it did not load the changed tensors of the check at the start.
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
        self.scores = scores
        self.expected = weights.expected
        if reason is None:
            self.refused = None
        return reason

    def fault_behind(self, failure: BaseException) -> str | None:
        """Return why the server can generate nothing more after a failed request; None if it still can."""
        self.failures += 1
        try:
            self.server.alive()
        except CallError as error:
            return f"{failure}; then {error}"
        return str(failure) if self.failures >= MOST_FAILURES else None

    def leave_group(self) -> None:
        """End the broadcast for this server if it is still open."""
        if self.group is not None:
            self.group.close()
        self.group = None

    def _require_context(self) -> None:
        context = self.server.context
        longest = self.longest
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
        max_gap, mean_gap = _TOLERANCES.get(dtype, _TOLERANCES["bfloat16"])
        gaps = _gaps(scores, weights.expected)
        if not (max(gaps) <= max_gap and sum(gaps) / len(gaps) <= mean_gap):  # NaN too
            return (
                f"after the update to {weights.name} its log-probabilities differ from the trainer's by up "
                f"to {max(gaps):.2g}, {sum(gaps) / len(gaps):.2g} in the mean; {dtype} explains "
                f"{max_gap:g} and {mean_gap:g}"
            )
        moved = max(_gaps(weights.expected, self.expected)) if self.expected else 0.0
        if scores == self.scores and moved > _LEAST_STEP:
            return f"after the update to {weights.name} it computes what it did before: its weights are old"
        return None


def _gaps(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    return [abs(a - b) for our_row, row in zip(ours, theirs, strict=True) for a, b in zip(our_row, row, strict=True)]


def _mismatch(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Return the mean absolute difference of log-probabilities, and the KL divergence."""
    gaps = ours - theirs
    return float(np.abs(gaps).mean()), float((np.exp(np.minimum(gaps, 20.0)) - 1.0 - gaps).mean())
