"""The record of a rollout: generated tokens, their rewards, and the targets that the policy learns from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm46.tasks.rl.rollout.records import Episode

OUTCOMES = ("finished", "truncated")


@dataclass
class Samples:
    """T tokens of N samples of E episodes, concatenated. G of the tokens are targets: tokens that the policy generated
    and learns from. Arrays of length G, and all fields of the loss, have one value for each target.

    An episode is an answer to a prompt. It has one sample, or several if its conversation branches; the first sample
    has the last turn. Scored episodes become this record. The journal stores it, fields are computed from it, and
    batches are packed from it.
    """

    tokens: np.ndarray
    """int32 [T], as the model reads them: prompt, generated tokens and replies of the environment of each sample."""
    targets: np.ndarray
    """int32 [T]: the token that the policy generated at this position; -1 for other tokens, and for tokens that are a
    target of another sample. Differs from ``tokens`` at generated markers that the next role replaced."""
    ends: np.ndarray
    """int64 [N]: end of each sample."""
    prompt_lengths: np.ndarray
    """int64 [N]: tokens of each sample's prompt."""
    logprobs: np.ndarray
    """float32 [G]: log-probabilities that the engine returned."""
    versions: np.ndarray
    """int32 [G]: version of the weights that generated the token."""
    episode: np.ndarray
    """int64 [N]: number of each sample's episode, ascending from 0 to E - 1."""
    group: np.ndarray
    """int64 [E]: number of the prompt."""
    reward: np.ndarray
    """float64 [E]: weighted sum of the parts."""
    parts: np.ndarray
    """float64 [E, rewards]: single rewards, before weighting."""
    outcome: np.ndarray
    """uint8 [E]: index in `OUTCOMES`."""
    step: int
    """Optimizer steps made before this rollout: the version of the weights that trains on it first."""
    first_prompt: int
    next_prompt: int
    """Numbers of the prompts that were handed out for it: [first, next)."""
    part_names: list[str]
    """Names of the rewards."""
    is_demonstration: bool = False
    """True if the answers are labels."""
    routes: np.ndarray | None = None
    """Under routing replay the experts of all tokens except each sample's last, [T - N, MoE layers, experts of a
    token]; see `compute/model/routes.py`."""
    kept_ids: np.ndarray | None = None
    """int32 [sum of kept_counts]: the ids that the targets were sampled from, one target after another; None if they
    were sampled from the whole vocabulary."""
    kept_counts: np.ndarray | None = None
    """int32 [G]: number of these ids of each target."""
    figures: dict[str, float] = field(default_factory=dict)
    """Columns of metrics."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """Numbers of prompts that were handed out and are not in this rollout or an earlier one, and the versions of the
    weights when they were."""
    stale: list[int] = field(default_factory=list)
    """Numbers of prompts that were dropped before this rollout: their groups were too old (rollout.when_stale)."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts of the generation, which another run that trains on this rollout must share."""

    def __len__(self) -> int:
        return len(self.ends)

    def outcome_name(self, episode: int) -> str:
        """Return how an episode ended, in a word."""
        return OUTCOMES[self.outcome[episode]]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [N]."""
        return np.diff(self.ends, prepend=0)

    @cached_property
    def places(self) -> np.ndarray:
        """Index of each target among all targets, -1 at other tokens; int64 [T]."""
        is_target = self.targets >= 0
        return np.where(is_target, is_target.cumsum() - 1, -1)

    @property
    def most_kept(self) -> int:
        """Largest number of ids that a target was sampled from; 0 without these numbers."""
        return 0 if self.kept_counts is None else int(self.kept_counts.max(initial=0))

    @property
    def of_targets(self) -> Tensor:
        """Number of each target's sample, int64 [G]."""
        return torch.from_numpy(np.arange(len(self)).repeat(self.lengths)[self.targets >= 0])

    def bounds(self, sample: int) -> tuple[int, int]:
        """Return start and end of a sample's tokens."""
        return int(self.ends[sample] - self.lengths[sample]), int(self.ends[sample])

    def prompt(self, sample: int) -> np.ndarray:
        """Return the token ids of a sample's prompt."""
        return self.tokens[slice(*self.bounds(sample))][: self.prompt_lengths[sample]]

    def completion(self, sample: int) -> np.ndarray:
        """Return the token ids after the prompt, with markers as they were generated."""
        span = slice(*self.bounds(sample))
        return np.where(self.targets[span] >= 0, self.targets[span], self.tokens[span])[self.prompt_lengths[sample] :]


def _flat(rows: Iterable[Iterable[float]], kind: type[np.generic]) -> np.ndarray:
    """Concatenate the values of all rows."""
    return np.fromiter(chain.from_iterable(rows), kind)


def to_samples(episodes: Sequence[Episode], part_names: Sequence[str], **facts: Any) -> Samples:
    """Convert scored episodes to a record.

    Args:
        part_names: names of the rewards.
        facts: other fields of `Samples`.
    """
    completions = [sample for episode in episodes for sample in episode.samples]
    samples_of_episodes = [len(episode.samples) for episode in episodes]
    # Convert all samples at once: small arrays per sample took 10 % of the time of an rl_debug.toml step outside of the
    # model.
    generated = _flat((completion.tokens for completion in completions), np.int32)
    inputs = generated.copy()
    is_target = np.ones(len(generated), np.bool_)
    start = 0
    for completion in completions:
        for first, end in completion.replies:
            is_target[start + first : start + end] = False
        for index, marker in completion.contradicted:
            inputs[start + index] = marker
        start = start + len(completion.tokens)
    lengths = np.array([(len(sample.prompt), len(sample.tokens)) for sample in completions], np.int64).reshape(-1, 2)
    is_generated = np.repeat(np.arange(lengths.size) % 2 == 1, lengths.ravel())
    tokens = np.empty(len(is_generated), np.int32)
    targets = np.full(len(is_generated), -1, np.int32)
    tokens[~is_generated] = _flat((completion.prompt for completion in completions), np.int32)
    tokens[is_generated] = inputs
    targets[is_generated] = np.where(is_target, generated, -1)
    routes = [completion.routes for completion in completions if completion.routes is not None]
    kept_ids = [completion.kept.ids for completion in completions if completion.kept is not None]
    kept_counts = np.concatenate([completion.kept_counts for completion in completions]) if kept_ids else None
    parts = np.array([[episode.parts[name] for name in part_names] for episode in episodes])
    return Samples(
        tokens=tokens,
        targets=targets,
        ends=lengths.sum(1).cumsum(),
        prompt_lengths=lengths[:, 0].copy(),
        logprobs=_flat((completion.logprobs for completion in completions), np.float32)[is_target],
        versions=_flat((completion.versions for completion in completions), np.int32)[is_target],
        episode=np.arange(len(episodes)).repeat(samples_of_episodes),
        group=np.array([episode.group for episode in episodes], np.int64),
        reward=np.array([episode.reward for episode in episodes], np.float64),
        parts=parts.reshape(-1, len(part_names)),
        outcome=np.array([episode.completion.finish == "length" for episode in episodes], np.uint8),
        routes=np.concatenate(routes) if routes else None,
        kept_ids=None if kept_counts is None else np.concatenate(kept_ids)[is_target.repeat(kept_counts)],
        kept_counts=None if kept_counts is None else kept_counts[is_target],
        part_names=list(part_names),
        **facts,
    )
