"""The samples of a rollout: of one prompt from its completion to its reward, and all of them as arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rollout.records import FINISHES, NOTHING, Completion, EpisodeEnd, SessionSample


@dataclass
class Rollout:
    """Samples in order, the arrays one entry for each sample or, of tokens, one sample behind the other."""

    step: int
    """Optimizer steps before it: the version of the weights that it was generated from."""
    first_prompt: int
    next_prompt: int
    """Numbers of the prompts that were handed out for it: [first, next)."""
    part_names: tuple[str, ...]
    """Names of the rewards."""
    is_demonstration: bool
    """True if the completions are labels."""
    arrays: dict[str, np.ndarray]
    """prompt_tokens int32, prompt_lengths int64 [N], tokens int32 [T], lengths int64 [N], logprobs float32 [T] of the
    engine, versions int32 [T] of the weights of a token, is_reply bool [T]: of an environment, or trained in another
    sample, groups int64 [N]: number of the prompt, episodes int64 [N]: number of the answer that samples are of, from 0
    on, ascending, rewards float64 [N], parts float64 [N, rewards], finish uint8 [N]: index in `FINISHES`; where markers
    are contradicted inputs int32 [T]: tokens as they are read (`Completion.contradicted`); under routing replay routes
    of the tokens of prompts and completions but each sample's last [tokens, MoE layers, experts of a token], see
    `compute/model/routes.py`."""
    figures: dict[str, float] = field(default_factory=dict)
    """Columns of metrics."""
    waiting: list[list[int]] = field(default_factory=list)
    """Numbers of prompts that were handed out and are not in this rollout or an earlier one, and the versions of the
    weights when they were."""
    stale: list[int] = field(default_factory=list)
    """Numbers of prompts that were dropped before it, because their groups were too old (rollout.when_stale)."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts of its generation, which another run that trains on it must share."""

    def __post_init__(self) -> None:
        self.arrays.setdefault("episodes", np.arange(len(self.arrays["lengths"])))
        self._ends = np.cumsum(self.arrays["lengths"])
        self._prompt_ends = np.cumsum(self.arrays["prompt_lengths"])

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def tokens(self) -> int:
        """Tokens of all completions."""
        return int(self._ends[-1]) if len(self) else 0

    def bounds(self, sample: int) -> tuple[int, int]:
        """Start and end of a sample's completion in the arrays of tokens."""
        end = int(self._ends[sample])
        return end - int(self.arrays["lengths"][sample]), end

    def completion(self, sample: int) -> np.ndarray:
        """Token ids of a completion."""
        return self.arrays["tokens"][slice(*self.bounds(sample))]

    def prompt(self, sample: int) -> np.ndarray:
        """Token ids of a sample's prompt."""
        end = int(self._prompt_ends[sample])
        return self.arrays["prompt_tokens"][end - int(self.arrays["prompt_lengths"][sample]) : end]

    def sample_of_tokens(self) -> Tensor:
        """int64 [T]: number of the sample of each token; -1 where an environment has replied."""
        numbers = np.arange(len(self)).repeat(self.arrays["lengths"])
        return torch.from_numpy(np.where(self.arrays["is_reply"], -1, numbers))

    def routes(self, sample: int) -> np.ndarray | None:
        """Routes of a sample's tokens but the last; None without routing replay."""
        if "routes" not in self.arrays:
            return None
        end = int(self._prompt_ends[sample] + self._ends[sample]) - sample - 1
        length = int(self.arrays["prompt_lengths"][sample] + self.arrays["lengths"][sample]) - 1
        return self.arrays["routes"][end - length : end]


class Sample(NamedTuple):
    """An answer to a prompt, from its generation to its reward."""

    prompt: Prompt
    group: int
    """Number of the prompt, counted over the run."""
    end: EpisodeEnd
    reward: float | None = None
    """Weighted sum of the parts; None before it is scored, or if there is a fault."""
    parts: Mapping[str, float] = MappingProxyType({})
    """By the name of each reward, before its weight; without those that failed."""

    @property
    def fault(self) -> str:
        """The reason why it has no reward: the environment failed, its server did not finish it, or a reward failed."""
        return self.end.fault

    @property
    def last(self) -> SessionSample:
        """The sample with the last turn; of an episode without one the prompt alone."""
        return self.end.samples[0] if self.end.samples else SessionSample(self.prompt.tokens, NOTHING)

    @property
    def completion(self) -> Completion:
        """Of the sample with the last turn."""
        return self.last.completion


def to_arrays(samples: Sequence[Sample], part_names: Sequence[str]) -> dict[str, np.ndarray]:
    """`Rollout.arrays` of samples."""

    def joined(parts: Iterable[Sequence], dtype: type) -> np.ndarray:
        return np.array(list(chain.from_iterable(parts)), dtype)

    episodes = [(number, of, *one) for number, of in enumerate(samples) for one in of.end.samples]
    numbers, samples, prompts, completions = map(list, zip(*episodes, strict=True)) if episodes else ([],) * 4
    lengths = np.array([len(one.tokens) for one in completions], np.int64)
    versions, is_reply = np.zeros(lengths.sum(), np.int32), np.zeros(lengths.sum(), np.bool_)
    tokens = joined([one.tokens for one in completions], np.int32)
    inputs = tokens.copy()
    for one, end in zip(completions, lengths.cumsum().tolist(), strict=True):
        start = end - len(one.tokens)
        for span in one.spans:
            versions[start + span.start : end] = span.version
        for first, last in one.replies:
            is_reply[start + first : start + last] = True
        for index, marker in one.contradicted:
            inputs[start + index] = marker
    routes = [one.routes for one in completions if one.routes is not None]
    of_tokens = {"routes": np.concatenate(routes)} if routes else {}
    of_tokens |= {} if np.array_equal(inputs, tokens) else {"inputs": inputs}
    return of_tokens | {
        "prompt_tokens": joined(prompts, np.int32), "prompt_lengths": np.array(list(map(len, prompts)), np.int64),
        "tokens": tokens, "lengths": lengths, "versions": versions, "is_reply": is_reply,
        "logprobs": joined([one.logprobs for one in completions], np.float32),
        "groups": np.array([sample.group for sample in samples], np.int64), "episodes": np.array(numbers, np.int64),
        "rewards": np.array([sample.reward for sample in samples], np.float64),
        "parts": np.array([[s.parts[name] for name in part_names] for s in samples]).reshape(-1, len(part_names)),
        "finish": np.array([FINISHES.index(one.finish) for one in completions], np.uint8),
    }  # fmt: skip


def rewards_and_groups(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 [N] and int64 [N]."""
    return torch.tensor([one.reward for one in samples]).double(), torch.tensor([one.group for one in samples])
