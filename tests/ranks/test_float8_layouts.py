"""FP8 on a layout computes what one process computes from the same operands."""

import pytest

from tests.ranks.float8_layouts import CASES
from tests.ranks.server import differences

BOUNDS = {
    "loss_error": 1e-6,
    # Seen are 1e-6 and less, the order of FP32 sums. A sum that differs by 2**-24 can round to the next of 8 bits, at
    # most one of some thousand elements here, and moves it by 2**-4.
    "gradient_error": 1e-4,
}


@pytest.mark.parametrize("case", CASES)
def test_a_layout_in_fp8_equals_one_process(case_row, case):
    row = case_row("float8_layouts.main", 2, case=case, seconds=600)
    assert differences(row, BOUNDS) == []
    assert 5e-3 < row["gradients_of_fp8"] < 0.2  # FP8 itself: E4M3 keeps 4 bits
