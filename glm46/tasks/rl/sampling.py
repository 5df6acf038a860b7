"""From prompts to scored samples: completions, conversations with an environment, rewards, and groups worth a step."""

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import on_first_rank, run_on_all_ranks
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.rl import ResolvedRL
from glm46.config.rollout import RolloutConfig as RolloutSection
from glm46.storage.chats.chat import chat_reply, opened_thought
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.episodes import CommandEpisodes
from glm46.tasks.rl.fields import Baseline, differing_groups
from glm46.tasks.rl.prompts import Prompt, answers_of_labels, prompt_at
from glm46.tasks.rl.rewards.answer import Answer, Scored
from glm46.tasks.rl.rewards.function_pool import FunctionPool
from glm46.tasks.rl.rollout.records import Completion, Engine, Request, SamplingRules
from glm46.tasks.rl.samples import Rollout, Sample, sample_of, to_arrays

MOST_ROUNDS = 8
"""Of taking prompts in place of groups that are left out."""
_MOST_DROPPED = 0.5
"""A larger share of samples whose rewards failed is a fault of the rewards."""
_Item, _Result = TypeVar("_Item"), TypeVar("_Result")
Take = Callable[[int, int], list[Sample] | None]
"""Gives the samples of groups from the number of a prompt on, as many as asked for; None if a stop was requested.
Collective."""


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

    def tell(self, cause: str, line: str) -> None:
        """Say a line the first, second, fourth, eighth time and so on that a cause occurs in a run."""
        self._times[cause] += 1
        if dist.get_rank() == 0 and self._times[cause].bit_count() == 1:
            self.say(line)

    def close(self) -> None:
        """End the processes and free the engine."""
        for pool in (self.rewards, self.environment, self.filter, self.episodes):
            if pool is not None:
                pool.close()
        self.engine.close()

    def prompt(self, number: int) -> Prompt:
        """The prompt that is handed out as this number."""
        return self.prompts[prompt_at(number, len(self.prompts), self.seed)]

    def seed_of(self, what: str, prompt: int, index: int) -> int:
        """The seed of the sample with this index of a prompt."""
        digest = hashlib.blake2b(f"{self.seed} {what} {prompt} {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def requests(self, number: int) -> list[Request]:
        """The samples of the prompt with a number."""
        tokens, longest = self.prompt(number).tokens, self.section.max_new_tokens
        return [
            Request(tokens, self.seed_of("sample", number, index), longest) for index in range(self.config.group_size)
        ]

    def generate_groups(self, first: int, count: int) -> list[Sample] | None:
        """See `Take`: generate with the weights that the engine has."""
        numbers = range(first, first + count)
        asked = [(number, self.prompt(number)) for number in numbers for _ in range(self.config.group_size)]
        return self.generate(asked, [one for number in numbers for one in self.requests(number)], self.rules)

    def generate(
        self, asked: Sequence[tuple[int, Prompt]], requests: Sequence[Request], rules: SamplingRules
    ) -> list[Sample] | None:
        """The samples of requests, of prompts and their numbers, not yet scored; None if a stop was requested."""
        if self.episodes is not None:
            pairs = [(prompt, request) for (_, prompt), request in zip(asked, requests, strict=True)]
            ends = self.episodes.run(pairs, rules)
            return None if ends is None else [sample_of(*one, end) for one, end in zip(asked, ends, strict=True)]
        completions, faults = self._converse([prompt for _, prompt in asked], requests, rules)
        if self.section.kind == "local" and any(one.finish == "abort" for one in completions):
            return None
        return [
            Sample(prompt, number, completion, faults.get(index, ""))
            for index, ((number, prompt), completion) in enumerate(zip(asked, completions, strict=True))
        ]

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their rewards, or the reason for none; each rank scores its share.

        Raises:
            UserError: rewards cannot be loaded.
        """

        def scores(share: list[Sample]) -> list:
            answers = [self._answer(one.prompt, one.completion)._replace(score=one.score) for one in share]
            return self.rewards.score(answers)

        scored, given = [], _by_shares(scores, samples)
        if self.reward_model is not None:
            ends = [len(one.completion.tokens) - (one.completion.finish == "stop") for one in samples]
            rows = [[*one.prompt.tokens, *one.completion.tokens[:n]] for one, n in zip(samples, ends, strict=True)]
            weight = self.config.reward_model.weight
            given = [of.plus(weight, value) for of, value in zip(given, self.reward_model(rows), strict=True)]
        for one, score in zip(samples, given, strict=True):
            is_aborted = one.completion.finish == "abort"
            fault = one.fault or ("its server did not finish it (rollout.deadline_seconds)" if is_aborted else "")
            parts = {} if fault else score.parts
            scored.append(one._replace(fault=fault or score.fault, reward=None if fault else score.total, parts=parts))
        # The name of a reward and the type of its error: messages may contain values of their samples.
        causes: dict[str, list[str]] = {}
        for fault in (one.fault for one in scored if one.reward is None):
            causes.setdefault(re.sub(r"'.*'|\d+", "", ": ".join(fault.split(": ")[:2])), []).append(fault)
        for cause, found in causes.items():
            self.tell(cause, f"{len(found)} of {len(scored)} samples are dropped without reward, because of {found[0]}")
        return scored

    def worth_a_step(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of the groups that have a baseline, and that dynamic sampling and the filter keep."""
        if self.config.group_size > 1 and self.config.advantage in get_args(Baseline):
            sizes = Counter(one.group for one in samples)
            samples = [one for one in samples if sizes[one.group] > 1]
        if self.config.dynamic_sampling:
            differs = differing_groups(*_rewards_and_groups(samples)).tolist()
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
    ) -> tuple[list[Completion], dict[int, str]]:
        """Completions of requests, with the replies of the environment and the turns after them; and by the index of a
        request why the environment failed."""
        completions, faults = list(self.engine.generate(requests, rules)), {}
        numbers: Sequence[int] = range(len(requests))
        for _ in range(0 if self.environment is None else self.config.environment.max_turns - 1):
            open_ = [(n, role) for n in numbers if (role := self._asked_role(completions[n])) is not None]
            replies = _by_shares(
                lambda share: self.environment.replies([self._answer(prompts[n], completions[n]) for n in share]),
                [n for n, _ in open_],
            )
            turns: dict[int, tuple[list[int], Request]] = {}
            for (number, role), reply in zip(open_, replies, strict=True):
                if isinstance(reply, str):
                    faults[number] = f"rl.environment: {reply}"
                elif reply.text is not None:
                    thinking, message = self.config.prompts.thinking, Message(role, reply.text)
                    tokens = chat_reply(self.tokenizer, [message], thinking=thinking)[1:]  # the turn has the marker
                    of, done = requests[number], completions[number]
                    left = of.max_new_tokens - len(done.tokens) - len(tokens)
                    if left > 0:
                        turns[number] = tokens, Request([*of.prompt, *done.tokens, *tokens], of.seed, left)
                    else:
                        completions[number] = done._replace(finish="length")
            if not turns:
                break
            generated = self.engine.generate([request for _, request in turns.values()], rules)
            for (number, (tokens, _)), turn in zip(turns.items(), generated, strict=True):
                completions[number] = completions[number].extended(tokens, turn)
            numbers = list(turns)
        return completions, faults

    def _asked_role(self, completion: Completion) -> Literal["tool", "user"] | None:
        """The role that is asked to reply to the last turn."""
        if completion.finish != "stop":
            return None
        markers = self.tokenizer.special
        return {markers["<|observation|>"]: "tool", markers["<|user|>"]: "user"}.get(completion.tokens[-1])

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


def generate_rollout(sampler: Sampler, take: Take, step: int, first_prompt: int) -> Rollout | None:
    """Generate and score a rollout; None if a stop was requested. Collective.

    Groups that dynamic sampling or a filter leaves out are replaced by groups of the next prompts, in at most
    `MOST_ROUNDS` rounds. A sample whose rewards failed is left out of its group.

    Raises:
        UserError: too many rewards failed.
    """
    config, samples, scored, next_prompt = sampler.config, [], [], first_prompt
    seconds = {"rollout_seconds": 0.0, "reward_seconds": 0.0}
    for _ in range(MOST_ROUNDS if config.replaces_groups else 1):
        missing = config.prompts_per_rollout - len({one.group for one in samples})
        if not missing:
            break
        began = time.perf_counter()
        taken = take(next_prompt, missing)
        if taken is None:
            return None
        ended = time.perf_counter()
        new = sampler.score(taken)
        seconds["rollout_seconds"] += ended - began
        seconds["reward_seconds"] += time.perf_counter() - ended
        next_prompt += missing
        scored += new
        samples += sampler.worth_a_step(_rewarded(new))
    if (kept := len({one.group for one in samples})) < config.prompts_per_rollout and config.replaces_groups:
        sampler.tell(
            "dynamic_sampling",
            f"rl.dynamic_sampling, rl.filter: after {counted(MOST_ROUNDS, 'round')} only {kept} of "
            f"{config.prompts_per_rollout} groups are worth a step; the rollout of step {step} goes on with "
            f"{counted(len(samples), 'sample')}",
        )
    names = tuple(reward.name for reward in config.rewards)
    arrays, columns = to_arrays(samples, names), _columns(scored, names) | seconds
    ages = step - arrays["versions"]
    columns |= {"staleness": float(ages.mean()), "staleness_max": int(ages.max())} if len(ages) else {}
    return Rollout(step, first_prompt, next_prompt, names, False, arrays, columns)


def demonstrate(sampler: Sampler, step: int, first_prompt: int) -> Rollout:
    """A rollout whose completions are the labels of the next prompts, one of each. Collective.

    Raises:
        UserError: too many rewards failed.
    """
    numbers = range(first_prompt, first_prompt + sampler.config.samples_per_rollout)
    prompts = [sampler.prompt(number) for number in numbers]
    answers = answers_of_labels(prompts, sampler.tokenizer)
    completions = [Completion(tokens, [0.0] * len(tokens), "stop", [], None) for tokens in answers]
    samples = sampler.score([Sample(*one) for one in zip(prompts, numbers, completions, strict=True)])
    names = tuple(reward.name for reward in sampler.config.rewards)
    return Rollout(step, first_prompt, numbers.stop, names, True, to_arrays(_rewarded(samples), names))


def _rewarded(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that have a reward, if enough do."""
    rewarded = [one for one in samples if one.reward is not None]
    if len(rewarded) >= (1 - _MOST_DROPPED) * len(samples):
        return rewarded
    fault = next(one.fault for one in samples if one.fault)
    key, remedy = "rl.rewards", "correct the reward or its label, or raise its timeout_seconds"
    if fault.startswith("rl.environment"):
        key, remedy = "rl.environment", "mend its program or function, or give it more time"
    raise UserError(
        *on_first_rank(
            f"{key}: {len(samples) - len(rewarded)} of {len(samples)} samples have no reward, the first one because of "
            f"{fault}; {remedy}"
        )
    )


def _rewards_and_groups(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 [N] and int64 [N]."""
    return torch.tensor([one.reward for one in samples]).double(), torch.tensor([one.group for one in samples])


def _columns(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, float]:
    """Columns of metrics of all samples that were scored."""
    kept = [one for one in samples if one.reward is not None]
    rewards, groups = _rewards_and_groups(kept)
    lengths = np.array([len(one.completion.tokens) for one in kept])
    differing = set(groups[differing_groups(rewards, groups)].tolist())
    drafted, accepted = (sum(getattr(one.completion, key) for one in samples) for key in ("drafted", "accepted"))
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        **{f"reward_part/{name}": float(np.mean([one.parts[name] for one in kept])) for name in names},
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": int(lengths.max()),
        "truncated_ratio": float(np.mean([one.completion.finish == "length" for one in kept])),
        "equal_groups_ratio": 1.0 - len(differing) / len({one.group for one in kept}),
        "dropped_samples": len(samples) - len(kept),
        "generated_samples": len(samples),
        **({"draft_acceptance_ratio": accepted / drafted} if drafted else {}),
    }


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
