"""Draws rollouts: completions of groups from a source, rewards on all ranks, groups that are worth a step."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from glm46.compute.distributed.collective_errors import on_first_rank
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.tasks.rl.advantages import differing_groups
from glm46.tasks.rl.asking import Asking
from glm46.tasks.rl.fields import informative
from glm46.tasks.rl.prompts import Prompt, prompt_at
from glm46.tasks.rl.rewards.scorer import Score
from glm46.tasks.rl.rollout.records import Completion, Request
from glm46.tasks.rl.rollouts import DrawnSample, Rollout, to_arrays

MOST_ROUNDS = 8
"""Of taking prompts in place of groups that are left out."""
_MOST_DROPPED = 0.5
"""A larger share of samples whose rewards failed is a fault of the rewards."""


class Drawn(NamedTuple):
    """Completions of groups of samples."""

    numbers: list[int]
    """Number of the prompt of each sample, counted over the run; those of a group are neighbours."""
    completions: list[Completion]
    faults: Mapping[int, str]
    """By index, why the environment failed."""


class GroupSource(Protocol):
    """The source of the groups of rollouts."""

    next_prompt: int
    """Number of the first prompt that is not handed out."""

    def take(self, count: int) -> Drawn | None:
        """Take this many groups; None if a stop was requested. Collective; equal on all ranks."""
        ...


class InOrder:
    """A `GroupSource` that draws the next prompts when it is asked."""

    def __init__(self, asking: Asking, prompts: Sequence[Prompt], first_prompt: int):
        self._asking, self._prompts, self.next_prompt = asking, prompts, first_prompt

    def take(self, count: int) -> Drawn | None:
        """See `GroupSource.take`."""
        numbers = range(self.next_prompt, self.next_prompt + count)
        requests = [one for number in numbers for one in requests_of(self._asking, self._prompts, number)]
        each = [number for number in numbers for _ in range(self._asking.config.group_size)]
        asked = [self._prompts[prompt_at(n, len(self._prompts), self._asking.seed)] for n in each]
        thinking = self._asking.config.prompts.thinking
        drawn = self._asking.converse(asked, requests, self._asking.rules, thinking=thinking)
        if drawn is None:
            return None
        self.next_prompt = numbers.stop
        return Drawn(each, *drawn)


def requests_of(asking: Asking, prompts: Sequence[Prompt], number: int) -> list[Request]:
    """The samples of the prompt with a number."""
    tokens = prompts[prompt_at(number, len(prompts), asking.seed)].tokens
    return [
        Request(tokens, asking.seed_of("sample", number, index), asking.section.max_new_tokens)
        for index in range(asking.config.group_size)
    ]


def draw_rollout(
    asking: Asking, prompts: Sequence[Prompt], source: GroupSource, step: int, first_prompt: int
) -> Rollout | None:
    """Draw a rollout; None if a stop was requested. Collective.

    Groups that dynamic sampling or a filter leaves out are replaced by groups of the next prompts, in at most
    `MOST_ROUNDS` rounds. A sample whose rewards failed is left out of its group.

    Raises:
        UserError: too many rewards failed.
    """
    config = asking.config
    samples: list[DrawnSample] = []
    tally: Counter[str] = Counter()
    figures: list[tuple[float, int, bool]] = []
    parts: list[dict[str, float]] = []
    for _ in range(MOST_ROUNDS if config.replaces_groups else 1):
        kept = len({sample.group for sample in samples})
        if kept == config.prompts_per_rollout:
            break
        began = time.perf_counter()
        drawn = source.take(config.prompts_per_rollout - kept)
        if drawn is None:
            return None
        asked = [prompts[prompt_at(number, len(prompts), asking.seed)] for number in drawn.numbers]
        ended = time.perf_counter()
        scores = asking.score_drawn(asked, drawn.completions, drawn.faults, thinking=config.prompts.thinking)
        tally["rollout_seconds"] += ended - began
        tally["reward_seconds"] += time.perf_counter() - ended
        new = _kept(drawn.numbers, asked, drawn.completions, scores)
        _require_rewards(scores, len(new))
        figures += [(s.reward, len(s.completion.tokens), s.completion.finish == "length") for s in new]
        parts += [dict(s.parts) for s in new]
        rewards, of = torch.tensor([s.reward for s in new]).double(), torch.tensor([s.group for s in new])
        groups = {s.group for s in new}
        tally["groups"] += len(groups)
        tally["equal"] += len(groups.difference(of[differing_groups(rewards, of)].tolist()))
        tally["dropped"] += len(scores) - len(new)
        tally["drafted"] += sum(one.drafted for one in drawn.completions)
        tally["accepted"] += sum(one.accepted for one in drawn.completions)
        some = [s for s, is_kept in zip(new, informative(rewards, of, config).tolist(), strict=True) if is_kept]
        wanted = asking.wanted_groups(some, asked, drawn.numbers)
        samples += [one for one in some if one.group in wanted]
    if (kept := len({sample.group for sample in samples})) < config.prompts_per_rollout and config.replaces_groups:
        asking.tell(
            "dynamic_sampling",
            f"rl.dynamic_sampling, rl.filter: after {counted(MOST_ROUNDS, 'round')} only {kept} of "
            f"{config.prompts_per_rollout} groups are worth a step; the rollout of step {step} goes on with "
            f"{counted(len(samples), 'sample')}",
        )
    names = tuple(reward.name for reward in config.rewards)
    arrays, columns = to_arrays(samples, names), _columns(figures, parts, names, tally)
    ages = step - arrays["versions"]
    columns |= {"staleness": float(ages.mean()), "staleness_max": int(ages.max())} if len(ages) else {}
    return Rollout(step, first_prompt, source.next_prompt, names, False, arrays, columns)


def demonstrate(
    asking: Asking, prompts: Sequence[Prompt], answer: Sequence[list[int]], step: int, first_prompt: int
) -> Rollout:
    """A rollout whose completions are the labels of the next prompts, one of each. Collective.

    Args:
        answer: token ids of each prompt's label with a stop token.

    Raises:
        UserError: too many rewards failed.
    """
    config = asking.config
    numbers = range(first_prompt, first_prompt + config.samples_per_rollout)
    indices = [prompt_at(number, len(prompts), asking.seed) for number in numbers]
    completions = [Completion(answer[i], [0.0] * len(answer[i]), "stop", [], None) for i in indices]
    asked = [prompts[i] for i in indices]
    scores = asking.score(asked, completions, thinking=config.prompts.thinking)
    new = _kept(list(numbers), asked, completions, scores)
    _require_rewards(scores, len(new))
    names = tuple(reward.name for reward in config.rewards)
    return Rollout(step, first_prompt, numbers.stop, names, True, to_arrays(new, names))


def _kept(
    groups: Sequence[int], prompts: Sequence[Prompt], completions: Sequence[Completion], scores: Sequence[Score]
) -> list[DrawnSample]:
    rows = zip(groups, prompts, completions, scores, strict=True)
    return [
        DrawnSample(prompt.tokens, group, completion, score.total, score.parts)
        for group, prompt, completion, score in rows
        if score.total is not None
    ]


def _require_rewards(scores: Sequence[Score], kept: int) -> None:
    if kept >= (1 - _MOST_DROPPED) * len(scores):
        return
    fault = next(score.fault for score in scores if score.fault)
    raise UserError(
        *on_first_rank(
            f"rl.rewards: {len(scores) - kept} of {len(scores)} samples have no reward, the first one because of "
            f"{fault}; correct the reward or its label, or raise its timeout_seconds"
        )
    )


def _columns(
    figures: Sequence[tuple[float, int, bool]],
    parts: Sequence[dict[str, float]],
    names: Sequence[str],
    tally: Counter[str],
) -> dict[str, float]:
    rewards, lengths, truncated = map(np.array, zip(*figures, strict=True))
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **{f"reward_part/{name}": float(np.mean([part[name] for part in parts])) for name in names},
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": int(lengths.max()),
        "truncated_ratio": float(truncated.mean()),
        "equal_groups_ratio": tally["equal"] / tally["groups"],
        "dropped_samples": tally["dropped"],
        "drawn_samples": len(figures) + tally["dropped"],
        "rollout_seconds": tally["rollout_seconds"],
        "reward_seconds": tally["reward_seconds"],
        **({"draft_acceptance_ratio": tally["accepted"] / tally["drafted"]} if tally["drafted"] else {}),
    }
