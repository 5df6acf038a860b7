"""The policy as the ranks that train have it, and the comparison of the first completions of servers with it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from glm46.distributed.collective_errors import on_first_rank
from glm46.rollout.records import Completion
from glm46.rollout.server_state import EngineError

_CHECKED, _LONGEST = 8, 256
"""Completions, and tokens of each."""
_USUAL_MISMATCH, _MOST_MISMATCH = 0.015, 0.15
_DEVIATIONS, _MOST_BIAS, _FEWEST_DRAWN = 4, 0.5, 32
"""Of the mean of log-probability and entropy: a server with a wrong sampler had -3.3 nats. Few tokens of which all are
the likely one have a mean of up to 0.3 without a spread."""


class ServedPolicy(NamedTuple):
    """The policy as the ranks that train have it; what uses it is collective."""

    export: Callable[[Path], None]
    """Writes it as a Hugging Face folder under a new path."""
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Its whole tensors by their Hugging Face names, one after another."""
    score: Callable[[list[list[int]]], tuple[list[list[float]], list[list[float]]]]
    """Its log-probability, at temperature 1, of each token but the first of sequences, and the entropy at its place."""
    routed_score: Callable[[list[list[int]], list[np.ndarray]], tuple[list[list[float]], float]]
    """The log-probabilities of `score` with given experts, [tokens but the last, MoE layers, top_k] of a sequence, and
    the share of tokens and layers for which it would choose other ones."""
    changed: Callable[[], AbstractContextManager[None]]
    """While it is open, a tensor of each kind has other values."""


def check_first_completions(policy: ServedPolicy, drawn: Sequence[tuple[list[int], Completion]]) -> str:
    """Compare prompts and what servers have drawn with the policy, at temperature 1: their log-probabilities, and that
    log-probability and entropy add up to 0 in the mean, as they do for draws from the policy. Of completions with
    routes also the experts. Collective.

    Returns:
        What to say of them.

    Raises:
        EngineError: nothing can be learned from them.
    """
    drawn = drawn[:_CHECKED]
    tokens = [one.tokens[:_LONGEST] for _, one in drawn]
    sequences = [prompt + some for (prompt, _), some in zip(drawn, tokens, strict=True)]
    logprobs, entropies = policy.score(sequences)
    ours, expected = ([x for row, some in zip(rows, tokens, strict=True) for x in row[-len(some) :]]
                      for rows in (logprobs, entropies))  # fmt: skip
    theirs = [x for _, one in drawn for x in one.logprobs[:_LONGEST]]
    mean, mismatch = _mismatch(ours, theirs)
    said = (
        f"the first {len(ours)} drawn tokens differ from the trainer's policy by {mean:.2g} in the mean of the "
        f"log-probability, a KL divergence of {mismatch:.2g}"
    )
    if all(one.routes is not None for _, one in drawn):
        routes = [one.routes[: len(row) - 1] for (_, one), row in zip(drawn, sequences, strict=True)]
        logprobs, share = policy.routed_score(sequences, routes)
        routed = [x for row, some in zip(logprobs, tokens, strict=True) for x in row[-len(some) :]]
        mean, mismatch = _mismatch(routed, theirs)
        others = "" if math.isnan(share) else f", {share:.2%} of which differ from its own,"
        said += f"; with the servers' experts{others} by {mean:.2g} and {mismatch:.2g}"
    surprises = [one + entropy for one, entropy in zip(ours, expected, strict=True)]
    bias = sum(surprises) / len(surprises)
    spread = math.sqrt(sum((surprise - bias) ** 2 for surprise in surprises)) / len(surprises)
    if not mismatch <= _MOST_MISMATCH:
        _refuse(
            f"{said}; at most {_MOST_MISMATCH:g} can be learned from: the servers report log-probabilities of "
            "another distribution than they draw from"
        )
    if len(ours) >= _FEWEST_DRAWN and not abs(bias) <= max(_DEVIATIONS * spread, _MOST_BIAS):
        _refuse(
            f"log-probability and entropy of the first {len(ours)} drawn tokens add up to {bias:.2g} in the mean, "
            f"not to 0 (standard deviation {spread:.1g}): the servers draw from another distribution than the "
            "policy's"
        )
    is_usual = mismatch <= _USUAL_MISMATCH
    return f"rollout: {said}" if is_usual else f"rollout: warning: {said}; {_USUAL_MISMATCH:g} is usual in BF16"


def _mismatch(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean absolute difference of log-probabilities, and the KL divergence."""
    gaps = [own - reported for own, reported in zip(ours, theirs, strict=True)]
    kl = sum(math.exp(min(gap, 20.0)) - 1.0 - gap for gap in gaps) / len(gaps)
    return sum(map(abs, gaps)) / len(gaps), kl


def _refuse(fault: str) -> None:
    raise EngineError(
        *on_first_rank(
            f"rollout.urls: {fault}; start them with the options of docs/rollout_servers.md, and in the type of "
            "training.mixed_precision_param"
        )
    )
