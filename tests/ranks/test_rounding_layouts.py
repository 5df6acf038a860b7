"""Stochastic rounding of BF16 weights gives the same bits on two processes as on one."""

import pytest

from tests.ranks.rounding_layouts import CASES


@pytest.fixture(scope="module")
def rows(server) -> dict[str, dict]:
    """The rows of the program by case; one run has all cases."""
    return {row["case"]: row for row in server.rows("rounding_layouts.main", ranks=2)}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_round_as_one(rows, case):
    assert rows[case]["differing"] == []
    assert rows[case]["idle"] == []  # every weight was rounded
