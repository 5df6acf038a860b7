"""Training fields computed from rewards and log-probabilities: advantages, returns, corrections. The functions are pure
and take all targets or samples of a rollout."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from glm46.config.rl import ResolvedRL
from glm46.tasks.rl.policy_loss import correction_weights, kl_estimate, sum_by_sample, sum_over_samples
from glm46.tasks.rl.samples import Samples

Baseline = Literal["group_std", "group_mean", "leave_one_out"]

REWARD_ROUNDING = 2.0**-21
"""Relative difference below which two rewards count as equal: four units of FP32 rounding."""
_SMALLEST_SCALE = 0.125
"""Smallest scale for that relative difference. A sum of weighted parts has a rounding error of the size of its parts,
even if the sum itself is 0."""


def training_fields(
    model_fields: Mapping[str, Tensor], samples: Samples, ends: Sequence[int], config: ResolvedRL, max_length: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Compute the fields of each target that `PolicyGradient` and `ValueLoss` read.

    Args:
        model_fields: [G] each: ``rollout_logprobs``, and network outputs from before the first update: ``old_logprobs``
            (not needed under `ResolvedRL.is_on_policy`), ``reference_logprobs`` with `ResolvedRL.has_reference` and
            ``old_values`` with `ResolvedRL.has_critic`.
        ends: for each optimizer step the number of its last sample + 1.
        max_length: most tokens of a completion, for the overlong penalty; an episode's longest sample decides it.

    Returns:
        Fields, FP32 [G]: ``advantages``; ``sample_tokens``; ``episode_tokens``, the targets of all samples of the
        episode; ``old_logprobs`` with old_policy = "rollout"; ``correction`` if there are old log-probabilities;
        ``returns`` with a critic. And columns of metrics: with `overlong_share` the mean overlong penalty, which the
        reward of the rollout does not include.
    """
    model_fields = {name: values.double() for name, values in model_fields.items()}
    fields: dict[str, Tensor] = {}
    sample = samples.of_targets
    episodes = torch.from_numpy(samples.episode)
    count = len(samples.group)
    if config.old_policy == "rollout":
        model_fields["old_logprobs"] = fields["old_logprobs"] = model_fields["rollout_logprobs"]
    lengths = sum_by_sample(torch.ones_like(sample, dtype=torch.float64), sample, len(samples))
    assert bool((lengths > 0).all()), f"samples without targets: {(lengths == 0).nonzero().flatten().tolist()}"
    fields["sample_tokens"] = lengths[sample]
    fields["episode_tokens"] = sum_by_sample(lengths, episodes, count)[episodes[sample]]
    max_lengths = lengths.new_zeros(count).scatter_reduce(0, episodes, lengths, "amax")
    penalty = overlong_penalty(max_lengths, max_length, round(config.overlong_share * max_length))
    rewards = torch.from_numpy(samples.reward) + penalty
    advantages, returns = _advantages(model_fields, sample, episodes, rewards, torch.from_numpy(samples.group), config)
    fields["advantages"] = whiten(advantages) if config.whiten else advantages
    if returns is not None:
        fields["returns"] = returns
    if "old_logprobs" in model_fields:
        fields["correction"] = corrections(model_fields | fields, samples, ends, config)
    columns = {"overlong_penalty": penalty.mean().item()} if config.overlong_share and count else {}
    return {name: values.float() for name, values in fields.items()}, columns


def corrections(fields: Mapping[str, Tensor], samples: Samples, ends: Sequence[int], config: ResolvedRL) -> Tensor:
    """Compute the factor of each target's policy loss, FP32 [G], from the fields ``old_logprobs`` and
    ``rollout_logprobs``. ``ends`` as in `training_fields`."""
    names = ("old_logprobs", "rollout_logprobs")
    sample = samples.of_targets
    factors = torch.ones(len(sample))
    for first, end in zip([0, *ends], ends, strict=False):
        in_step = (sample >= first) & (sample < end)
        old, rollout = (fields[name][in_step].double() for name in names)
        sums = partial(sum_over_samples, sample=sample[in_step] - first, samples=end - first)
        factors[in_step] = correction_weights(old - rollout, sums, config.correction).float()
    return factors


def _advantages(
    model_fields: Mapping[str, Tensor],
    sample: Tensor,
    episodes: Tensor,
    rewards: Tensor,
    groups: Tensor,
    config: ResolvedRL,
) -> tuple[Tensor, Tensor | None]:
    """Compute advantages of the targets, and returns if there is a critic, FP64 [G], from rewards of episodes."""
    penalty = torch.zeros(len(sample), dtype=torch.float64)
    if config.kl.weight > 0 and config.kl.where == "reward":
        kl = kl_estimate(model_fields["old_logprobs"], model_fields["reference_logprobs"], config.kl.estimator)
        penalty = config.kl.weight * kl
    if config.advantage != "returns" and config.advantage != "gae":
        rewards = rewards - sum_by_sample(penalty, episodes[sample], len(rewards))
        return group_advantages(rewards, groups, config.advantage)[episodes[sample]], None

    # GAE works on a table with one row for each sample.
    is_first = torch.cat([torch.ones(1, dtype=torch.bool), sample.diff() != 0])[: len(sample)]
    is_last = torch.cat([sample.diff() != 0, torch.ones(1, dtype=torch.bool)])[: len(sample)]
    row = is_first.cumsum(0) - 1
    column = torch.arange(len(row)) - is_first.nonzero().flatten()[row]
    size = (int(row.max()) + 1, int(column.max()) + 1) if len(row) else (0, 0)
    is_token = torch.zeros(size, dtype=torch.bool).index_put((row, column), torch.tensor(True))

    def table(values: Tensor) -> Tensor:
        return torch.zeros(size, dtype=torch.float64).index_put((row, column), values)

    token_rewards = table(rewards[episodes[sample]].where(is_last, 0.0) - penalty)
    if config.advantage == "returns":
        zeros = torch.zeros_like(token_rewards)
        return generalised_advantages(token_rewards, zeros, is_token, config.gamma, 1.0)[row, column], None
    values = model_fields["old_values"]
    advantages = generalised_advantages(token_rewards, table(values), is_token, config.gamma, config.gae_lambda)
    return advantages[row, column], advantages[row, column] + values


def group_advantages(rewards: Tensor, groups: Tensor, baseline: Baseline) -> Tensor:
    """Compute advantages of samples relative to their groups, which may have any sizes and be in any order.

    Args:
        rewards: [N], floating.
        groups: int64 [N]: samples with the same number form a group.
        baseline: "group_std": (reward - mean) / (deviation + 1e-6), with Bessel's correction (arXiv 2402.03300);
            "group_mean": reward - mean (2503.20783); "leave_one_out": reward - mean of the others (2402.14740).

    Returns:
        [N]; 0 in a group of one, which has no baseline.
    """
    _, group_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    size = sizes[group_of]
    centred = rewards - sum_by_sample(rewards, group_of, len(sizes))[group_of] / size
    # If all rewards are equal, the division would turn their rounding errors into advantages.
    centred = torch.where(differing_groups(rewards, groups), centred, 0.0)
    others = (size - 1).clamp(min=1)
    if baseline == "group_std":
        variance: Tensor = sum_by_sample(centred.square(), group_of, len(sizes))[group_of] / others
        return centred / (variance.sqrt() + 1e-6)
    return centred * (size / others) if baseline == "leave_one_out" else centred


def differing_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Find the samples of groups whose rewards differ by more than rounding. Only these have a gradient.

    Args:
        rewards: [N], floating.
        groups: int64 [N]: samples with the same number form a group.

    Returns:
        bool [N].
    """
    _, group_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    rewards = rewards.double()
    zeros = rewards.new_zeros(len(sizes))
    highest = zeros.scatter_reduce(0, group_of, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group_of, rewards, "amin", include_self=False)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=_SMALLEST_SCALE)
    return (highest - lowest > REWARD_ROUNDING * scale)[group_of]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Compute the overlong penalty of completions (arXiv 2503.14476), [N].

    It falls linearly from 0 to -1 over the last ``buffer`` tokens before ``max_length``; ``buffer`` 0 disables it.
    """
    return ((max_length - buffer - lengths) / max(buffer, 1)).clamp(-1.0, 0.0) * (buffer > 0)


def generalised_advantages(
    rewards: Tensor, values: Tensor, is_token: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Estimate generalised advantages (arXiv 1506.02438).

    A_t = d_t + gamma lambda A_u with d_t = r_t + gamma V_u - V_t, where u is the policy's next token, and V is 0 after
    the last one. Positions that are not tokens of the policy are skipped.

    Args:
        rewards, values: [N, T], floating.
        is_token: bool [N, T]: tokens of the policy.

    Returns:
        [N, T], 0 at other positions. The targets of the value function are these advantages + values.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        is_policy = is_token[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * gae_lambda * next_advantage
        advantages[:, t] = advantage.where(is_policy, 0.0)
        next_value = values[:, t].where(is_policy, next_value)
        next_advantage = advantage.where(is_policy, next_advantage)
    return advantages


def whiten(values: Tensor) -> Tensor:
    """Shift and scale FP64 values to mean 0 and, with Bessel's correction, variance 1."""
    total = values.sum()
    squares = values.square().sum()
    mean = total / max(len(values), 1)
    variance = (squares - mean * total).clamp(min=0) / max(len(values) - 1, 1)
    return (values - mean) * (variance + 1e-8).rsqrt()
