"""Validation of a policy: answers to sets of prompts, their rewards and pass@k."""

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from glm46.config.rl_data import PromptSetConfig
from glm46.tasks.rl.asking import Asking
from glm46.tasks.rl.prompts import Prompt

_SHOWN, _LONGEST_SHOWN = 3, 400


class PromptSet(NamedTuple):
    """The prompts of a table of [[rl.validation]]."""

    table: PromptSetConfig
    prompts: list[Prompt]


def pass_at(k: int, samples: int, passed: int) -> float:
    """Unbiased estimate of the probability that one of k samples passes, from ``passed`` of ``samples``
    (arXiv 2107.03374)."""
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def validate_sets(asking: Asking, sets: Sequence[PromptSet]) -> dict[str, float]:
    """Columns of each set: the mean reward, and pass@k for the powers of two up to its samples: an answer passes if the
    first of [[rl.rewards]] gives it at least 1. Answers without reward pass nothing. Collective.

    The draws depend on the prompt only, so that two validations differ by the weights.
    """
    columns: dict[str, float] = {}
    for one_set in sets:
        table, prompts = one_set.table, one_set.prompts
        asked = [(number, prompt, i) for number, prompt in enumerate(prompts) for i in range(table.samples)]
        judged = asking.judge(
            [prompt for _, prompt, _ in asked],
            [asking.seed_of(f"validation {table.name}", number, i) for number, _, i in asked],
            asking.rules._replace(temperature=table.temperature, routes=False),
            thinking=asking.config.prompts.thinking,
        )
        if judged is None:
            continue
        first = asking.config.rewards[0].name
        passed = np.array([score.parts.get(first, 0.0) >= 1.0 for score in judged.scores]).reshape(-1, table.samples)
        rewards = [score.total for score in judged.scores if score.total is not None]
        columns[f"validation_reward/{table.name}"] = float(np.mean(rewards)) if rewards else 0.0
        columns[f"validation_tokens/{table.name}"] = float(np.mean([len(one.tokens) for one in judged.completions]))
        k = 1
        while k <= table.samples:
            estimates = [pass_at(k, table.samples, int(of_prompt)) for of_prompt in passed.sum(1)]
            columns[f"validation_pass/{table.name}@{k}"] = float(np.mean(estimates))
            k *= 2
    return columns


def answered_lines(asking: Asking, prompts: Sequence[Prompt], step: int) -> list[str]:
    """Lines with the answers to the first prompts. Collective."""
    shown = list(prompts[:_SHOWN])
    seeds = [asking.seed_of("shown", number, 0) for number in range(len(shown))]
    judged = asking.judge(shown, seeds, asking.rules._replace(routes=False), thinking=asking.config.prompts.thinking)
    if judged is None:
        return []
    lines = [f"Answers after step {step}:"]
    for prompt, completion, score in zip(shown, judged.completions, judged.scores, strict=True):
        text = asking.tokenizer.decode(completion.tokens).strip()
        reward = f"reward {score.total:g}" if score.total is not None else f"no reward: {score.fault}"
        lines += ["", f"user: {prompt.text[:_LONGEST_SHOWN]}", f"assistant: {text[:_LONGEST_SHOWN]}│ {reward}"]
    return [*lines, ""]
