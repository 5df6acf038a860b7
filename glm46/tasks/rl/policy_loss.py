"""Policy losses per token, before any reduction, and weights that correct for the mismatch between inference engine and
trainer. `correction_weights` covers TIS (mode "truncate"), IcePop ("mask") and MIS (`reject_level`)."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glm46.config.rl import ResolvedCorrection

LARGEST_LOG_RATIO = 20.0
"""Bound of log-ratios: its exp is far outside of every clip, and finite in FP32. Beyond it `token_ratio` has no
gradient, and `sequence_ratio` keeps the gradient of the bound."""


class TokenLosses(NamedTuple):
    """Losses of tokens. Both tensors have the shape of the inputs."""

    loss: Tensor
    is_clipped: Tensor
    """bool: a bound replaced the ratio in the loss, or removed the loss."""


def kl_estimate(logprobs: Tensor, others: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate KL(policy | other) at tokens sampled from the policy (J. Schulman, "Approximating KL Divergence").

    Args:
        logprobs, others: log-probabilities of the same tokens, in the same shape.
        estimator: with d = logprobs - others: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. k3 has no bound, because
            a bounded one has no gradient where the policy is furthest from the other one.
    """
    d = logprobs - others
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d


def sum_by_sample(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Sum values over the tokens of each sample; returns [samples].

    Args:
        values: of any shape, 0 outside of samples.
        sample: int64 of the same shape: number of each token's sample, negative outside of samples.
        samples: number of samples.
    """
    return values.new_zeros(samples).index_add(0, sample.clamp(min=0).flatten(), values.flatten())


def sum_over_samples(
    values: Tensor, sample: Tensor, samples: int, sum_parts: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """Give each token the sum over its sample, 0 outside of samples.

    Args:
        values, sample, samples: as in `sum_by_sample`; values outside of samples do not count.
        sum_parts: function that adds up the sums, [samples], of the ranks that hold parts of the same samples;
            collective then.
    """
    sums = sum_parts(sum_by_sample(values.where(sample >= 0, 0.0), sample, samples))
    return sums[sample.clamp(min=0)].where(sample >= 0, 0.0)


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Divide the new by the old probability of each token."""
    return (logprobs - old_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    sample: Tensor,
    sample_tokens: Tensor,
    samples: int,
    sum_parts: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Compute the geometric mean of a sample's ratios, at each of its tokens (GSPO, arXiv 2507.18071).

    The gradient is that of the paper's GSPO-token, s_i * grad(logprob) at each token. It equals the gradient of the
    mean wherever the loss weighs the tokens of a sample equally, and differs where advantages or corrections differ
    between the tokens.

    Args:
        logprobs, old_logprobs: in the same shape, 0 outside of samples.
        sample: int64 of this shape: number of each token's sample, negative outside of samples.
        sample_tokens: floating, of this shape: number of tokens of each token's sample; 0 outside of samples.
        samples: numbers in ``sample`` are below this.
        sum_parts: see `sum_over_samples`.
    """
    sums = sum_over_samples((logprobs - old_logprobs).detach(), sample, samples, sum_parts)
    mean = sums / sample_tokens.clamp(min=1)
    return (logprobs - logprobs.detach() + mean.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)).exp()


def ppo_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLosses:
    """Compute max(-r A, -clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347). All tensors have the same shape."""
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    return TokenLosses(torch.maximum(plain, bounded), bounded > plain)


def cispo_loss(ratio: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> TokenLosses:
    """Compute -clip(r, 1 - low, 1 + high) A logprob, with the clipped ratio as a constant (CISPO, arXiv 2506.13585)."""
    weight = ratio.detach().clamp(1 - low, 1 + high)
    return TokenLosses(-weight * advantages * logprobs, weight != ratio)


def mask_loss(ratio: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> TokenLosses:
    """Compute -r A logprob with the ratio as a constant, and 0 unless 1 - low < r < 1 + high.

    Both bounds hold whatever the sign of the advantage: a token that is far from the policy that generated it teaches
    nothing. With a gradient through the ratio the sign would be wrong where the probability is below 1 / e.

    Source: arXiv 2602.15763, section 4.1.2, equations 3 to 5.
    """
    weight = ratio.detach()
    is_outside = (weight <= 1 - low) | (weight >= 1 + high)
    return TokenLosses((-weight * advantages * logprobs).where(~is_outside, 0.0), is_outside)


def tv_loss(
    ratio: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> TokenLosses:
    """Compute -r A, masked to 0 where the probability rose by more than ``high`` and A > 0, or fell by more than
    ``low`` and A < 0. The mask uses the difference of probabilities (total variation) because ratios of rare tokens
    are large even for small changes."""
    rise = (logprobs.exp() - old_logprobs.exp()).detach()
    is_far = torch.where(advantages > 0, rise > high, (advantages < 0) & (rise < -low))
    return TokenLosses((-ratio * advantages).where(~is_far, 0.0), is_far)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> TokenLosses:
    """Compute max((V - R)^2, (clip(V, old - c, old + c) - R)^2) / 2 for each token."""
    plain = (values - returns).square()
    clipped = values.clamp(old_values - clip, old_values + clip)  # inside the bounds this is exactly the value
    bounded = (clipped - returns).square()
    return TokenLosses(torch.maximum(plain, bounded) / 2, bounded > plain)


SampleSum = Callable[[Tensor], Tensor]
"""Gives each token the sum of the values over its sample. Collective if a sample lies on several ranks."""


def correction_weights(
    log_ratio: Tensor,
    sample_sum: SampleSum,
    config: ResolvedCorrection,
) -> Tensor:
    """Compute the factor of each token's policy loss that corrects the mismatch of engine and trainer.

    Args:
        log_ratio: floating, of any shape: old log-probability in the trainer minus the one in the rollout; 0 outside
            of samples.
        sample_sum: gives each token the sum over its sample.

    Returns:
        Weights in the shape of ``log_ratio``; undefined outside of samples.
    """
    weights = torch.ones_like(log_ratio)
    if config.level != "none":
        weights = _ratio_at_level(log_ratio, sample_sum, config.level)
        low = 1 / config.high if config.low is None else config.low
        if config.mode == "mask":
            weights = _inside(weights, weights, low, config.high)
        # No effect after "mask", whose weights are inside already.
        weights = weights.clamp(low if config.mode == "clip" else None, config.high)
    if config.reject_level != "none":
        ratio = _ratio_at_level(log_ratio, sample_sum, config.reject_level)
        low = 1 / config.reject_high if config.reject_low is None else config.reject_low
        weights = _inside(weights, ratio, low, config.reject_high)
    return weights


def _ratio_at_level(log_ratio: Tensor, sample_sum: SampleSum, level: str) -> Tensor:
    """Compute exp of each token's log-ratio, or of its sum or mean over the sample, with exponents of at most 20."""
    if level != "token":
        log_ratio = sample_sum(log_ratio) / (
            sample_sum(torch.ones_like(log_ratio)).clamp(min=1) if level == "geometric" else 1
        )
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _inside(weights: Tensor, ratio: Tensor, low: float, high: float) -> Tensor:
    return weights.where((ratio >= low) & (ratio <= high), 0.0)
