"""Draws rollouts: completions of groups from a source, rewards on all ranks, groups that are worth a step."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

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
        pairs = zip(prompts, seeds, strict=True)
        requests = [Request(prompt.tokens, seed, self.section.max_new_tokens) for prompt, seed in pairs]
        drawn = self.converse(prompts, requests, rules, thinking=thinking)
        if drawn is None:
            return None
        return Judged(drawn[0], self.score_drawn(prompts, *drawn, thinking=thinking))

    def score_drawn(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], faults: Mapping[int, str], *, thinking: bool
    ) -> list[Score]:
        """Scores of completions, none where the environment failed. Collective."""
        scores = self.score(prompts, completions, thinking=thinking)
        return [Score(None, {}, faults[n]) if n in faults else score for n, score in enumerate(scores)]

    def converse(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], rules: SamplingRules, *, thinking: bool
    ) -> tuple[list[Completion], dict[int, str]] | None:
        """Completions of requests and why environments failed; None if a stop was requested. Collective."""
        completions, faults = self._converse(prompts, requests, rules, thinking=thinking)
        is_stopped = self.section.kind == "local" and any(one.finish == "abort" for one in completions)
        return None if is_stopped else (completions, faults)

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


class Drawn(NamedTuple):
    """Completions of groups of samples."""

    numbers: list[int]
    """Number of the prompt of each sample, counted over the run; those of a group are neighbours."""
    completions: list[Completion]
    faults: Mapping[int, str]
    """By index, why the environment failed."""


class Source(Protocol):
    """What draws the groups of rollouts."""

    next_prompt: int
    """Number of the first prompt that is not handed out."""

    def take(self, count: int) -> Drawn | None:
        """So many groups; None if a stop was requested. Collective; equal on all ranks."""
        ...


class InOrder:
    """A `Source` that draws the next prompts when it is asked."""

    def __init__(self, asking: Asking, prompts: Sequence[Prompt], first_prompt: int):
        self._asking, self._prompts, self.next_prompt = asking, prompts, first_prompt

    def take(self, count: int) -> Drawn | None:
        """See `Source.take`."""
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
    asking: Asking, prompts: Sequence[Prompt], source: Source, step: int, first_prompt: int
) -> Rollout | None:
    """Draw a rollout; None if a stop was requested. Collective.

    With dynamic sampling, groups whose rewards are all equal are replaced by groups of the next prompts, in at most
    ``max_rounds`` rounds. A sample whose rewards failed is left out of its group.

    Raises:
        UserError: too many rewards failed.
    """
    config = asking.config
    samples: list[DrawnSample] = []
    tally: Counter[str] = Counter()
    figures: list[tuple[float, int, bool]] = []
    parts: list[dict[str, float]] = []
    for _ in range(config.max_rounds if config.dynamic_sampling else 1):
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
        tally["groups"] += len(of.unique())
        tally["equal"] += len(of.unique()) - len(of[differing_groups(rewards, of)].unique())
        tally["dropped"] += len(scores) - len(new)
        samples += [s for s, is_kept in zip(new, informative(rewards, of, config).tolist(), strict=True) if is_kept]
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
    }
