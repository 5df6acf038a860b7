"""Tokens that DeepEP sends give the result and gradients of the all-to-all, by calls that keep its contract: those of a
fake, which is strict. No GPU has run it."""

import pytest

from tests.ranks import deepep

BOUND = 1e-2
"""Of the norm: a rank rounds the sum of what its experts compute of a token to BF16, and then the sum of all ranks."""
CALLS = {
    "none": "dispatch+ combine cached combine+",
    # A recomputation sends tokens by the handle of the first run, and no results.
    "full": "dispatch+ combine cached cached combine+",
    # It has kept the rows.
    "selective": "dispatch+ combine cached combine+",
}
"""By checkpointing: a forward and a backward of a layer."""


@pytest.fixture(scope="module", params=[2, 4])
def figures(server, request) -> list[dict]:
    """The rows that the cases of a world size print, by case."""
    rows = server.rows("deepep.main", ranks=request.param)
    assert len(rows) == len(deepep.CASES[request.param])
    return rows


def test_results_and_gradients_are_those_of_the_all_to_all(figures):
    for row in figures:
        wrong = {name: error for name, error in row["errors"].items() if not error < BOUND}
        assert not wrong, row["case"]


def test_experts_and_router_get_the_bits_of_the_all_to_all(figures):
    for row in figures:
        assert row["differ"] == [], row["case"]


def test_a_recomputation_sends_only_what_it_must(figures):
    for row in figures:
        assert row["calls"] == [CALLS[row["case"]["checkpointing"]]], row["case"]
