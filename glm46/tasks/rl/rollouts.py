"""Rollouts from prompts, and validations: samples with their rewards, and the columns of metrics that they give."""

import time
from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from glm46.compute.distributed.collective_errors import on_first_rank
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.rl_data import PromptSetConfig
from glm46.tasks.rl.fields import differing_groups
from glm46.tasks.rl.prompts import Prompt, answers_of_labels
from glm46.tasks.rl.rollout.records import Completion, EpisodeEnd, SamplingRules, SessionSample
from glm46.tasks.rl.samples import Samples, to_samples
from glm46.tasks.rl.sampling import Sampler, Take, rewards_and_groups

MOST_ROUNDS = 8
"""Of taking prompts in place of groups that are left out."""
_MOST_DROPPED = 0.5
"""A larger share of samples whose rewards failed is a fault of the rewards."""
_SHOWN, _LONGEST_SHOWN = 3, 400


def generate_rollout(sampler: Sampler, take: Take, step: int, first_prompt: int) -> Samples | None:
    """Generate and score a rollout; None if a stop was requested. Collective.

    Groups that dynamic sampling or a filter leaves out are replaced by groups of the next prompts, in at most
    `MOST_ROUNDS` rounds. A sample whose rewards failed is left out of its group.

    Raises:
        UserError: too many rewards failed.
    """
    config, next_prompt = sampler.config, first_prompt
    scored, kept = list[EpisodeEnd](), list[EpisodeEnd]()
    seconds = {"rollout_seconds": 0.0, "reward_seconds": 0.0}
    for _ in range(MOST_ROUNDS if config.replaces_groups else 1):
        missing = config.prompts_per_rollout - len({one.group for one in kept})
        if not missing:
            break
        began = time.perf_counter()
        taken = take(next_prompt, missing)
        if taken is None:
            return None
        ended = time.perf_counter()
        new = sampler.score(taken, {one.group: sampler.prompt(one.group) for one in taken})
        seconds["rollout_seconds"] += ended - began
        seconds["reward_seconds"] += time.perf_counter() - ended
        next_prompt += missing
        scored += new
        kept += sampler.worth_a_step(_rewarded(new))
    if (count := len({one.group for one in kept})) < config.prompts_per_rollout and config.replaces_groups:
        sampler.tell(
            "dynamic_sampling",
            f"rl.dynamic_sampling, rl.filter: after {counted(MOST_ROUNDS, 'round')} only {count} of "
            f"{config.prompts_per_rollout} groups are worth a step; the rollout of step {step} goes on with "
            f"{counted(len(kept), 'sample')}",
        )
    names = [reward.name for reward in config.rewards]
    samples = to_samples(kept, names, step=step, first_prompt=first_prompt, next_prompt=next_prompt)
    samples.figures = _columns(scored, names, sampler.least_samples) | seconds
    if len(ages := step - samples.versions):
        samples.figures |= {"staleness": float(ages.mean()), "staleness_max": int(ages.max())}
    return samples


def demonstrate(sampler: Sampler, step: int, first_prompt: int) -> Samples:
    """A rollout whose completions are the labels of the next prompts, one of each. Collective.

    Raises:
        UserError: too many rewards failed.
    """
    numbers = range(first_prompt, first_prompt + sampler.config.samples_per_rollout)
    prompts = {number: sampler.prompt(number) for number in numbers}
    ends = []
    answers = answers_of_labels(list(prompts.values()), sampler.tokenizer)
    for (number, prompt), tokens in zip(prompts.items(), answers, strict=True):
        completion = Completion(tokens, [0.0] * len(tokens), "stop", [], None)
        ends.append(EpisodeEnd([SessionSample(prompt.tokens, completion)], group=number))
    return to_samples(
        _rewarded(sampler.score(ends, prompts)), [reward.name for reward in sampler.config.rewards], step=step,
        first_prompt=first_prompt, next_prompt=numbers.stop, is_demonstration=True,
    )  # fmt: skip


def _rewarded(scored: Sequence[EpisodeEnd]) -> list[EpisodeEnd]:
    """The episodes that have a reward, if enough do."""
    rewarded = [one for one in scored if one.reward is not None]
    if len(rewarded) >= (1 - _MOST_DROPPED) * len(scored):
        return rewarded
    fault = next(one.fault for one in scored if one.fault)
    key, remedy = "rl.rewards", "correct the reward or its label, or raise its timeout_seconds"
    if fault.startswith("rl.environment"):
        key, remedy = "rl.environment", "mend its program or function, or give it more time or room"
    lost = f"{len(scored) - len(rewarded)} of {len(scored)} samples have no reward"
    raise UserError(*on_first_rank(f"{key}: {lost}, the first one because of {fault}; {remedy}"))


def _columns(scored: Sequence[EpisodeEnd], names: Sequence[str], least: int) -> dict[str, float]:
    """Columns of metrics of all episodes that were scored, in groups that need a number of them."""
    kept = [one for one in scored if one.reward is not None]
    rewards, groups = rewards_and_groups(kept)
    sizes = Counter(one.group for one in kept)
    lengths = np.array([len(one.completion.tokens) for one in kept])
    compared = sum(size > 1 for size in sizes.values())  # a sample alone equals none
    differing = set(groups[differing_groups(rewards, groups)].tolist())
    drafted, accepted = (sum(getattr(one.completion, key) for one in scored) for key in ("drafted", "accepted"))
    return {
        "reward": rewards.mean().item(), "reward_std": rewards.std(correction=0).item(),
        **{f"reward_part/{name}": float(np.mean([one.parts[name] for one in kept])) for name in names},
        "completion_tokens": float(lengths.mean()), "completion_tokens_max": int(lengths.max()),
        "truncated_ratio": float(np.mean([one.completion.finish == "length" for one in kept])),
        **({"equal_groups_ratio": 1.0 - len(differing) / compared} if compared else {}),
        "dropped_samples": len(scored) - len(kept), "generated_samples": len(scored),
        "dropped_groups": sum(sizes[group] < least for group in {one.group for one in scored}),
        **({"draft_acceptance_ratio": accepted / drafted} if drafted else {}),
    }  # fmt: skip


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
    """Lines with the answers to the first prompts. Raises UserError in front of the first step if none has a reward.
    Collective."""
    scored = _answered(sampler, "shown", prompts[:_SHOWN], 1, sampler.rules._replace(routes=False))
    if scored is None:
        return []
    if step == 0 and all(one.reward is None for one in scored):
        _rewarded(scored)  # the first rollout would end so, later
    lines = [f"Answers after step {step}:"]
    for one in scored:
        text = sampler.tokenizer.decode(one.completion.tokens).strip()
        reward = f"reward {one.reward:g}" if one.reward is not None else f"no reward: {one.fault}"
        shown = f"assistant: {text[:_LONGEST_SHOWN]}│ {reward}"
        lines += ["", f"user: {prompts[one.group].text[:_LONGEST_SHOWN]}", shown]
    return [*lines, ""]


def _answered(
    sampler: Sampler, what: str, prompts: Sequence[Prompt], samples: int, rules: SamplingRules
) -> list[EpisodeEnd] | None:
    """Scored answers to each prompt; None if a stop was requested. Collective."""
    numbered = dict(enumerate(prompts))
    found = sampler.generate(numbered, rules, what, samples)
    return None if found is None else sampler.score(found, numbered)
