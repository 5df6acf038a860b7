"""Validation of a policy: answers to sets of prompts, their rewards and pass@k."""

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from glm46.config.rl_data import PromptSetConfig
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rollout.records import Request, SamplingRules
from glm46.tasks.rl.samples import Sample
from glm46.tasks.rl.sampling import Sampler

_SHOWN, _LONGEST_SHOWN = 3, 400


class PromptSet(NamedTuple):
    """The prompts of a table of [[rl.validation]]."""

    table: PromptSetConfig
    prompts: list[Prompt]


def pass_at(k: int, samples: int, passed: int) -> float:
    """Unbiased estimate of the probability that one of k samples passes, from ``passed`` of ``samples``
    (arXiv 2107.03374)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def validate_sets(sampler: Sampler, sets: Sequence[PromptSet]) -> dict[str, float]:
    """Columns of each set: the mean reward, and pass@k for the powers of two up to its samples: an answer passes if the
    first of [[rl.rewards]] gives it at least 1. Answers without reward pass nothing. Collective.

    Seeds depend on the prompt only, so that two validations differ by the weights.
    """
    columns: dict[str, float] = {}
    for one_set in sets:
        table = one_set.table
        rules = sampler.rules._replace(temperature=table.temperature, routes=False)
        scored = _answered(sampler, f"validation {table.name}", one_set.prompts, table.samples, rules)
        if scored is None:
            continue
        first = sampler.config.rewards[0].name
        passed = np.array([one.parts.get(first, 0.0) >= 1.0 for one in scored]).reshape(-1, table.samples)
        rewards = [one.reward for one in scored if one.reward is not None]
        columns[f"validation_reward/{table.name}"] = float(np.mean(rewards)) if rewards else 0.0
        columns[f"validation_tokens/{table.name}"] = float(np.mean([len(one.completion.tokens) for one in scored]))
        k = 1
        while k <= table.samples:
            estimates = [pass_at(k, table.samples, int(of_prompt)) for of_prompt in passed.sum(1)]
            columns[f"validation_pass/{table.name}@{k}"] = float(np.mean(estimates))
            k *= 2
    return columns


def answered_lines(sampler: Sampler, prompts: Sequence[Prompt], step: int) -> list[str]:
    """Lines with the answers to the first prompts. Collective."""
    scored = _answered(sampler, "shown", prompts[:_SHOWN], 1, sampler.rules._replace(routes=False))
    if scored is None:
        return []
    lines = [f"Answers after step {step}:"]
    for one in scored:
        text = sampler.tokenizer.decode(one.completion.tokens).strip()
        reward = f"reward {one.reward:g}" if one.reward is not None else f"no reward: {one.fault}"
        shown = f"assistant: {text[:_LONGEST_SHOWN]}│ {reward}"
        lines += ["", f"user: {one.prompt.text[:_LONGEST_SHOWN]}", shown]
    return [*lines, ""]


def _answered(
    sampler: Sampler, what: str, prompts: Sequence[Prompt], samples: int, rules: SamplingRules
) -> list[Sample] | None:
    """Scored samples of each prompt; None if a stop was requested. Collective."""
    asked = [(number, prompt) for number, prompt in enumerate(prompts) for _ in range(samples)]
    longest = sampler.section.max_new_tokens
    requests = [
        Request(prompt.tokens, sampler.seed_of(what, number, index % samples), longest)
        for index, (number, prompt) in enumerate(asked)
    ]
    found = sampler.generate(asked, requests, rules)
    return None if found is None else sampler.score(found)
