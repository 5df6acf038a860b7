"""DPO computes the same on every layout, with all weights and with adapters: loss, accuracy, gradients."""

import math

import pytest

from tests.ranks.preference_layouts import LAYOUTS
from tests.ranks.server import differences

BOUNDS = {
    # FP32 log-probabilities, of which some tens make a margin; the sums are in FP64.
    "loss_error": 2e-6,
    "accuracy_error": 1e-12,
    "gradient_error": 1e-5,
}


@pytest.mark.parametrize(("ranks", "case"), [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts])
def test_a_layout_equals_one_process(case_row, ranks, case):
    row = case_row("preference_layouts.main", ranks, case=case)
    assert abs(row["loss"] - math.log(2)) > 1e-3  # the policy is not its reference
    assert differences(row, BOUNDS) == []
