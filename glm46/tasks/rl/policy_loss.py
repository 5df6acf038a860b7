"""Losses of a policy for each token, before any reduction, and their weights for the difference between the policy that
generated the samples and the same weights in the trainer: TIS, IcePop and MIS as choices of one function."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glm46.config.rl import ResolvedCorrection

LARGEST_LOG_RATIO = 20.0
"""Logarithms of ratios are limited to this: exp of it is far outside of every clip, and finite in FP32. Beyond it a
ratio has no gradient."""


class TokenLosses(NamedTuple):
    """Losses of tokens, in their shape."""

    loss: Tensor
    is_clipped: Tensor
    """bool: the bound, not the ratio itself, decides."""


def kl_estimate(logprobs: Tensor, others: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate of KL(policy | other) at tokens sampled from the policy (J. Schulman, "Approximating KL Divergence").

    Args:
        logprobs, others: log-probabilities of the same tokens, of one shape.
        estimator: with d = logprobs - others: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, without any
            bound: a bounded k3 has no gradient where the policy is furthest from the other one.
    """
    d = logprobs - others
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d


def sum_by_sample(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Sum values of any shape, 0 outside of samples, over the tokens of each sample, [samples]. ``sample`` is int64 of
    this shape, negative outside of samples."""
    return values.new_zeros(samples).index_add(0, sample.clamp(min=0).flatten(), values.flatten())


def sum_over_samples(
    values: Tensor, sample: Tensor, samples: int, sum_parts: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """For each token the sum over its sample, 0 outside of samples. Arguments as in `sequence_ratio`."""
    sums = sum_parts(sum_by_sample(values.where(sample >= 0, 0.0), sample, samples))
    return sums[sample.clamp(min=0)].where(sample >= 0, 0.0)


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """New over old probability of each token."""
    return (logprobs - old_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_ratio(
    logprobs: Tensor, old_logprobs: Tensor, sample: Tensor, sample_tokens: Tensor, samples: int,
    sum_parts: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:  # fmt: skip
    """Geometric mean of the ratios of a sample, at each of its tokens (GSPO, arXiv 2507.18071). Its gradient is that of
    the paper's GSPO-token, s_i * grad(logprob) at each token: that of the mean itself wherever the loss weighs the
    tokens of a sample alike, and each token's own where advantages or corrections differ.

    Args:
        logprobs, old_logprobs: of one shape, 0 outside of samples.
        sample: int64 of this shape, negative outside of samples.
        sample_tokens: of this shape, floating: tokens of the sample of each token; 0 outside of samples.
        samples: numbers in ``sample`` are below this.
        sum_parts: adds up [samples] over the ranks that hold parts of the same samples; collective then.
    """
    sums = sum_over_samples((logprobs - old_logprobs).detach(), sample, samples, sum_parts)
    mean = sums / sample_tokens.clamp(min=1)
    return (logprobs - logprobs.detach() + mean.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)).exp()


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float = 0.0) -> TokenLosses:
    """max(-r A, -clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347); with ``dual`` above 0, where A < 0, at most
    -dual A (1912.09729). All tensors have one shape."""
    plain, bounded = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    loss, is_clipped = torch.maximum(plain, bounded), bounded > plain
    if dual:
        limit = torch.where(advantages < 0, -dual * advantages, torch.inf)
        loss, is_clipped = torch.minimum(loss, limit), is_clipped | (loss > limit)
    return TokenLosses(loss, is_clipped)


def weighted_loss(ratio: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> TokenLosses:
    """-clip(r, 1 - low, 1 + high) A logprob, where the clipped ratio is a constant (CISPO, arXiv 2506.13585)."""
    weight = ratio.detach().clamp(1 - low, 1 + high)
    return TokenLosses(-weight * advantages * logprobs, weight != ratio)


def masked_loss(
    ratio: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> TokenLosses:
    """-r A, but 0 where the probability has risen by more than ``high`` and A > 0, or fallen by more than ``low`` and
    A < 0: a mask of total variation, not of the ratio, which is large for rare tokens without need."""
    rise = (logprobs.exp() - old_logprobs.exp()).detach()
    is_far = torch.where(advantages > 0, rise > high, (advantages < 0) & (rise < -low))
    return TokenLosses((-ratio * advantages).where(~is_far, 0.0), is_far)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> TokenLosses:
    """max((V - R)^2, (clip(V, old - c, old + c) - R)^2) / 2 of each token."""
    plain = (values - returns).square()
    near = values.clamp(old_values - clip, old_values + clip)  # inside of the bounds exactly the value
    bounded = (near - returns).square()
    return TokenLosses(torch.maximum(plain, bounded) / 2, bounded > plain)


SumOverSamples = Callable[[Tensor], Tensor]
"""Gives each token the sum of the values over its sample. Collective if a sample lies on several ranks."""


def correction_weights(
    log_ratio: Tensor, sums: SumOverSamples, of: ResolvedCorrection,
    normalised: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Tensor:  # fmt: skip
    """The factor of the policy loss of each token.

    Args:
        log_ratio: floating, of any shape: old policy of the trainer against that of the rollout; 0 outside of samples.
        normalised: divides the bounded weights by their mean over the step, with `CorrectionConfig.normalize`.

    Returns:
        In the shape of ``log_ratio``; any values outside of samples.
    """
    weights = torch.ones_like(log_ratio)
    if of.level != "none":
        weights = _ratio_at_level(log_ratio, sums, of.level)
        low = 1 / of.high if of.low is None else of.low
        if of.mode == "mask":
            weights = _inside(weights, weights, low, of.high)
        weights = normalised(weights.clamp(low if of.mode == "clip" else None, of.high))
    if of.reject_level != "none":
        ratio = _ratio_at_level(log_ratio, sums, of.reject_level)
        low = 1 / of.reject_high if of.reject_low is None else of.reject_low
        weights = _inside(weights, ratio, low, of.reject_high)
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
