"""FP8 on a layout computes what one process computes from the same operands."""

import pytest

from tests.ranks.float8_layouts import CASES
from tests.ranks.server import differences
from tests.ranks.test_sharded_layouts import SPLIT_BACKWARD

BOUNDS = {
    "loss_error": 1e-6,
    # Of each kind of parameter, the layer that is nearest; seen are 1e-6 and less, the order of FP32 sums.
    "kind_error": 1e-5,
    # Of any parameter. Here and there a sum that differs by 2**-24 rounds to the next of 8 bits. In E5M2 that moves an
    # element by a quarter, and a gradient of some thousand elements by up to 1 %; seen is 0.9 %, in one layer of a
    # case. A wrong scale changes all layers by what FP8 itself does, 10 %.
    "gradient_error": 2e-2,
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[SPLIT_BACKWARD] if name == "split backward" else []) for name in CASES]
)
def test_a_layout_in_fp8_equals_one_process(case_row, case):
    row = case_row("float8_layouts.main", 2, case=case)
    assert differences(row, BOUNDS) == []
    is_piped, has_fp8 = CASES[case].layout.pipeline > 1, "experts_recipe_name" in CASES[case].float8
    if is_piped:  # each of two weights for forward and for backward, once for all micro-batches
        assert row["experts"] > 0 and row["roundings"] == 4 * row["experts"]
    elif "compiled" not in case:
        assert row["roundings"] >= 4 * row["experts"] * has_fp8
    assert 5e-3 < row["gradients_of_fp8"] < 0.2  # FP8 itself: E4M3 keeps 4 bits
