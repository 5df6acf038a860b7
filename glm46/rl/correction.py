"""Weights for the difference between the policy that drew the samples and the same weights in the trainer: TIS, IcePop
and MIS as choices of one function. All are constants of the loss."""

from typing import Literal

import torch
from torch import Tensor

from glm46.rl.policy_loss import LARGEST_LOG_RATIO, sum_by_sample

Level = Literal["token", "sequence", "geometric"]


def ratio_at_level(log_ratio: Tensor, sample: Tensor, samples: int, level: Level) -> Tensor:
    """exp of the log-ratio of each token, or of its sum or mean over the token's sample.

    Args:
        log_ratio: [T], floating: old policy of the trainer against that of the rollout.
        sample: int64 [T]: number of the token's sample below ``samples``. All tokens of a sample are here.

    Returns:
        [T]; exponents are limited to 20.
    """
    if level != "token":
        sums = sum_by_sample(log_ratio, sample, samples)
        if level == "geometric":
            sums = sums / sum_by_sample(torch.ones_like(log_ratio), sample, samples).clamp(min=1)
        log_ratio = sums[sample]
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def bounded_weights(weights: Tensor, mode: Literal["truncate", "clip", "mask"], low: float, high: float) -> Tensor:
    """min(w, high); w clipped into [low, high]; or w with 0 outside of [low, high]."""
    if mode == "mask":
        return weights.where((weights >= low) & (weights <= high), 0.0)
    return weights.clamp(low if mode == "clip" else None, high)


def vetoed(log_ratio: Tensor, sample: Tensor, samples: int, veto: float) -> Tensor:
    """bool [T]: tokens of samples with a token whose ratio is below ``veto``. Arguments as in `ratio_at_level`."""
    below = (log_ratio.exp() < veto).to(log_ratio.dtype)
    return sum_by_sample(below, sample, samples)[sample] > 0


def weight_sums(weights: Tensor, sample_tokens: Tensor | None = None) -> Tensor:
    """FP64 [2]: sum of the weights and their number, over tokens; with ``sample_tokens``, the length of each token's
    sample, over samples. Those of all micro-batches and ranks of an optimizer step add up; their quotient is the mean
    that normalises weights."""
    share = torch.ones_like(weights) if sample_tokens is None else 1 / sample_tokens
    return torch.stack([(weights * share).sum(), share.sum()]).double()
