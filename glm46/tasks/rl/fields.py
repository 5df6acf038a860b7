"""Fields of the batches of a rollout that follow from its rewards and log-probabilities: advantages, and constants of
the loss. The task calls these functions; the formulas are in `advantages`, `correction` and `policy_loss`."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from glm46.compute.distributed.mesh import Cluster
from glm46.compute.model.cross_entropy import IGNORE
from glm46.config.rl import ResolvedRL
from glm46.engine.training.named_sums import sum_over_all_ranks
from glm46.storage.data.batches import Batch
from glm46.tasks.rl.advantages import (
    differing_groups,
    discounted_returns,
    generalised_advantages,
    group_advantages,
    moments,
    overlong_penalty,
    whiten,
)
from glm46.tasks.rl.correction import correction_weights, weight_sums
from glm46.tasks.rl.policy_loss import kl_estimate, sum_by_sample, sum_over_samples

SumOverReplicas = Callable[[Tensor], Tensor]


class Rewards(NamedTuple):
    """Of all samples of an optimizer step, over all ranks, by their numbers in ``sample``: every number has tokens."""

    rewards: Tensor
    """FP64 [N]."""
    groups: Tensor
    """int64 [N]: number of the sample's prompt in the rollout."""


def informative(rewards: Tensor, groups: Tensor, config: ResolvedRL) -> Tensor:
    """bool [N]: samples of groups that are worth a step; all without `dynamic_sampling`.

    Args:
        rewards: [N]; groups: int64 [N].
        config: resolved.
    """
    if not config.dynamic_sampling:
        return torch.ones_like(groups, dtype=torch.bool)
    return differing_groups(rewards, groups)


def sum_over_replicas(cluster: Cluster) -> SumOverReplicas:
    """Sum a tensor on the CPU over the ranks that read other sequences; ranks that read the same ones have equal
    tensors. Collective."""
    return lambda x: sum_over_all_ranks({"x": x})["x"] / cluster.layout.non_dp_degree


def prepare_fields(
    steps: list[list[Batch]], of_steps: list[Rewards], config: ResolvedRL, longest: int, sum_replicas: SumOverReplicas
) -> dict[str, float]:
    """Add to the batches of a rollout what `PolicyGradient` and `ValueLoss` read: ``advantages``, ``sample_tokens``,
    ``correction`` where there are ``old_logprobs``, and as configured ``returns``. Collective if ``sum_replicas`` is.

    Args:
        steps: for each optimizer step this rank's micro-batches, whole rows on the CPU: ``labels``, ``sample``,
            ``rollout_logprobs``, and what networks computed before the first update: ``old_logprobs`` (which
            old_policy = "rollout" sets here; none are needed under `ResolvedRL.is_on_policy`), ``reference_logprobs``
            and ``old_values`` where `ResolvedRL.has_reference` and `ResolvedRL.has_critic` say so. A sample is in one
            row. No value depends on how samples lie in rows, micro-batches and ranks.
        of_steps: for each step the rewards of its samples; groups may lie in several steps.
        config: resolved.
        longest: most tokens of a completion, for the overlong penalty.

    Returns:
        Columns of metrics: with `overlong_share` the mean of that penalty, which is not in the reward of the rollout.
    """
    starts = [0]
    for of_step in of_steps:
        starts.append(starts[-1] + len(of_step.rewards))
    batches = [(batch, start) for step, start in zip(steps, starts, strict=False) for batch in step]
    tokens = _Tokens(batches, samples=starts[-1])
    if config.old_policy == "rollout":
        for batch, _ in batches:
            batch["old_logprobs"] = batch["rollout_logprobs"]
    lengths = sum_replicas(sum_by_sample(torch.ones_like(tokens.sample, dtype=torch.float64), *tokens.of))
    assert bool((lengths > 0).all()), f"samples without tokens: {(lengths == 0).nonzero().flatten().tolist()}"
    tokens.write("sample_tokens", lengths[tokens.sample])

    rewards = torch.cat([of_step.rewards.double() for of_step in of_steps])
    penalty = overlong_penalty(lengths, longest, round(config.overlong_share * longest))
    rewards = rewards + penalty
    groups = torch.cat([of_step.groups for of_step in of_steps])
    advantages, returns = _advantages(tokens, rewards, groups, config, sum_replicas)
    if config.whiten:
        advantages = whiten(advantages, sum_replicas(moments(advantages)))
    tokens.write("advantages", advantages)
    if returns is not None:
        tokens.write("returns", returns)
    for step, of_step in zip(steps, of_steps, strict=True):
        if all("old_logprobs" in batch for batch in step):
            _write_correction(_Tokens([(batch, 0) for batch in step], len(of_step.rewards)), config, sum_replicas)
    return {"overlong_penalty": penalty.mean().item()} if config.overlong_share and len(penalty) else {}


class _Tokens:
    """The tokens with a label of some batches, one after another: those of a sample are consecutive, in their order."""

    def __init__(self, batches: list[tuple[Batch, int]], samples: int):
        self._batches = [batch for batch, _ in batches]
        self._is_target = [batch["labels"] != IGNORE for batch in self._batches]
        numbers = [batch["sample"] + start for batch, start in batches]
        self.sample, self.samples = self._pick(numbers, torch.int64), samples

    @property
    def of(self) -> tuple[Tensor, int]:
        """int64 [T] numbers of samples, and how many there are over all ranks."""
        return self.sample, self.samples

    def read(self, name: str) -> Tensor:
        """FP64 [T]."""
        return self._pick([batch[name] for batch in self._batches], torch.float64)

    def write(self, name: str, values: Tensor) -> None:
        """[T] to a field FP32 [B, S], 0 at other positions."""
        parts = values.float().split([int(is_target.sum()) for is_target in self._is_target])
        for batch, is_target, part in zip(self._batches, self._is_target, parts, strict=True):
            batch[name] = torch.zeros(is_target.shape).masked_scatter(is_target, part)

    def _pick(self, fields: list[Tensor], dtype: torch.dtype) -> Tensor:
        picked = [field[is_target].to(dtype) for field, is_target in zip(fields, self._is_target, strict=True)]
        return torch.cat([torch.zeros(0, dtype=dtype), *picked])

    def rows(self) -> tuple[Tensor, Tensor]:
        """Row and column of each token in a table with one row for each local sample, int64 [T] each."""
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), self.sample.diff() != 0])[: len(self.sample)]
        row = is_first.cumsum(0) - 1
        return row, torch.arange(len(row)) - is_first.nonzero().flatten()[row]


def _advantages(
    tokens: _Tokens, rewards: Tensor, groups: Tensor, config: ResolvedRL, sum_replicas: SumOverReplicas
) -> tuple[Tensor, Tensor | None]:
    """Advantages of the tokens, and with a critic its returns, FP64 [T], from the rewards of samples [N]."""
    penalty = torch.zeros(len(tokens.sample), dtype=torch.float64)
    if config.kl.weight > 0 and config.kl.where == "reward":
        kl = kl_estimate(tokens.read("old_logprobs"), tokens.read("reference_logprobs"), config.kl.estimator)
        penalty = config.kl.weight * kl
    if config.advantage not in ("returns", "gae"):
        rewards = rewards - sum_replicas(sum_by_sample(penalty, *tokens.of))
        return group_advantages(rewards, groups, config.advantage)[tokens.sample], None

    row, column = tokens.rows()
    size = (int(row.max()) + 1, int(column.max()) + 1) if len(row) else (0, 0)
    is_token = torch.zeros(size, dtype=torch.bool).index_put((row, column), torch.tensor(True))
    is_last = torch.cat([row.diff() != 0, torch.ones(1, dtype=torch.bool)])[: len(row)]
    of_token = rewards[tokens.sample].where(is_last, 0.0) - penalty

    def table(values: Tensor) -> Tensor:
        return torch.zeros(size, dtype=torch.float64).index_put((row, column), values)

    if config.advantage == "returns":
        return discounted_returns(table(of_token), is_token, config.gamma)[row, column], None
    values = tokens.read("old_values")
    advantages = generalised_advantages(table(of_token), table(values), is_token, config.gamma, config.gae_lambda)
    return advantages[row, column], advantages[row, column] + values


def _write_correction(tokens: _Tokens, config: ResolvedRL, sum_replicas: SumOverReplicas) -> None:
    """Add ``correction`` to the batches of one optimizer step: the factor of each token's policy loss."""
    of = config.correction

    def normalised(weights: Tensor) -> Tensor:
        if not of.normalize:
            return weights
        sample_tokens = None if of.level == "token" else tokens.read("sample_tokens")
        total, number = sum_replicas(weight_sums(weights, sample_tokens)).tolist()
        return weights * (number / total) if total > 0 else weights

    log_ratio = tokens.read("old_logprobs") - tokens.read("rollout_logprobs")
    sums = partial(sum_over_samples, sample=tokens.sample, samples=tokens.samples)
    tokens.write("correction", correction_weights(log_ratio, sums, of, normalised))
