"""The policy that servers generate with: access to its weights, and comparisons of what a server computes and samples
with it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.records import Completion

_TOLERANCES = {"float32": (1e-3, 1e-4), "bfloat16": (0.5, 0.05), "float16": (0.2, 0.02), "fp8": (2.0, 0.25)}
"""Largest and mean difference from the trainer's log-probabilities, by dtype of a server. Rounding was measured at 4e-6
in FP32, and at 0.16 and 0.005 in BF16, mostly from tokens near a tie that choose another expert; a server with half of
its weights was off by 0.6, one with old weights by 3. Rounding the weights of a debug model to FP8 gives 0.4 to 0.7,
0.12 in the mean, and servers may round activations too."""
_MIN_STEP = 1e-5
"""Change of the trainer's log-probabilities above which equal bits from a server mean that its weights are old."""
_USUAL_MISMATCH = 0.015
_MAX_MISMATCH = 0.15
_DEVIATIONS = 4
"""Standard deviations allowed for the mean of log-probability plus entropy. A wrong sampler gave -3.3 nats."""
_WARMER = 1.05
"""Temperature factor: entropies at temperature times and divided by it give the entropy's derivative."""
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
        if not mismatch <= _MAX_MISMATCH:
            return (
                f"{report}; at most {_MAX_MISMATCH:g} can be learned from: it reports log-probabilities of another "
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

    def difference(self, scores: list[list[float]], dtype: str) -> str | None:
        """Return how the scores of the probe by a server differ from the expected ones, or None if rounding explains
        it.

        Args:
            dtype: compute dtype of the server.
        """
        dtype = "fp8" if self.is_fp8 else dtype
        max_gap, mean_gap = _TOLERANCES.get(dtype, _TOLERANCES["bfloat16"])
        gaps = _gaps(scores, self.expected)
        if max(gaps) <= max_gap and sum(gaps) / len(gaps) <= mean_gap:  # false for NaN
            return None
        return (
            f"after the update to {self.name} its log-probabilities differ from the trainer's by up to "
            f"{max(gaps):.2g}, {sum(gaps) / len(gaps):.2g} in the mean; {dtype} explains {max_gap:g} and {mean_gap:g}"
        )

    def has_moved_from(self, expected: list[list[float]]) -> bool:
        """Return True if the trainer's scores differ so much from the previous ones that a server's must differ too."""
        return bool(expected) and max(_gaps(self.expected, expected)) > _MIN_STEP


def _gaps(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    return [abs(a - b) for our_row, row in zip(ours, theirs, strict=True) for a, b in zip(our_row, row, strict=True)]


def _mismatch(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Return the mean absolute difference of log-probabilities, and the KL divergence."""
    gaps = ours - theirs
    return float(np.abs(gaps).mean()), float((np.exp(np.minimum(gaps, 20.0)) - 1.0 - gaps).mean())
