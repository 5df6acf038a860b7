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
from glm46.files.standard_output import LineWriter, print_line
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.conversations import answer_of
from glm46.tasks.rl.environment import Environment, run_episodes
from glm46.tasks.rl.fields import Baseline, differing_groups
from glm46.tasks.rl.prompts import Prompt, prompt_at
from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.function_pool import FunctionPool, Score
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.records import Completion, Episode, Request, SamplingRules
from glm46.tasks.rl.rollout.server_engine import ServerEngine

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Take = Callable[[int, int], list[Episode] | None]
"""Takes the number of the first prompt and a count of groups, and returns their episodes; None if a stop was requested.
Collective."""


@dataclass
class Sampler:
    """Generates samples and scores them. Methods that do are collective and return equal results on all ranks."""

    config: ResolvedRL
    section: RolloutConfig
    tokenizer: Tokenizer
    engine: LocalEngine | ServerEngine
    prompts: Sequence[Prompt]
    """Training prompts of the run."""
    rules: SamplingRules
    """Sampling rules of training rollouts."""
    seed: int
    rewards: FunctionPool
    environment: Environment | None = None
    reward_model: Callable[[Sequence[Sequence[int]]], list[float]] | None = None
    """Computes rewards of rows of tokens with a network. Collective."""
    is_stopped: Callable[[], bool] = lambda: False
    """Polled on the first rank while episodes run."""
    say: LineWriter = print_line
    """Writes a line to the log, on rank 0."""
    _times: Counter[str] = field(default_factory=Counter)

    @property
    def least_samples(self) -> int:
        """Smallest group that gives a gradient: with a group baseline, one sample alone has none."""
        return 2 if self.config.group_size > 1 and self.config.advantage in get_args(Baseline) else 1

    @property
    def _thinking(self) -> bool:
        return self.config.prompts is not None and self.config.prompts.thinking

    def tell(self, cause: str, line: str) -> None:
        """Log a line the first, second, fourth, eighth time and so on that its cause occurs in a run."""
        self._times[cause] += 1
        if dist.get_rank() == 0 and self._times[cause].bit_count() == 1:
            self.say(line)

    def close(self) -> None:
        """End the processes and free the engine."""
        with ExitStack() as ends:  # closes all of them, in reverse order, even if one fails
            for pool in (self.rewards, self.environment):
                if pool is not None:
                    ends.callback(pool.close)
            self.engine.close()

    def prompt(self, number: int) -> Prompt:
        """Return the prompt with this number in the order of the run."""
        return self.prompts[prompt_at(number, len(self.prompts), self.seed)]

    def requests(self, prompt: Prompt, number: int, what: str = "sample", count: int | None = None) -> list[Request]:
        """Return the requests for the samples of a prompt: ``count``, by default a group.

        Seeds depend on the run's seed, ``what``, the number of the prompt and the index of the sample.
        """
        requests = []
        for index in range(count or self.config.group_size):
            digest = hashlib.blake2b(f"{self.seed} {what} {number} {index}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
            requests.append(Request(prompt.tokens, seed, self.section.max_new_tokens))
        return requests

    def generate_groups(self, first: int, count: int) -> list[Episode] | None:
        """Generate groups with the engine's current weights; see `Take`."""
        prompts = {number: self.prompt(number) for number in range(first, first + count)}
        return self.generate(prompts, self.rules)

    def generate(
        self, prompts: Mapping[int, Prompt], rules: SamplingRules, what: str = "sample", count: int | None = None
    ) -> list[Episode] | None:
        """Generate episodes, not yet scored; None if a stop was requested.

        Args:
            prompts: prompts by their numbers.
            count: samples of each prompt; by default a group.
        """
        requests = {number: self.requests(prompt, number, what, count) for number, prompt in prompts.items()}
        numbered = [(number, request) for number, group in requests.items() for request in group]
        if self.environment is None:
            completions = self.engine.generate([request for _, request in numbered], rules)
            is_aborted = self.section.kind == "local" and any(
                completion.finish == "abort" for completion in completions
            )
            pairs = zip(numbered, completions, strict=True)
            ends = (
                None
                if is_aborted
                else [Episode([completion._replace(prompt=request.prompt)]) for (_, request), completion in pairs]
            )
        else:
            ends = run_episodes(self.environment, prompts.__getitem__, numbered, self.engine, rules, self.is_stopped)
        if ends is None:
            return None
        return [end._replace(group=number) for end, (number, _) in zip(ends, numbered, strict=True)]

    def score(self, ends: Sequence[Episode], prompts: Mapping[int, Prompt]) -> list[Episode]:
        """Return episodes with their rewards, or with the fault that left them without. Each rank scores its share.

        Args:
            prompts: prompts by their numbers.

        Raises:
            UserError: if rewards cannot be loaded.
        """

        def scores(share: list[Episode]) -> list[Score]:
            answers = [
                self._answer(prompts[episode.group], episode.completion)._replace(score=episode.score)
                for episode in share
            ]
            return self.rewards.score(answers)

        aborted = "its server did not finish it (rollout.deadline_seconds)"
        scored = [
            episode._replace(fault=episode.fault or (episode.completion.finish == "abort") * aborted)
            for episode in ends
        ]
        valid = [number for number, episode in enumerate(scored) if not episode.fault]
        results = _by_shares(scores, [scored[number] for number in valid])
        if self.config.reward_model is not None and self.reward_model is not None and valid:
            weight = self.config.reward_model.weight
            rows = list[list[int]]()
            for sample in (scored[number].completion for number in valid):
                rows.append([*sample.prompt, *sample.tokens[: len(sample.tokens) - (sample.finish == "stop")]])
            results = [score.plus(weight, value) for score, value in zip(results, self.reward_model(rows), strict=True)]
        for number, score in zip(valid, results, strict=True):
            scored[number] = scored[number]._replace(reward=score.total, parts=score.parts, fault=score.fault)
        # Count faults by reward and error type only, because messages may contain values of single samples.
        causes: dict[str, list[str]] = {}
        for fault in (episode.fault for episode in scored if episode.reward is None):
            causes.setdefault(re.sub(r"'.*'|\d+", "", ": ".join(fault.split(": ")[:2])), []).append(fault)
        for cause, faults in causes.items():
            self.tell(
                cause, f"{len(faults)} of {len(scored)} samples are dropped without reward, because of {faults[0]}"
            )
        return scored

    def worth_a_step(self, ends: Sequence[Episode]) -> list[Episode]:
        """Return the scored episodes of groups that have a baseline and that dynamic sampling keeps."""
        sizes = Counter(episode.group for episode in ends)
        kept = [episode for episode in ends if sizes[episode.group] >= self.least_samples]
        if self.config.dynamic_sampling:
            differs = differing_groups(*rewards_and_groups(kept)).tolist()
            kept = [episode for episode, is_kept in zip(kept, differs, strict=True) if is_kept]
        return kept

    def _answer(self, prompt: Prompt, completion: Completion) -> Answer:
        return answer_of(prompt, completion, self.tokenizer, self.rules.stop, thinking=self._thinking)


def rewards_and_groups(ends: Sequence[Episode]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards, FP64 [E], and group numbers, int64 [E]."""
    return torch.tensor([episode.reward for episode in ends]).double(), torch.tensor(
        [episode.group for episode in ends]
    )


def _by_shares(work: Callable[[list[_Item]], list[_Result]], items: Sequence[_Item]) -> list[_Result]:
    """Return the results of all items; each rank computes its share. Collective.

    Raises:
        UserError: on all ranks, if the work of any rank raised one.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    local_results = run_on_all_ranks(lambda: work(list(items[rank::ranks])))
    if ranks == 1:  # a gather of objects would only copy them, by pickle
        return local_results
    shares: list[list[_Result]] = [[] for _ in range(ranks)]
    dist.all_gather_object(shares, local_results)
    return [shares[number % ranks][number // ranks] for number in range(len(items))]
