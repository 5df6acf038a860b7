"""Fields of the tokens of a rollout that follow from rewards and log-probabilities: advantages, constants of the loss.
Pure functions of tensors [T] over all tokens of a rollout; `advantages`, `correction` and `policy_loss` have the
formulas."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from glm46.config.rl import ResolvedRL
from glm46.tasks.rl.advantages import (
    discounted_returns,
    generalised_advantages,
    group_advantages,
    moments,
    overlong_penalty,
    whiten,
)
from glm46.tasks.rl.correction import correction_weights, weight_sums
from glm46.tasks.rl.policy_loss import kl_estimate, sum_by_sample, sum_over_samples


def training_fields(
    given: Mapping[str, Tensor],
    sample: Tensor,
    rewards: Tensor,
    groups: Tensor,
    ends: Sequence[int],
    config: ResolvedRL,
    longest: int,
    episodes: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Fields of each token that `PolicyGradient` and `ValueLoss` read.

    Args:
        given: [T] each, in the order of the samples: ``rollout_logprobs``, and what networks computed before the first
            update: ``old_logprobs`` (not needed under `ResolvedRL.is_on_policy`), ``reference_logprobs`` and
            ``old_values`` where `ResolvedRL.has_reference` and `ResolvedRL.has_critic` say so.
        sample: int64 [T]: number of the sample of each token; -1 for tokens without a target, such as replies of an
            environment.
        rewards: [N] of the samples; groups: int64 [N], number of the prompt.
        ends: of each optimizer step the number of its last sample + 1.
        config: resolved.
        longest: most tokens of a completion, for the overlong penalty, which is that of the longest sample.
        episodes: int64 [N], ascending from 0 on: samples with the same number are of one answer, and have its reward.
            Absent: all differ.

    Returns:
        Fields FP32 [T], 0 for tokens without a target: ``advantages``, ``sample_tokens``, ``episode_tokens``: targets
        of all samples of the episode, ``old_logprobs`` of old_policy = "rollout", ``correction`` where there are old
        log-probabilities, with a critic ``returns``. Columns of metrics: with `overlong_share` the mean of that
        penalty, which is not in the reward of the rollout.
    """
    is_target, samples = sample >= 0, len(rewards)
    given = {name: values[is_target].double() for name, values in given.items()}
    found: dict[str, Tensor] = {}
    of = sample[is_target]
    if config.old_policy == "rollout":
        given["old_logprobs"] = found["old_logprobs"] = given["rollout_logprobs"]
    lengths = sum_by_sample(torch.ones_like(of, dtype=torch.float64), of, samples)
    assert bool((lengths > 0).all()), f"samples without tokens: {(lengths == 0).nonzero().flatten().tolist()}"
    found["sample_tokens"] = lengths[of]
    episodes = torch.arange(samples) if episodes is None else episodes
    is_first = episodes.diff(prepend=episodes.new_full((1,), -1)) != 0
    count = int(is_first.sum())
    found["episode_tokens"] = lengths.new_zeros(count).index_add(0, episodes, lengths)[episodes[of]]
    most = lengths.new_zeros(count).scatter_reduce(0, episodes, lengths, "amax")
    penalty = overlong_penalty(most, longest, round(config.overlong_share * longest))
    of_episodes = rewards[is_first].double() + penalty
    advantages, returns = _advantages(given, of, episodes, of_episodes, groups[is_first], config)
    found["advantages"] = whiten(advantages, moments(advantages)) if config.whiten else advantages
    if returns is not None:
        found["returns"] = returns
    if "old_logprobs" in given:
        found["correction"] = torch.ones_like(advantages)
        for first, end in zip([0, *ends], ends, strict=False):
            of_step = (of >= first) & (of < end)
            step = {name: values[of_step] for name, values in (given | found).items()}
            found["correction"][of_step] = _correction(step, of[of_step] - first, end - first, config)
    whole = {name: torch.zeros(is_target.shape).masked_scatter(is_target, x.float()) for name, x in found.items()}
    return whole, {"overlong_penalty": penalty.mean().item()} if config.overlong_share and samples else {}


def _advantages(
    given: Mapping[str, Tensor], sample: Tensor, episodes: Tensor, rewards: Tensor, groups: Tensor, config: ResolvedRL
) -> tuple[Tensor, Tensor | None]:
    """Advantages of the targets, and with a critic its returns, FP64 [T], from the rewards and groups of episodes."""
    penalty = torch.zeros(len(sample), dtype=torch.float64)
    if config.kl.weight > 0 and config.kl.where == "reward":
        kl = kl_estimate(given["old_logprobs"], given["reference_logprobs"], config.kl.estimator)
        penalty = config.kl.weight * kl
    if config.advantage not in ("returns", "gae"):
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
        return discounted_returns(of_token, is_token, config.gamma)[row, column], None
    values = given["old_values"]
    advantages = generalised_advantages(of_token, table(values), is_token, config.gamma, config.gae_lambda)
    return advantages[row, column], advantages[row, column] + values


def _correction(of: Mapping[str, Tensor], sample: Tensor, samples: int, config: ResolvedRL) -> Tensor:
    """The factor of the policy loss of each target of an optimizer step."""

    def normalised(weights: Tensor) -> Tensor:
        if not config.correction.normalize:
            return weights
        total, number = weight_sums(weights, None if config.correction.level == "token" else of["sample_tokens"])
        return weights * (number / total) if total > 0 else weights

    sums = partial(sum_over_samples, sample=sample, samples=samples)
    return correction_weights(of["old_logprobs"] - of["rollout_logprobs"], sums, config.correction, normalised)
