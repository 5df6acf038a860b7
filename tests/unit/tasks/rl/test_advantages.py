"""Advantages by their definitions, for groups of any sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.tasks.rl.fields import differing_groups, generalised_advantages, group_advantages, whiten

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
        if len(set(own)) == 1:
            expected = [0.0] * len(own)
        elif baseline == "leave_one_out":
            expected = [r - (sum(own) - r) / (len(own) - 1) for r in own]
        else:
            deviation = (sum((r - mean) ** 2 for r in own) / (len(own) - 1)) ** 0.5 + 1e-6
            expected = [(r - mean) / (deviation if baseline == "group_std" else 1.0) for r in own]
        torch.testing.assert_close(found[of], torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)
        assert found[of].sum().abs() < 1e-5
        assert differing_groups(rewards, groups)[of].tolist() == [len(set(own)) > 1] * len(own)


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
