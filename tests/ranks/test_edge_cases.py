"""Extreme routing, padding, windows and compiled layers on two processes compute what one process does."""

import pytest

from tests.ranks.edge_cases import CASES
from tests.ranks.server import differences


def test_no_two_cases_have_one_name():
    assert len(CASES) == 17


@pytest.mark.parametrize("case", CASES)
def test_a_case_equals_one_process(case_row, case):
    row = case_row("edge_cases.main", case=case)  # a compilation after the second step is an error in it
    if CASES[case].favourite is not None:
        assert row["busiest"] == row["assignments"], "the case must be as extreme as its name says"
    assert row["counts_equal"]
    # FP32 sums in another order, over the gradients of three steps.
    assert differences(row, {"loss_error": 1e-6, "gradient_error": 1e-5}) == []
