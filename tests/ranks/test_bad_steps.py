"""A NaN at any place, on any rank: exactly one step is skipped, on all ranks, and no bit of the state changes."""


def test_a_nan_anywhere_on_any_rank_skips_one_step_and_changes_nothing(server):
    rows = server.rows("bad_steps.main")
    assert {row["layout"] for row in rows} == {"shards", "copies"} and len(rows) == 2
    for row in rows:
        assert len(row["bad"]) == 5 * 2  # places, ranks
        steps = range(1, len(row["skipped"]) + 1)
        assert row["skipped"] == [sum(bad <= step for bad in row["bad"]) for step in steps], row
        for kept in row["kept"]:  # of each rank: whether a step left weights, states and biases as they were
            assert kept == [step in row["bad"] for step in steps], row
        assert "step 2 skipped: loss or gradient norm is not finite; samples 4 to 7" in row["log"], row
