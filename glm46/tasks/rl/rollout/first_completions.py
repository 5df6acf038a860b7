"""The policy as the ranks that train have it, and the comparison of the first completions of servers with it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from glm46.tasks.rl.rollout.records import Completion

_USUAL_MISMATCH, _MOST_MISMATCH = 0.015, 0.15
_DEVIATIONS = 4
"""Of the mean of log-probability and entropy. A server with a wrong sampler had -3.3 nats."""
_WARMER = 1.05
"""Factor of the temperature between which and its inverse entropies are compared."""


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


def compare_samples(
    policy: ServedPolicy, generated: Sequence[tuple[list[int], Completion]], temperature: float
) -> tuple[str, bool]:
    """Compare prompts and what a server has generated with the policy at the temperature of the samples: their
    log-probabilities, and that log-probability and entropy add up to 0 in the mean, as they do for samples of the
    policy. Of completions with routes also the experts. Collective; equal on all ranks.

    Returns:
        What to say of them, and whether samples of this server can be learned from.
    """
    sequences = [prompt + one.tokens for prompt, one in generated]

    def of_drawn(rows: list[list[float]]) -> np.ndarray:
        return np.array([x for row, (_, one) in zip(rows, generated, strict=True) for x in row[-len(one.tokens) :]])

    ours, entropies = map(of_drawn, policy.score(sequences, temperature))
    theirs = np.array([x for _, one in generated for x in one.logprobs])
    gap, mismatch = _mismatch(ours, theirs)
    said = (
        f"{len(ours)} generated tokens differ from the trainer's policy by {gap:.2g} in the mean of the "
        f"log-probability, a KL divergence of {mismatch:.2g}"
    )
    routes = [one.routes for _, one in generated if one.routes is not None]
    if len(routes) == len(generated):
        logprobs, share = policy.routed_score(sequences, routes, temperature)
        mean, mismatch = _mismatch(of_drawn(logprobs), theirs)
        others = "" if math.isnan(share) else f", {share:.2%} of which differ from its own,"
        said += f"; with the server's experts{others} by {mean:.2g} and {mismatch:.2g}"
    if not mismatch <= _MOST_MISMATCH:
        return (
            f"{said}; at most {_MOST_MISMATCH:g} can be learned from: it reports log-probabilities of another "
            "distribution than it samples from"
        ), False
    # The derivative of the entropy by the logarithm of the temperature is the variance of the log-probability.
    colder, warmer = (of_drawn(policy.score(sequences, t)[1]) for t in (temperature / _WARMER, temperature * _WARMER))
    variance = ((warmer - colder) / (2 * math.log(_WARMER))).clip(0.0).sum()
    surprises = ours + entropies
    # The variance of the policy covers rare tokens that were not generated; the squares cover those that were, each of
    # which is many deviations away. The entropy of a server that rounds in another way differs by about `gap`.
    deviation = math.sqrt(max(variance, (surprises**2).sum())) / len(ours)
    bias = surprises.mean()
    if not abs(bias) <= _DEVIATIONS * deviation + gap:
        return (
            f"log-probability and entropy of {len(ours)} generated tokens add up to {bias:.2g} in the mean, not to 0 "
            f"(standard deviation {deviation:.1g}): it samples from another distribution than the policy's"
        ), False
    return said if mismatch <= _USUAL_MISMATCH else f"warning: {said}; {_USUAL_MISMATCH:g} is usual in BF16", True


def _mismatch(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Mean absolute difference of log-probabilities, and the KL divergence."""
    gaps = ours - theirs
    return float(np.abs(gaps).mean()), float((np.exp(np.minimum(gaps, 20.0)) - 1.0 - gaps).mean())
