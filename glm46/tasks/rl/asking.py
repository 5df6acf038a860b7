"""Requests to an engine and scores of its answers: completions, and conversations with an environment."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import torch.distributed as dist

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.config.rl import ResolvedRL
from glm46.config.rollout import RolloutConfig as RolloutSection
from glm46.storage.data.chat import chat_reply
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import Answer, Scored
from glm46.tasks.rl.rewards.environment import Environment
from glm46.tasks.rl.rewards.scorer import Score, Scorer
from glm46.tasks.rl.rollout.records import Completion, Engine, Request, SamplingRules
from glm46.tasks.rl.rollouts import DrawnSample

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")


class Judged(NamedTuple):
    """Completions of prompts with their scores."""

    completions: list[Completion]
    scores: list[Score]


@dataclass
class Asking:
    """Asks an engine and scores its answers."""

    config: ResolvedRL
    """Resolved."""
    section: RolloutSection
    tokenizer: Tokenizer
    engine: Engine
    scorer: Scorer
    rules: SamplingRules
    """Of training rollouts."""
    seed: int
    environment: Environment | None = None
    filter: Scorer | None = None
    """Of `RLConfig.filter`."""
    say: Callable[[str], None] = print
    """Takes a line for the log, on rank 0."""
    _times: Counter[str] = field(default_factory=Counter)

    def tell(self, cause: str, line: str) -> None:
        """Say a line the first, second, fourth, eighth time and so on that a cause occurs in a run."""
        self._times[cause] += 1
        if dist.get_rank() == 0 and self._times[cause].bit_count() == 1:
            self.say(line)

    def close(self) -> None:
        """End the processes and free the engine."""
        self.scorer.close()
        for one in (self.environment, self.filter):
            if one is not None:
                one.close()
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
        scores = [Score(None, {}, faults[n]) if n in faults else score for n, score in enumerate(scores)]
        # The name of a reward and the type of its error: messages may contain values of their samples.
        causes: dict[str, list[str]] = {}
        for fault in (score.fault for score in scores if score.total is None):
            causes.setdefault(re.sub(r"'.*'|\d+", "", ": ".join(fault.split(": ")[:2])), []).append(fault)
        for cause, found in causes.items():
            self.tell(cause, f"{len(found)} of {len(scores)} samples are dropped without reward, because of {found[0]}")
        return scores

    def wanted_groups(
        self, samples: Sequence[DrawnSample], prompts: Sequence[Prompt], numbers: Sequence[int]
    ) -> set[int]:
        """Numbers of the groups of samples that the filter keeps; all without one. Collective.

        Args:
            prompts: of these numbers.
        """
        prompt_of, groups = dict(zip(numbers, prompts, strict=True)), {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        if self.filter is None:
            return set(groups)

        def judged(share: list[list[DrawnSample]]) -> list[float | str]:
            thinking = self.config.prompts.thinking
            tables = [
                [Scored(self._answer(prompt_of[one.group], one.completion, thinking), one.reward) for one in group]
                for group in share
            ]
            return self.filter.values(self.config.filter, tables)

        found = _by_shares(judged, list(groups.values()))
        for fault in [value for value in found if isinstance(value, str)][:1]:
            self.tell("rl.filter", f"rl.filter = {self.config.filter!r}: a group is left out, because of {fault}")
        return {group for group, value in zip(groups, found, strict=True) if not isinstance(value, str) and value}

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
        """The role that is asked to reply to the last turn."""
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
    if ranks == 1:  # a gather of objects would only copy them, by pickle
        return mine
    shares: list[list[_Result]] = [[] for _ in range(ranks)]
    dist.all_gather_object(shares, mine)
    return [shares[number % ranks][number // ranks] for number in range(len(items))]
