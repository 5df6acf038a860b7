"""The record of a rollout: what was generated, how it was judged, and what the policy learns from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm46.tasks.rl.rollout.records import EpisodeEnd

OUTCOMES = ("finished", "truncated")


@dataclass
class Samples:
    """T tokens of N samples of E episodes, one behind the other. G of the tokens are targets, which the policy has
    generated and learns from: arrays of that length, and all fields of the loss, have one value for each.

    An episode is an answer to a prompt. It has one sample, or several if its conversation branches: first the one with
    the last turn. Scored episodes become this record, which the journal writes, fields are computed of, and batches
    are packed from.
    """

    tokens: np.ndarray
    """int32 [T], as the model reads them: prompt, generated tokens and replies of an environment of each sample."""
    targets: np.ndarray
    """int32 [T]: the token that was generated at this place; -1 where none was, or another sample has it as a target.
    It differs from ``tokens`` at markers that the next role contradicts."""
    ends: np.ndarray
    """int64 [N]: end of each sample."""
    prompt_lengths: np.ndarray
    """int64 [N]."""
    logprobs: np.ndarray
    """float32 [G], of the engine."""
    versions: np.ndarray
    """int32 [G], of the weights."""
    episode: np.ndarray
    """int64 [N]: ascending from 0 to E - 1."""
    group: np.ndarray
    """int64 [E]: number of the prompt."""
    reward: np.ndarray
    """float64 [E]: weighted sum of the parts."""
    parts: np.ndarray
    """float64 [E, rewards], before their weights."""
    outcome: np.ndarray
    """uint8 [E]: index in `OUTCOMES`."""
    step: int
    """Optimizer steps before it: the version of the weights that it was generated from."""
    first_prompt: int
    next_prompt: int
    """Numbers of the prompts that were handed out for it: [first, next)."""
    part_names: list[str]
    """Names of the rewards."""
    is_demonstration: bool = False
    """True if the answers are labels."""
    routes: np.ndarray | None = None
    """Under routing replay the experts of all tokens but each sample's last, [T - N, MoE layers, experts of a token],
    see `compute/model/routes.py`."""
    figures: dict[str, float] = field(default_factory=dict)
    """Columns of metrics."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """Numbers of prompts that were handed out and are not in this rollout or an earlier one, and the versions of the
    weights when they were."""
    stale: list[int] = field(default_factory=list)
    """Numbers of prompts that were dropped before it, because their groups were too old (rollout.when_stale)."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts of its generation, which another run that trains on it must share."""

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N]."""
        return np.diff(self.ends, prepend=0)

    @cached_property
    def places(self) -> np.ndarray:
        """int64 [T]: number of each target among all, elsewhere -1."""
        is_target = self.targets >= 0
        return np.where(is_target, is_target.cumsum() - 1, -1)

    @property
    def of_targets(self) -> Tensor:
        """int64 [G]: number of the sample of each target."""
        return torch.from_numpy(np.arange(len(self)).repeat(self.lengths)[self.targets >= 0])

    def bounds(self, sample: int) -> tuple[int, int]:
        """Start and end of a sample's tokens."""
        return int(self.ends[sample] - self.lengths[sample]), int(self.ends[sample])

    def prompt(self, sample: int) -> np.ndarray:
        """Token ids of a sample's prompt."""
        return self.tokens[slice(*self.bounds(sample))][: self.prompt_lengths[sample]]

    def completion(self, sample: int) -> np.ndarray:
        """Token ids of what follows the prompt, with markers as they were generated."""
        of = slice(*self.bounds(sample))
        return np.where(self.targets[of] >= 0, self.targets[of], self.tokens[of])[self.prompt_lengths[sample] :]


def _flat(rows: Iterable[Iterable[float]], kind: type[np.generic]) -> np.ndarray:
    """The values of all rows, one after another."""
    return np.fromiter(chain.from_iterable(rows), kind)


def to_samples(episodes: Sequence[EpisodeEnd], part_names: Sequence[str], **facts: Any) -> Samples:
    """The record of scored episodes, with other fields of it."""
    numbered = [(number, *sample) for number, one in enumerate(episodes) for sample in one.samples]
    completions = [one for *_, one in numbered]
    # All samples at once: small arrays of each took a tenth of what a step of rl_debug.toml does outside of the model.
    generated = _flat((one.tokens for one in completions), np.int32)
    read, versions = generated.copy(), np.zeros_like(generated)
    is_target, start = np.ones(len(generated), np.bool_), 0
    for one in completions:
        for first, end in one.replies:
            is_target[start + first : start + end] = False
        for index, marker in one.contradicted:
            read[start + index] = marker
        end = start + len(one.tokens)
        for span in one.spans:
            versions[start + span.start : end] = span.version
        start = end
    lengths = np.array([(len(prompt), len(one.tokens)) for _, prompt, one in numbered], np.int64).reshape(-1, 2)
    is_generated = np.repeat(np.arange(lengths.size) % 2 == 1, lengths.ravel())
    tokens, targets = np.empty(len(is_generated), np.int32), np.full(len(is_generated), -1, np.int32)
    tokens[~is_generated], tokens[is_generated] = _flat((prompt for _, prompt, _ in numbered), np.int32), read
    targets[is_generated] = np.where(is_target, generated, -1)
    routes = [one.routes for one in completions if one.routes is not None]
    return Samples(
        tokens=tokens, targets=targets, ends=lengths.sum(1).cumsum(), prompt_lengths=lengths[:, 0].copy(),
        logprobs=_flat((one.logprobs for one in completions), np.float32)[is_target], versions=versions[is_target],
        episode=np.array([number for number, *_ in numbered], np.int64),
        group=np.array([one.group for one in episodes], np.int64),
        reward=np.array([one.reward for one in episodes], np.float64),
        parts=np.array([[one.parts[name] for name in part_names] for one in episodes]).reshape(-1, len(part_names)),
        outcome=np.array([one.completion.finish == "length" for one in episodes], np.uint8),
        routes=np.concatenate(routes) if routes else None, part_names=list(part_names), **facts,
    )  # fmt: skip
