"""Ranks of unequal pipeline stages make process groups together."""

import pytest


@pytest.mark.parametrize("key_heads", [4, 1])
def test_every_rank_asks_for_the_same_groups_in_one_order(server, key_heads):
    (row,) = server.rows("unequal_stages.main", key_heads, ranks=8)
    assert row["dense"] == [[True]] * 4 + [[False]] * 4
    assert row["asked"] == [row["asked"][0]] * 8
    # Muon's for the matrices of the dense stage, which its four ranks share; beside them those that share a key head.
    assert ["all", [0, 1, 2, 3]] in row["asked"][0] and (["all", [6, 7]] in row["asked"][0]) == (key_heads == 1)
