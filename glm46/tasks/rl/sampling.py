"""From prompts to scored samples: completions or episodes, rewards, and groups worth a step."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar, get_args

import torch
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.config.rl import ResolvedRL
from glm46.config.rollout import RolloutConfig
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.conversations import answer_of
from glm46.tasks.rl.environment import Environment, run_episodes
from glm46.tasks.rl.fields import Baseline, differing_groups
from glm46.tasks.rl.prompts import Prompt, prompt_at
from glm46.tasks.rl.rewards.answer import Answer, Scored
from glm46.tasks.rl.rewards.function_pool import FunctionPool, Score
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.records import Completion, EpisodeEnd, Request, SamplingRules, SessionSample
from glm46.tasks.rl.rollout.server_engine import ServerEngine

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Take = Callable[[int, int], list[EpisodeEnd] | None]
"""Gives the episodes of groups from the number of a prompt on, as many groups as asked for; None if a stop was
requested. Collective."""


@dataclass
class Sampler:
    """Generates samples and scores them. Methods that do so are collective, with equal results on all ranks."""

    config: ResolvedRL
    section: RolloutConfig
    tokenizer: Tokenizer
    engine: LocalEngine | ServerEngine
    prompts: Sequence[Prompt]
    """Of the run."""
    rules: SamplingRules
    """Of training rollouts."""
    seed: int
    rewards: FunctionPool
    environment: Environment | None = None
    filter: FunctionPool | None = None
    reward_model: Callable[[Sequence[Sequence[int]]], list[float]] | None = None
    """Rewards of rows of tokens, by a network. Collective."""
    is_stopped: Callable[[], bool] = lambda: False
    """Asked on the first rank while episodes run."""
    say: Callable[[str], None] = print
    """Takes a line for the log, on rank 0."""
    _times: Counter[str] = field(default_factory=Counter)

    @property
    def least_samples(self) -> int:
        """Of a group that is worth a step: one alone has no baseline."""
        return 2 if self.config.group_size > 1 and self.config.advantage in get_args(Baseline) else 1

    @property
    def _thinking(self) -> bool:
        return self.config.prompts is not None and self.config.prompts.thinking

    def tell(self, cause: str, line: str) -> None:
        """Say a line the first, second, fourth, eighth time and so on that a cause occurs in a run."""
        self._times[cause] += 1
        if dist.get_rank() == 0 and self._times[cause].bit_count() == 1:
            self.say(line)

    def close(self) -> None:
        """End the processes and free the engine."""
        with ExitStack() as ends:  # the last one first, and all of them, whatever fails
            for pool in (self.rewards, self.environment, self.filter):
                if pool is not None:
                    ends.callback(pool.close)
            self.engine.close()

    def prompt(self, number: int) -> Prompt:
        """The prompt that is handed out as this number."""
        return self.prompts[prompt_at(number, len(self.prompts), self.seed)]

    def requests(self, prompt: Prompt, number: int, what: str = "sample", count: int | None = None) -> list[Request]:
        """The samples of the prompt with a number, of a group or as many as asked for."""
        found = []
        for index in range(count or self.config.group_size):
            digest = hashlib.blake2b(f"{self.seed} {what} {number} {index}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
            found.append(Request(prompt.tokens, seed, self.section.max_new_tokens))
        return found

    def generate_groups(self, first: int, count: int) -> list[EpisodeEnd] | None:
        """See `Take`: generate with the weights that the engine has."""
        prompts = {number: self.prompt(number) for number in range(first, first + count)}
        return self.generate(prompts, self.rules)

    def generate(
        self, prompts: Mapping[int, Prompt], rules: SamplingRules, what: str = "sample", count: int | None = None
    ) -> list[EpisodeEnd] | None:
        """Episodes of prompts, by their numbers, not yet scored: of each a group, or as many as asked for; None if a
        stop was requested."""
        requests = {number: self.requests(prompt, number, what, count) for number, prompt in prompts.items()}
        asked = [(number, request) for number, of in requests.items() for request in of]
        if self.environment is None:
            completions = self.engine.generate([request for _, request in asked], rules)
            is_cut = self.section.kind == "local" and any(one.finish == "abort" for one in completions)
            pairs = zip(asked, completions, strict=True)
            ends = None if is_cut else [EpisodeEnd([SessionSample(of.prompt, one)]) for (_, of), one in pairs]
        else:
            ends = run_episodes(self.environment, prompts.__getitem__, asked, self.engine, rules, self.is_stopped)
        if ends is None:
            return None
        return [end._replace(group=number) for end, (number, _) in zip(ends, asked, strict=True)]

    def score(self, ends: Sequence[EpisodeEnd], prompts: Mapping[int, Prompt]) -> list[EpisodeEnd]:
        """Episodes with their rewards, or the reason for none; each rank scores its share.

        Args:
            prompts: by their numbers.

        Raises:
            UserError: rewards cannot be loaded.
        """

        def scores(share: list[EpisodeEnd]) -> list[Score]:
            answers = [self._answer(prompts[one.group], one.completion)._replace(score=one.score) for one in share]
            return self.rewards.score(answers)

        aborted = "its server did not finish it (rollout.deadline_seconds)"
        scored = [one._replace(fault=one.fault or (one.completion.finish == "abort") * aborted) for one in ends]
        sound = [number for number, one in enumerate(scored) if not one.fault]
        given = _by_shares(scores, [scored[number] for number in sound])
        if self.config.reward_model is not None and self.reward_model is not None and sound:
            weight, rows = self.config.reward_model.weight, list[list[int]]()
            for (prompt, completion), *_ in (scored[number].samples for number in sound):
                rows.append([*prompt, *completion.tokens[: len(completion.tokens) - (completion.finish == "stop")]])
            given = [of.plus(weight, value) for of, value in zip(given, self.reward_model(rows), strict=True)]
        for number, score in zip(sound, given, strict=True):
            scored[number] = scored[number]._replace(reward=score.total, parts=score.parts, fault=score.fault)
        # The name of a reward and the type of its error: messages may contain values of their samples.
        causes: dict[str, list[str]] = {}
        for fault in (one.fault for one in scored if one.reward is None):
            causes.setdefault(re.sub(r"'.*'|\d+", "", ": ".join(fault.split(": ")[:2])), []).append(fault)
        for cause, found in causes.items():
            self.tell(cause, f"{len(found)} of {len(scored)} samples are dropped without reward, because of {found[0]}")
        return scored

    def worth_a_step(self, ends: Sequence[EpisodeEnd]) -> list[EpisodeEnd]:
        """Scored episodes of the groups that have a baseline, and that dynamic sampling and the filter keep."""
        sizes = Counter(one.group for one in ends)
        kept = [one for one in ends if sizes[one.group] >= self.least_samples]
        if self.config.dynamic_sampling:
            differs = differing_groups(*rewards_and_groups(kept)).tolist()
            kept = [one for one, is_kept in zip(kept, differs, strict=True) if is_kept]
        if (pool := self.filter) is None:
            return kept
        groups: dict[int, list[EpisodeEnd]] = {}
        for one in kept:
            groups.setdefault(one.group, []).append(one)

        def scored(one: EpisodeEnd) -> Scored:
            assert one.reward is not None
            return Scored(self._answer(self.prompt(one.group), one.completion), one.reward)

        def judged(share: list[list[EpisodeEnd]]) -> list[float | str]:
            return pool.values(pool.names[0], [list(map(scored, of)) for of in share])

        found = dict(zip(groups, _by_shares(judged, list(groups.values())), strict=True))
        for fault in [value for value in found.values() if isinstance(value, str)][:1]:
            self.tell("rl.filter", f"rl.filter = {self.config.filter!r}: a group is left out, because of {fault}")
        return [one for one in kept if not isinstance(found[one.group], str) and found[one.group]]

    def _answer(self, prompt: Prompt, completion: Completion) -> Answer:
        return answer_of(prompt, completion, self.tokenizer, self.rules.stop, thinking=self._thinking)


def rewards_and_groups(ends: Sequence[EpisodeEnd]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 [E] and int64 [E]."""
    return torch.tensor([one.reward for one in ends]).double(), torch.tensor([one.group for one in ends])


def _by_shares(work: Callable[[list[_Item]], list[_Result]], items: Sequence[_Item]) -> list[_Result]:
    """The results of all items, of which each rank works on its share. Collective.

    Raises:
        UserError: on all ranks; the work of a rank raised one.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = run_on_all_ranks(lambda: work(list(items[rank::ranks])))
    if ranks == 1:  # a gather of objects would only copy them, by pickle
        return mine
    shares: list[list[_Result]] = [[] for _ in range(ranks)]
    dist.all_gather_object(shares, mine)
    return [shares[number % ranks][number // ranks] for number in range(len(items))]
