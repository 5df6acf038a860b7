"""From prompts to scored samples: completions, conversations with an environment, rewards, and groups worth a step."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, get_args

import torch.distributed as dist

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.config.rl import ResolvedRL
from glm46.config.rollout import RolloutConfig as RolloutSection
from glm46.storage.chats.chat import opened_thought
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.conversations import Conversations, asked_role, turn_behind
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.fields import Baseline, differing_groups
from glm46.tasks.rl.prompts import Prompt, prompt_at
from glm46.tasks.rl.rewards.answer import Answer, Scored
from glm46.tasks.rl.rewards.function_pool import FunctionPool
from glm46.tasks.rl.rollout.records import Completion, Engine, EpisodeEnd, Request, SamplingRules, SessionSample
from glm46.tasks.rl.samples import Sample, rewards_and_groups

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")
_CALLS_OF_A_RANK, _MOST_CALLS = 4, 64
"""Of the function of [rl.environment] at once, in the background on the first rank."""


@dataclass
class Sampler:
    """Generates samples and scores them. Methods that do so are collective, with equal results on all ranks."""

    config: ResolvedRL
    section: RolloutSection
    tokenizer: Tokenizer
    engine: Engine
    prompts: Sequence[Prompt]
    """Of the run."""
    rules: SamplingRules
    """Of training rollouts."""
    seed: int
    rewards: FunctionPool
    environment: FunctionPool | None = None
    filter: FunctionPool | None = None
    reward_model: Callable[[Sequence[Sequence[int]]], list[float]] | None = None
    """Rewards of rows of tokens, by a network. Collective."""
    episodes: CommandEpisodes | None = None
    """Of kind = "command"."""
    say: Callable[[str], None] = print
    """Takes a line for the log, on rank 0."""
    _times: Counter[str] = field(default_factory=Counter)

    @property
    def least_samples(self) -> int:
        """Of a group that is worth a step: one alone has no baseline."""
        return 2 if self.config.group_size > 1 and self.config.advantage in get_args(Baseline) else 1

    def tell(self, cause: str, line: str) -> None:
        """Say a line the first, second, fourth, eighth time and so on that a cause occurs in a run."""
        self._times[cause] += 1
        if dist.get_rank() == 0 and self._times[cause].bit_count() == 1:
            self.say(line)

    def close(self) -> None:
        """End the processes and free the engine."""
        self.engine.close()
        for pool in (self.rewards, self.environment, self.filter, self.episodes):
            if pool is not None:
                pool.close()

    def prompt(self, number: int) -> Prompt:
        """The prompt that is handed out as this number."""
        return self.prompts[prompt_at(number, len(self.prompts), self.seed)]

    def seed_of(self, what: str, prompt: int, index: int) -> int:
        """The seed of the sample with this index of a prompt."""
        digest = hashlib.blake2b(f"{self.seed} {what} {prompt} {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def requests(self, prompt: Prompt, number: int, what: str = "sample", count: int | None = None) -> list[Request]:
        """The samples of the prompt with a number, of a group or as many as asked for."""
        seeds = [self.seed_of(what, number, index) for index in range(count or self.config.group_size)]
        return [Request(prompt.tokens, seed, self.section.max_new_tokens) for seed in seeds]

    def generate_groups(self, first: int, count: int) -> list[Sample] | None:
        """See `Take`: generate with the weights that the engine has."""
        asked = [(number, self.prompt(number)) for number in range(first, first + count)]
        requests = [one for number, prompt in asked for one in self.requests(prompt, number)]
        return self.generate([one for one in asked for _ in range(self.config.group_size)], requests, self.rules)

    def generate(
        self, asked: Sequence[tuple[int, Prompt]], requests: Sequence[Request], rules: SamplingRules
    ) -> list[Sample] | None:
        """The samples of requests, of prompts and their numbers, not yet scored; None if a stop was requested."""
        prompts = [prompt for _, prompt in asked]
        if self.episodes is not None:
            ends = self.episodes.run(list(zip(prompts, requests, strict=True)), rules)
        else:
            ends = self._converse(prompts, requests, rules)
        if ends is None:
            return None
        return [Sample(prompt, number, end) for (number, prompt), end in zip(asked, ends, strict=True)]

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their rewards, or the reason for none; each rank scores its share.

        Raises:
            UserError: rewards cannot be loaded.
        """

        def scores(share: list[Sample]) -> list:
            answers = [self._answer(one.prompt, one.completion)._replace(score=one.end.score) for one in share]
            return self.rewards.score(answers)

        scored, given = [], _by_shares(scores, samples)
        if self.reward_model is not None:
            lengths = [len(one.completion.tokens) - (one.completion.finish == "stop") for one in samples]
            rows = [[*one.last.prompt, *one.completion.tokens[:n]] for one, n in zip(samples, lengths, strict=True)]
            weight = self.config.reward_model.weight
            given = [of.plus(weight, value) for of, value in zip(given, self.reward_model(rows), strict=True)]
        for one, score in zip(samples, given, strict=True):
            is_aborted = one.completion.finish == "abort"
            fault = one.fault or is_aborted * "its server did not finish it (rollout.deadline_seconds)"
            end, reward = one.end._replace(fault=fault or score.fault), None if fault else score.total
            scored.append(one._replace(end=end, reward=reward, parts={} if fault else score.parts))
        # The name of a reward and the type of its error: messages may contain values of their samples.
        causes: dict[str, list[str]] = {}
        for fault in (one.fault for one in scored if one.reward is None):
            causes.setdefault(re.sub(r"'.*'|\d+", "", ": ".join(fault.split(": ")[:2])), []).append(fault)
        for cause, found in causes.items():
            self.tell(cause, f"{len(found)} of {len(scored)} samples are dropped without reward, because of {found[0]}")
        return scored

    def worth_a_step(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of the groups that have a baseline, and that dynamic sampling and the filter keep."""
        sizes = Counter(one.group for one in samples)
        samples = [one for one in samples if sizes[one.group] >= self.least_samples]
        if self.config.dynamic_sampling:
            differs = differing_groups(*rewards_and_groups(samples)).tolist()
            samples = [one for one, is_kept in zip(samples, differs, strict=True) if is_kept]
        if self.filter is None:
            return list(samples)
        groups: dict[int, list[Sample]] = {}
        for one in samples:
            groups.setdefault(one.group, []).append(one)

        def judged(share: list[list[Sample]]) -> list[float | str]:
            tables = [[Scored(self._answer(one.prompt, one.completion), one.reward) for one in of] for of in share]
            return self.filter.values(self.config.filter, tables)

        found = dict(zip(groups, _by_shares(judged, list(groups.values())), strict=True))
        for fault in [value for value in found.values() if isinstance(value, str)][:1]:
            self.tell("rl.filter", f"rl.filter = {self.config.filter!r}: a group is left out, because of {fault}")
        return [one for one in samples if not isinstance(found[one.group], str) and found[one.group]]

    def _converse(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], rules: SamplingRules
    ) -> list[EpisodeEnd] | None:
        """Completions of requests, with the replies of the environment and the turns after them, or why it failed; None
        if a stop was requested."""
        completions, faults = list(self.engine.generate(requests, rules)), {}
        numbers: Sequence[int] = range(len(requests))
        for _ in range(0 if self.environment is None else self.config.environment.max_turns - 1):
            open_ = [(n, role) for n in numbers if (role := asked_role(completions[n], self.tokenizer)) is not None]
            replies = _by_shares(
                lambda share: self.environment.replies([self._answer(prompts[n], completions[n]) for n in share]),
                [n for n, _ in open_],
            )
            turns: dict[int, tuple[list[int], Request]] = {}
            for (number, role), reply in zip(open_, replies, strict=True):
                if isinstance(reply, str):
                    faults[number] = f"rl.environment: {reply}"
                elif reply.text is not None:
                    done, thinking = completions[number], self.config.prompts.thinking
                    turn = turn_behind(
                        requests[number], done, Message(role, reply.text), self.tokenizer, thinking=thinking
                    )
                    if turn is not None:
                        turns[number] = turn
                    else:
                        completions[number] = done._replace(finish="length")
            if not turns:
                break
            generated = self.engine.generate([request for _, request in turns.values()], rules)
            for (number, (tokens, _)), turn in zip(turns.items(), generated, strict=True):
                completions[number] = completions[number].extended(tokens, turn)
            numbers = list(turns)
        if self.section.kind == "local" and any(one.finish == "abort" for one in completions):
            return None
        return [
            EpisodeEnd([SessionSample(request.prompt, completion)], faults.get(number, ""))
            for number, (request, completion) in enumerate(zip(requests, completions, strict=True))
        ]

    def conversations(self) -> Conversations:
        """The conversations with the function of [rl.environment], for servers to go on with in the background."""
        calls = ThreadPoolExecutor(min(_CALLS_OF_A_RANK * dist.get_world_size(), _MOST_CALLS), "environment")
        thinking, turns = self.config.prompts.thinking, self.config.environment.max_turns
        return Conversations(self.environment, self.tokenizer, thinking, turns, self.prompt, self._answer, calls)

    def _answer(self, prompt: Prompt, completion: Completion) -> Answer:
        is_finished, thinking = completion.finish == "stop", self.config.prompts.thinking
        decode, tokens, history, start = self.tokenizer.decode, completion.tokens, [], 0
        # A thought that the prompt opens belongs to the turn: rewards read the same text in each chat format.
        opened = opened_thought(self.tokenizer, thinking)
        for first, end in completion.replies:
            last = first - (tokens[first - 1] in self.rules.stop)  # a turn may be cut
            history += [opened + decode(tokens[start:last]), decode(tokens[first:end]).removesuffix(opened)]
            start = end
        text = opened + decode(tokens[start : len(tokens) - is_finished])
        return Answer(prompt.text, text, prompt.label, thinking, len(tokens), is_finished, tuple(history))


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
