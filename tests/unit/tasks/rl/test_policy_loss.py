"""Advantages and losses of tokens against their plain formulas in FP64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.tasks.rl.fields import (
    REWARD_ROUNDING,
    differing_groups,
    generalised_advantages,
    group_advantages,
    whiten,
)
from glm46.tasks.rl.policy_loss import kl_estimate, mask_loss, token_ratio

FORMULAS = {
    "k1": (lambda d: d, lambda d: torch.ones_like(d)),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: (-d).exp() - 1 + d, lambda d: 1 - (-d).exp()),
}
"""Value and derivative by d, the logarithm of the policy's probability over the other one."""


@pytest.mark.parametrize("estimator", list(FORMULAS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_penalty_and_its_gradient_are_those_of_the_formula(estimator, dtype):
    d = torch.tensor([-40.0, -20.5, -5.0, -2.7, -0.5, -1e-3, 0.0, 1e-3, 0.5, 2.7, 15.0, 25.0, 60.0], dtype=dtype)
    logprobs = (d - 70).requires_grad_()
    found = kl_estimate(logprobs, torch.full_like(d, -70.0), estimator)
    found.sum().backward()
    value, derivative = FORMULAS[estimator]
    exact = (logprobs.detach() + 70).double()
    rtol = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), value(exact), rtol=rtol, atol=1e-7 if dtype is torch.float32 else 1e-15)
    torch.testing.assert_close(logprobs.grad.double(), derivative(exact), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("d", "gradient"), [(-19.0, True), (19.0, True), (21.0, False)])
def test_a_ratio_has_a_gradient_up_to_its_stated_bound(d, gradient):
    logprobs = torch.tensor([d], dtype=torch.float64, requires_grad=True)
    ratio = token_ratio(logprobs, torch.zeros(1, dtype=torch.float64))
    ratio.sum().backward()
    assert ratio.item() == pytest.approx(torch.tensor(min(d, 20.0), dtype=torch.float64).exp().item())
    assert bool(logprobs.grad) == gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 0.5])
def test_a_masked_loss_is_zero_from_both_bounds_on(advantage, dtype):
    """At the bounds themselves too, which are powers of two and therefore exact."""
    ratio = torch.tensor([1e-6, 0.49, 0.5, 0.51, 0.9, 1.0, 1.7, 1.99, 2.0, 2.01, 1e6], dtype=dtype)
    logprobs = torch.linspace(-9, -0.01, len(ratio), dtype=dtype).requires_grad_()
    losses = mask_loss(ratio, logprobs, torch.full_like(ratio, advantage), 0.5, 1.0)
    losses.loss.sum().backward()
    weight = torch.tensor([0, 0, 0, 0.51, 0.9, 1.0, 1.7, 1.99, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(
        losses.loss.double(), -weight * advantage * logprobs.detach().double(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(logprobs.grad.double(), -weight * advantage, rtol=1e-6, atol=0)
    assert torch.equal(losses.is_clipped, weight == 0)


def test_the_weight_of_a_masked_loss_is_a_constant():
    """Through the ratio, a token of probability below 1 / e would have a gradient of the wrong sign."""
    logprobs = torch.tensor([-3.0, -0.2], dtype=torch.float64, requires_grad=True)
    ratio = token_ratio(logprobs, logprobs.detach())
    mask_loss(ratio, logprobs, torch.ones(2, dtype=torch.float64), 0.2, 0.28).loss.sum().backward()
    assert logprobs.grad.tolist() == [-1.0, -1.0]


NUMBERS = st.floats(-3, 3, allow_nan=False, width=32)
GROUPED = st.lists(st.tuples(st.integers(-2, 3), NUMBERS), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(GROUPED)
@pytest.mark.parametrize("baseline", ["group_std", "group_mean", "leave_one_out"])
def test_group_advantages_are_those_of_each_group_alone(baseline, grouped):
    groups, rewards = torch.tensor([g for g, _ in grouped]), torch.tensor([r for _, r in grouped], dtype=torch.float64)
    found = group_advantages(rewards, groups, baseline)
    for number in groups.unique():
        of, own = groups == number, rewards[groups == number].tolist()
        mean = sum(own) / len(own)
        largest = max(abs(reward) for reward in own)
        is_equal = max(own) - min(own) <= REWARD_ROUNDING * max(largest, 0.125)
        if is_equal:
            expected = [0.0] * len(own)
        elif baseline == "leave_one_out":
            expected = [r - (sum(own) - r) / (len(own) - 1) for r in own]
        else:
            deviation = (sum((r - mean) ** 2 for r in own) / (len(own) - 1)) ** 0.5 + 1e-6
            expected = [(r - mean) / (deviation if baseline == "group_std" else 1.0) for r in own]
        torch.testing.assert_close(found[of], torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)
        assert found[of].sum().abs() < 1e-5
        assert differing_groups(rewards, groups)[of].tolist() == [not is_equal] * len(own)


EQUAL_REWARDS = [
    [0.1 + 0.2, 0.3, 0.3, 0.3], [0.1 + 0.2 - 0.3, 0.0], [sum([0.1] * 10), 1.0], [0.7 * 0.1 + 0.9 * 0.3, 0.34],
    [float(torch.tensor(0.3)), 0.3], [0.1, float(torch.nextafter(torch.tensor(0.1), torch.tensor(1.0)))],
    [1e6 * (0.1 + 0.2), 3e5], [float(torch.tensor(0.1) + torch.tensor(0.2) - torch.tensor(0.3)), 0.0], [-1.0, -1.0],
]  # fmt: skip
DIFFERING_REWARDS = [[0.0, 1e-6], [1.0, 1.000001], [0.3, 0.30001], [1000.0, 1000.001], [-0.5, 0.5], [1e6, 1e6 + 1]]


@pytest.mark.parametrize("baseline", ["group_std", "group_mean", "leave_one_out"])
@pytest.mark.parametrize("rewards", EQUAL_REWARDS)
def test_rewards_that_differ_by_rounding_are_equal(rewards, baseline):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    assert not differing_groups(rewards, groups).any()
    assert not group_advantages(rewards, groups, baseline).any()


@pytest.mark.parametrize("rewards", DIFFERING_REWARDS)
def test_rewards_that_differ_by_more_than_rounding_teach(rewards):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    assert differing_groups(rewards, groups).all()
    assert group_advantages(rewards, groups, "group_mean").all()


def test_groups_of_one_three_and_eight():
    """A baseline over the whole batch, which equal groups hide, would give other numbers."""
    groups = torch.tensor([5] * 8 + [1] * 3 + [2])
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    found = group_advantages(rewards, groups, "group_mean")
    assert found.tolist() == pytest.approx([0.875, *[-0.125] * 7, 1 / 3, 1 / 3, -2 / 3, 0.0])
    assert differing_groups(rewards, groups).tolist() == [True] * 11 + [False]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=8),
    st.floats(0, 1), st.floats(0, 1),
)  # fmt: skip
def test_generalised_advantages_are_their_sum(tokens, gamma, gae_lambda):
    """sum over later tokens of (gamma lambda)^n d, on the tokens of the policy alone."""
    rewards, values, is_token = (torch.tensor([column]) for column in zip(*tokens, strict=True))
    rewards, values = rewards.double(), values.double()
    found = generalised_advantages(rewards, values, is_token, gamma, gae_lambda)[0]
    kept = [(r, v) for r, v, here in tokens if here]
    differences = [r + gamma * (kept[t + 1][1] if t + 1 < len(kept) else 0.0) - v for t, (r, v) in enumerate(kept)]
    expected = [
        sum((gamma * gae_lambda) ** (u - t) * differences[u] for u in range(t, len(kept))) for t in range(len(kept))
    ]
    assert found[is_token[0]].tolist() == pytest.approx(expected, abs=1e-9)
    assert not found[~is_token[0]].any()


def test_whitened_values_have_the_mean_0_and_the_variance_1():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    torch.testing.assert_close(whiten(values), (values - values.mean()) / values.std())
