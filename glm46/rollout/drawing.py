"""Requests and sampling rules as [rollout] states them."""

from collections.abc import Sequence

from glm46.config.rollout import Rollout
from glm46.rollout.records import Request, SamplingRules


def requests_of(config: Rollout, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Request]:
    """One request for each prompt, with its seed."""
    pairs = zip(prompts, seeds, strict=True)
    return [Request(prompt, seed, config.max_new_tokens) for prompt, seed in pairs]


def rules_of(config: Rollout, *, stop: frozenset[int], vocab_size: int, routes: bool = False) -> SamplingRules:
    """The rules of all requests; see `SamplingRules`."""
    return SamplingRules(config.temperature, stop, vocab_size, routes)
