"""Rewards to advantages: functions of tensors, for samples in groups and for the tokens of samples."""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group_std", "group_mean", "leave_one_out"]


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
    centred = rewards - _sum(rewards, of, len(sizes))[of] / size
    # Rounding leaves some 1e-17 where all rewards are equal, and the division would blow it up.
    centred = torch.where(differing_groups(rewards, groups), centred, 0.0)
    others = (size - 1).clamp(min=1)
    if baseline == "group_std":
        return centred / ((_sum(centred.square(), of, len(sizes))[of] / others).sqrt() + 1e-6)
    return centred * (size / others) if baseline == "leave_one_out" else centred


def differing_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """bool [N]: samples in whose group the rewards differ, by `group_advantages` the only ones that teach anything.

    Args:
        rewards: [N].
        groups: int64 [N].
    """
    _, of, sizes = groups.unique(return_inverse=True, return_counts=True)
    highest, lowest = (
        rewards.new_zeros(len(sizes)).scatter_reduce(0, of, rewards, reduce, include_self=False)
        for reduce in ("amax", "amin")
    )
    return (highest > lowest)[of]


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """The penalty of a reward in the last ``buffer`` tokens of the ``longest`` length, from 0 to -1 (arXiv 2503.14476).

    Args:
        lengths: [N]: tokens of completions.
        buffer: 0 for no penalty.
    """
    return ((longest - buffer - lengths) / max(buffer, 1)).clamp(-1.0, 0.0) * (buffer > 0)


def discounted_returns(rewards: Tensor, is_token: Tensor, gamma: float) -> Tensor:
    """Sum of the rewards from each token on, discounted per token; other positions are passed over and give 0.

    Args:
        rewards: [N, T], floating.
        is_token: bool [N, T]: tokens of the policy; tokens of a tool or padding are none.
    """
    return generalised_advantages(rewards, torch.zeros_like(rewards), is_token, gamma, 1.0)


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


def moments(values: Tensor) -> Tensor:
    """FP64 [3]: number, sum and sum of squares of all values. Those of several ranks add up."""
    values = values.double()
    return torch.stack([values.new_tensor(values.numel()), values.sum(), values.square().sum()])


def whiten(values: Tensor, of: Tensor) -> Tensor:
    """Shift and scale to the mean 0 and, with Bessel's correction, the variance 1 of the values with these `moments`,
    which may be more than the ones given."""
    number, total, squares = of.unbind()
    mean = total / number.clamp(min=1)
    variance = (squares - mean * total).clamp(min=0) / (number - 1).clamp(min=1)
    return ((values - mean) * (variance + 1e-8).rsqrt()).to(values.dtype)


def _sum(values: Tensor, of: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add(0, of, values)
