"""Extreme routing, padding, windows and compiled layers on two processes compute what one process does."""


def test_every_case_equals_one_process(server):
    # A compilation after the second step ends the process.
    rows = server.rows("edge_cases.main", ranks=2, seconds=500)
    assert len(rows) == 16
    for row in rows:
        case = row["case"]
        if case["favourite"] is not None:
            assert row["busiest"] == row["assignments"], "the case is as extreme as it says"
        assert row["counts_equal"], case
        # FP32 sums in another order, over the gradients of four steps.
        assert row["loss_error"] < 1e-6, case
        assert row["gradient_error"][0] < 1e-5, (case, row["gradient_error"])
