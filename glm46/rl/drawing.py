"""Draws rollouts: prompts in their order, completions by an engine, rewards on all ranks, groups worth a step."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.config.rl import RL
from glm46.config.rollout import Rollout as RolloutSection
from glm46.data.chat import chat_reply
from glm46.data.tokenizer import Tokenizer
from glm46.distributed.collective_errors import on_first_rank, run_on_all_ranks
from glm46.rewards.answer import Answer
from glm46.rewards.environment import Environment
from glm46.rewards.scorer import Score, Scorer
from glm46.rl.advantages import differing_groups
from glm46.rl.fields import informative
from glm46.rl.prompts import Prompt, prompt_at
from glm46.rl.rollouts import DrawnSample, Rollout, to_arrays
from glm46.rollout.records import Completion, Engine, Request, SamplingRules

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")
_MOST_DROPPED = 0.5
"""A larger share of samples whose rewards failed is a fault of the rewards."""


class Judged(NamedTuple):
    """Completions of prompts with their scores."""

    completions: list[Completion]
    scores: list[Score]
    rollout_seconds: float
    reward_seconds: float


@dataclass
class Asking:
    """What asks an engine and judges its answers."""

    config: RL
    """Resolved."""
    section: RolloutSection
    tokenizer: Tokenizer
    engine: Engine
    scorer: Scorer
    rules: SamplingRules
    """Of training rollouts."""
    seed: int
    environment: Environment | None = None

    def close(self) -> None:
        """End the processes and free the engine."""
        self.scorer.close()
        if self.environment is not None:
            self.environment.close()
        self.engine.close()

    def seed_of(self, what: str, prompt: int, index: int) -> int:
        """The seed of the sample with this index of a prompt."""
        digest = hashlib.blake2b(f"{self.seed} {what} {prompt} {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def judge(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], rules: SamplingRules, *, thinking: bool
    ) -> Judged | None:
        """Answer prompts, one sample for each seed, and judge the answers; None if a stop was requested. Collective;
        the results are equal on all ranks."""
        began = time.perf_counter()
        requests = [
            Request(prompt.tokens, seed, self.section.max_new_tokens)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        completions, faults = self._converse(prompts, requests, rules, thinking=thinking)
        if self.section.kind == "local" and any(completion.finish == "abort" for completion in completions):
            return None
        drawn = time.perf_counter()
        scores = self.score(prompts, completions, thinking=thinking)
        scores = [Score(None, {}, faults[n]) if n in faults else score for n, score in enumerate(scores)]
        return Judged(completions, scores, drawn - began, time.perf_counter() - drawn)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion], *, thinking: bool) -> list[Score]:
        """Scores of completions; each rank judges its share. Collective.

        Raises:
            UserError: rewards cannot be loaded.
        """
        scores = _by_shares(
            lambda share: self.scorer.score([self._answer(*pair, thinking) for pair in share]),
            list(zip(prompts, completions, strict=True)),
        )
        aborted = Score(None, {}, "its server did not finish it (rollout.deadline_seconds)")
        return [aborted if c.finish == "abort" else s for s, c in zip(scores, completions, strict=True)]

    def _converse(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], rules: SamplingRules, *, thinking: bool
    ) -> tuple[list[Completion], dict[int, str]]:
        """Completions of requests, with the replies of the environment and the turns behind them; and by the number of
        a request why the environment failed. Collective; equal on all ranks."""
        completions, faults = list(self.engine.generate(requests, rules)), {}
        numbers: Sequence[int] = range(len(requests))
        for _ in range(0 if self.environment is None else self.environment.max_turns - 1):
            open_ = [(n, role) for n in numbers if (role := self._asked_role(completions[n])) is not None]
            replies = _by_shares(
                lambda share: self.environment.replies(
                    [self._answer(prompts[n], completions[n], thinking) for n in share]
                ),
                [n for n, _ in open_],
            )
            turns: dict[int, tuple[list[int], Request]] = {}
            for (number, role), reply in zip(open_, replies, strict=True):
                if isinstance(reply, str):
                    faults[number] = f"rl.environment: {reply}"
                elif reply.text is not None:
                    tokens = chat_reply(self.tokenizer, reply.text, from_tool=role == "tool", thinking=thinking)
                    of, done = requests[number], completions[number]
                    left = of.max_new_tokens - len(done.tokens) - len(tokens)
                    if left > 0:
                        turns[number] = tokens, Request([*of.prompt, *done.tokens, *tokens], of.seed, left)
                    else:
                        completions[number] = done._replace(finish="length")
            if not turns:
                break
            drawn = self.engine.generate([request for _, request in turns.values()], rules)
            for (number, (tokens, _)), turn in zip(turns.items(), drawn, strict=True):
                completions[number] = completions[number].extended(tokens, turn)
            numbers = list(turns)
        return completions, faults

    def _asked_role(self, completion: Completion) -> Literal["tool", "user"] | None:
        """Who is asked to reply to the last turn."""
        if completion.finish != "stop":
            return None
        markers = self.tokenizer.special
        return {markers["<|observation|>"]: "tool", markers["<|user|>"]: "user"}.get(completion.tokens[-1])

    def _answer(self, prompt: Prompt, completion: Completion, thinking: bool) -> Answer:
        is_finished = completion.finish == "stop"
        decode, tokens, history, start = self.tokenizer.decode, completion.tokens, [], 0
        for first, end in completion.replies:
            history += [decode(tokens[start : first - 1]), decode(tokens[first:end])]
            start = end
        text = decode(tokens[start : len(tokens) - is_finished])
        return Answer(prompt.text, text, prompt.label, thinking, len(tokens), is_finished, tuple(history))


def _by_shares(work: Callable[[list[_Item]], list[_Result]], items: Sequence[_Item]) -> list[_Result]:
    """The results of all items, of which each rank works on its share. Collective.

    Raises:
        UserError: on all ranks; the work of a rank raised one.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = run_on_all_ranks(lambda: work(list(items[rank::ranks])))
    shares: list[list[_Result]] = [[] for _ in range(ranks)]
    dist.all_gather_object(shares, mine)
    return [shares[number % ranks][number // ranks] for number in range(len(items))]


def draw_rollout(asking: Asking, prompts: Sequence[Prompt], step: int, first_prompt: int) -> Rollout | None:
    """Draw a rollout from the engine's weights; None if a stop was requested. Collective.

    With dynamic sampling, groups whose rewards are all equal are replaced by groups of the next prompts, in at most
    ``max_rounds`` rounds. A sample whose rewards failed is left out of its group.

    Raises:
        UserError: too many rewards failed.
    """
    config, counter = asking.config, first_prompt
    samples: list[DrawnSample] = []
    tally: Counter[str] = Counter()
    figures: list[tuple[float, int, bool]] = []
    parts: list[dict[str, float]] = []
    for _ in range(config.max_rounds if config.dynamic_sampling else 1):
        kept = len({sample.group for sample in samples})
        numbers = range(counter, counter + config.prompts_per_rollout - kept)
        if not numbers:
            break
        counter = numbers.stop
        groups = [number for number in numbers for _ in range(config.group_size)]
        asked = [prompts[prompt_at(number, len(prompts), asking.seed)] for number in groups]
        seeds = [asking.seed_of("sample", number, i) for number in numbers for i in range(config.group_size)]
        judged = asking.judge(asked, seeds, asking.rules, thinking=config.prompts.thinking)
        if judged is None:
            return None
        tally["rollout_seconds"] += judged.rollout_seconds
        tally["reward_seconds"] += judged.reward_seconds
        new = _kept(groups, asked, judged)
        _require_rewards(judged.scores, len(new))
        figures += [(s.reward, len(s.completion.tokens), s.completion.finish == "length") for s in new]
        parts += [dict(s.parts) for s in new]
        rewards, of = torch.tensor([s.reward for s in new]).double(), torch.tensor([s.group for s in new])
        tally["groups"] += len(of.unique())
        tally["equal"] += len(of.unique()) - len(of[differing_groups(rewards, of)].unique())
        tally["dropped"] += len(judged.scores) - len(new)
        samples += [s for s, is_kept in zip(new, informative(rewards, of, config).tolist(), strict=True) if is_kept]
    names = tuple(reward.name for reward in config.rewards)
    return Rollout(
        step, first_prompt, counter, names, False, to_arrays(samples, names), _columns(figures, parts, names, tally)
    )


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
    new = _kept(list(numbers), asked, Judged(completions, scores, 0.0, 0.0))
    _require_rewards(scores, len(new))
    names = tuple(reward.name for reward in config.rewards)
    return Rollout(step, first_prompt, numbers.stop, names, True, to_arrays(new, names))


def _kept(groups: Sequence[int], prompts: Sequence[Prompt], judged: Judged) -> list[DrawnSample]:
    rows = zip(groups, prompts, judged.completions, judged.scores, strict=True)
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
    }
