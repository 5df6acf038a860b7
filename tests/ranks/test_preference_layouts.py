"""Losses of preferences are the same on every layout, with all weights and with adapters, whose base may be in 4 bits:
loss, accuracy or divergence, gradients."""

import math

import pytest

from tests.ranks.preference_layouts import CASES
from tests.ranks.server import differences
from tests.ranks.test_sharded_layouts import INTEGERS

BOUNDS = {
    # FP32 log-probabilities, of which some tens make a margin; the sums are in FP64.
    "loss_error": 2e-6,
    "other_error": 1e-12,
    "gradient_error": 1e-5,
}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, name, marks=[INTEGERS] if layout.base else [])
        for ranks, cases in CASES.items() for name, (_, layout) in cases.items()
    ],
)  # fmt: skip
def test_a_layout_equals_one_process(case_row, ranks, case):
    row = case_row("preference_layouts.main", ranks, case=case)
    assert abs(row["loss"] - math.log(2)) > 1e-3  # the policy is not its reference
    # The divergence is a mean of log-ratios of FP32 log-probabilities, of size 1.
    bounds = BOUNDS | {"other_error": 1e-6} if "kl" in row else BOUNDS
    assert row.get("kl", 1.0) > 0.0
    assert differences(row, bounds) == []
