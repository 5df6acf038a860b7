"""Fields of the targets of a rollout that follow from rewards and log-probabilities: advantages, constants of the loss.
Pure functions, over all targets or samples of a rollout."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from glm46.config.rl import ResolvedRL
from glm46.tasks.rl.policy_loss import correction_weights, kl_estimate, sum_by_sample, sum_over_samples
from glm46.tasks.rl.samples import Samples

Baseline = Literal["group_std", "group_mean", "leave_one_out"]


def training_fields(
    given: Mapping[str, Tensor], samples: Samples, ends: Sequence[int], config: ResolvedRL, longest: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Fields of each target that `PolicyGradient` and `ValueLoss` read.

    Args:
        given: [G] each: ``rollout_logprobs``, and what networks computed before the first update: ``old_logprobs`` (not
            needed under `ResolvedRL.is_on_policy`), ``reference_logprobs`` and ``old_values`` where
            `ResolvedRL.has_reference` and `ResolvedRL.has_critic` say so.
        ends: of each optimizer step the number of its last sample + 1.
        config: resolved.
        longest: most tokens of a completion, for the overlong penalty, which is that of the longest sample.

    Returns:
        Fields FP32 [G]: ``advantages``, ``sample_tokens``, ``episode_tokens``: targets of all samples of the episode,
        ``old_logprobs`` of old_policy = "rollout", ``correction`` where there are old log-probabilities, with a critic
        ``returns``. Columns of metrics: with `overlong_share` the mean of that penalty, which is not in the reward of
        the rollout.
    """
    given = {name: values.double() for name, values in given.items()}
    found: dict[str, Tensor] = {}
    of, episodes, count = samples.of_targets, torch.from_numpy(samples.episode), len(samples.group)
    if config.old_policy == "rollout":
        given["old_logprobs"] = found["old_logprobs"] = given["rollout_logprobs"]
    lengths = sum_by_sample(torch.ones_like(of, dtype=torch.float64), of, len(samples))
    assert bool((lengths > 0).all()), f"samples without targets: {(lengths == 0).nonzero().flatten().tolist()}"
    found["sample_tokens"] = lengths[of]
    found["episode_tokens"] = sum_by_sample(lengths, episodes, count)[episodes[of]]
    most = lengths.new_zeros(count).scatter_reduce(0, episodes, lengths, "amax")
    penalty = overlong_penalty(most, longest, round(config.overlong_share * longest))
    rewards = torch.from_numpy(samples.reward) + penalty
    advantages, returns = _advantages(given, of, episodes, rewards, torch.from_numpy(samples.group), config)
    found["advantages"] = whiten(advantages) if config.whiten else advantages
    if returns is not None:
        found["returns"] = returns
    if "old_logprobs" in given:
        found["correction"] = corrections(given | found, samples, ends, config)
    columns = {"overlong_penalty": penalty.mean().item()} if config.overlong_share and count else {}
    return {name: values.float() for name, values in found.items()}, columns


def corrections(fields: Mapping[str, Tensor], samples: Samples, ends: Sequence[int], config: ResolvedRL) -> Tensor:
    """The factor of the policy loss of each target, FP32 [G], from ``old_logprobs, rollout_logprobs, sample_tokens``.
    The ends are those of `training_fields`."""
    names, of = ("old_logprobs", "rollout_logprobs", "sample_tokens"), samples.of_targets
    found = torch.ones(len(of))
    for first, end in zip([0, *ends], ends, strict=False):
        of_step = (of >= first) & (of < end)
        old, of_engine, tokens = (fields[name][of_step].double() for name in names)
        share = torch.ones_like(tokens) if config.correction.level == "token" else 1 / tokens

        def normalised(weights: Tensor, share: Tensor = share) -> Tensor:
            total = (weights * share).sum()
            return weights * (share.sum() / total) if config.correction.normalize and total > 0 else weights

        sums = partial(sum_over_samples, sample=of[of_step] - first, samples=end - first)
        found[of_step] = correction_weights(old - of_engine, sums, config.correction, normalised).float()
    return found


def _advantages(
    given: Mapping[str, Tensor], sample: Tensor, episodes: Tensor, rewards: Tensor, groups: Tensor, config: ResolvedRL
) -> tuple[Tensor, Tensor | None]:
    """Advantages of the targets, and with a critic its returns, FP64 [G], from the rewards and groups of episodes."""
    penalty = torch.zeros(len(sample), dtype=torch.float64)
    if config.kl.weight > 0 and config.kl.where == "reward":
        kl = kl_estimate(given["old_logprobs"], given["reference_logprobs"], config.kl.estimator)
        penalty = config.kl.weight * kl
    if config.advantage != "returns" and config.advantage != "gae":
        rewards = rewards - sum_by_sample(penalty, episodes[sample], len(rewards))
        return group_advantages(rewards, groups, config.advantage)[episodes[sample]], None

    # A table with one row for each sample.
    is_first = torch.cat([torch.ones(1, dtype=torch.bool), sample.diff() != 0])[: len(sample)]
    is_last = torch.cat([sample.diff() != 0, torch.ones(1, dtype=torch.bool)])[: len(sample)]
    row = is_first.cumsum(0) - 1
    column = torch.arange(len(row)) - is_first.nonzero().flatten()[row]
    size = (int(row.max()) + 1, int(column.max()) + 1) if len(row) else (0, 0)
    is_token = torch.zeros(size, dtype=torch.bool).index_put((row, column), torch.tensor(True))

    def table(values: Tensor) -> Tensor:
        return torch.zeros(size, dtype=torch.float64).index_put((row, column), values)

    of_token = table(rewards[episodes[sample]].where(is_last, 0.0) - penalty)
    if config.advantage == "returns":
        none = torch.zeros_like(of_token)
        return generalised_advantages(of_token, none, is_token, config.gamma, 1.0)[row, column], None
    values = given["old_values"]
    advantages = generalised_advantages(of_token, table(values), is_token, config.gamma, config.gae_lambda)
    return advantages[row, column], advantages[row, column] + values


def group_advantages(rewards: Tensor, groups: Tensor, baseline: Baseline) -> Tensor:
    """Advantages of samples over their groups, which may be of any sizes and in any order.

    Args:
        rewards: [N], floating.
        groups: int64 [N]: samples with the same number are of one group.
        baseline: "group_std": (reward - mean) / (deviation + 1e-6), with Bessel's correction (arXiv 2402.03300);
            "group_mean": reward - mean (2503.20783); "leave_one_out": reward - mean of the others (2402.14740).

    Returns:
        [N]; 0 in a group of one, which says nothing about its sample.
    """
    _, of, sizes = groups.unique(return_inverse=True, return_counts=True)
    size = sizes[of]
    centred = rewards - sum_by_sample(rewards, of, len(sizes))[of] / size
    # Rounding leaves some 1e-17 where all rewards are equal, and the division would blow it up.
    centred = torch.where(differing_groups(rewards, groups), centred, 0.0)
    others = (size - 1).clamp(min=1)
    if baseline == "group_std":
        return centred / ((sum_by_sample(centred.square(), of, len(sizes))[of] / others).sqrt() + 1e-6)
    return centred * (size / others) if baseline == "leave_one_out" else centred


def differing_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """bool [N]: samples in whose group, int64 [N], the rewards [N] differ: by `group_advantages` only they teach."""
    _, of, sizes = groups.unique(return_inverse=True, return_counts=True)
    highest, lowest = (
        rewards.new_zeros(len(sizes)).scatter_reduce(0, of, rewards, reduce, include_self=False)
        for reduce in ("amax", "amin")
    )
    return (highest > lowest)[of]


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """The penalty of a reward in the last ``buffer`` tokens, 0 for no penalty, of the ``longest`` length, from 0 to -1
    (arXiv 2503.14476), for each length [N] of a completion."""
    return ((longest - buffer - lengths) / max(buffer, 1)).clamp(-1.0, 0.0) * (buffer > 0)


def generalised_advantages(
    rewards: Tensor, values: Tensor, is_token: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438): A_t = d_t + gamma lambda A_u with d_t = r_t + gamma V_u -
    V_t, where u is the next token of the policy; V is 0 behind the last one. Other positions are passed over.

    Args:
        rewards, values: [N, T], floating.
        is_token: bool [N, T].

    Returns:
        [N, T], 0 at other positions. Returns of the value function are this + values.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = is_token[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * gae_lambda * next_advantage
        advantages[:, t] = advantage.where(here, 0.0)
        next_value, next_advantage = values[:, t].where(here, next_value), advantage.where(here, next_advantage)
    return advantages


def whiten(values: Tensor) -> Tensor:
    """Shift and scale to the mean 0 and, with Bessel's correction, the variance 1. FP64."""
    total, squares = values.sum(), values.square().sum()
    mean = total / max(len(values), 1)
    variance = (squares - mean * total).clamp(min=0) / max(len(values) - 1, 1)
    return (values - mean) * (variance + 1e-8).rsqrt()
