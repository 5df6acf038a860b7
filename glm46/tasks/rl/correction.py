"""Weights for the difference between the policy that generated the samples and the same weights in the trainer: TIS,
IcePop and MIS as choices of one function. All are constants of the loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from glm46.config.rl import CorrectionConfig
from glm46.tasks.rl.policy_loss import LARGEST_LOG_RATIO

SumOverSamples = Callable[[Tensor], Tensor]
"""Gives each token the sum of the values over its sample. Collective if a sample lies on several ranks."""


def correction_weights(
    log_ratio: Tensor,
    sums: SumOverSamples,
    of: CorrectionConfig,
    normalised: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Tensor:
    """The factor of the policy loss of each token.

    Args:
        log_ratio: floating, of any shape: old policy of the trainer against that of the rollout; 0 outside of samples.
        of: resolved.
        normalised: divides the bounded weights by their mean over the step, with `CorrectionConfig.normalize`.

    Returns:
        In the shape of ``log_ratio``; any values outside of samples.
    """
    weights = torch.ones_like(log_ratio)
    if of.level != "none":
        weights, low = _ratio_at_level(log_ratio, sums, of.level), 1 / of.high if of.low is None else of.low
        if of.mode == "mask":
            weights = _inside(weights, weights, low, of.high)
        weights = normalised(weights.clamp(low if of.mode == "clip" else None, of.high))
    if of.reject_level != "none":
        ratio, low = _ratio_at_level(log_ratio, sums, of.reject_level), of.reject_low
        weights = _inside(weights, ratio, 1 / of.reject_high if low is None else low, of.reject_high)
    if of.veto:
        weights = weights.where(sums((log_ratio.exp() < of.veto).to(log_ratio.dtype)) == 0, 0.0)
    return weights


def _ratio_at_level(log_ratio: Tensor, sums: SumOverSamples, level: str) -> Tensor:
    """exp of the log-ratio of each token, or of its sum or mean over the token's sample; exponents at most 20."""
    if level != "token":
        log_ratio = sums(log_ratio) / (sums(torch.ones_like(log_ratio)).clamp(min=1) if level == "geometric" else 1)
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _inside(weights: Tensor, ratio: Tensor, low: float, high: float) -> Tensor:
    return weights.where((ratio >= low) & (ratio <= high), 0.0)


def weight_sums(weights: Tensor, sample_tokens: Tensor | None = None) -> Tensor:
    """FP64 [2]: sum of the weights and their number, over tokens; with ``sample_tokens``, the length of each token's
    sample, over samples. Those of all micro-batches and ranks of an optimizer step add up; their quotient is the mean
    that normalises weights."""
    share = torch.ones_like(weights) if sample_tokens is None else 1 / sample_tokens
    return torch.stack([(weights * share).sum(), share.sum()]).double()
