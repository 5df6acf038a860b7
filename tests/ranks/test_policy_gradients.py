"""Policy and critic on fixed samples have the gradients and metrics of one process, on every kind of layout."""

import pytest

from tests.ranks.policy_gradients import ALGORITHMS, LAYOUTS
from tests.ranks.test_sharded_layouts import layout_case

GRADIENT_BOUND = 1e-5
"""FP32 sums in another order."""
METRIC_BOUND = {"rel": 2e-6, "abs": 2e-7}
"""The same; a loss is a small sum of larger terms of both signs."""


@pytest.mark.parametrize(
    ("ranks", "case"), [layout_case(ranks, *row) for ranks, layouts in LAYOUTS.items() for row in layouts.items()]
)
def test_a_layout_equals_one_process(case_row, ranks, case):
    row = case_row("policy_gradients.main", ranks, case=case)
    assert row["of"].keys() == {*(f"{name}/policy" for name in ALGORITHMS), "ppo/critic"}
    for name, of in row["of"].items():
        error, place = of["gradient_error"]
        assert error < GRADIENT_BOUND, f"{name}: {place}"
        assert of["metrics"] == pytest.approx(of["expected"], **METRIC_BOUND), name
    # The case tests something: some tokens are clipped, some are dropped by the correction, and others are not.
    gspo, on_policy = (row["of"][f"{name}/policy"]["expected"] for name in ("gspo", "on_policy"))
    assert 0.05 < gspo["clip_fraction"] < 0.95 and 0.05 < gspo["correction_dropped"] < 0.5
    assert on_policy["clip_fraction"] == 0 and 0.05 < on_policy["correction_dropped"] < 0.9
