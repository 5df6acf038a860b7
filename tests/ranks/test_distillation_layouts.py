"""A student learns the same from its teacher on every layout: loss, divergence, gradients. The teacher has a shape of
its own, or is the student without its adapters, whose base may be in 4 bits."""

import pytest

from tests.ranks.distillation_layouts import CASES
from tests.ranks.server import differences
from tests.ranks.test_sharded_layouts import INTEGERS

BOUNDS = {
    # FP32 log-probabilities of single tokens, of which divergences of size 0.01 to 1 are made in FP64.
    "loss_error": 5e-6,
    "other_error": 2e-6,
    "gradient_error": 2e-5,
}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, name, marks=[INTEGERS] if layout.base else [])
        for ranks, cases in CASES.items() for name, (_, layout) in cases.items()
    ],
)  # fmt: skip
def test_a_layout_equals_one_process(case_row, ranks, case):
    row = case_row("distillation_layouts.main", ranks, case=case)
    assert row["kl"] > 1e-4  # the student is not its teacher
    assert differences(row, BOUNDS) == []
