"""Signals at moments that are hard to hit, and a rank that leaves: stops.py, which says how to run many."""

from tests.processes import HANG_SECONDS


def test_a_signal_at_any_moment_loses_nothing_and_a_second_one_ends_at_once(server):
    rows = {row["moment"]: row for row in server.rows("stops.main")}
    for moment in ("step", "start", "load", "count", "sum", "validation", "save"):
        row = rows[moment]
        assert row["code"] == 75, row
        assert row["saved"] == row["step"] >= 3, row  # what was computed is saved; nothing before it is lost
        assert "Traceback" not in row["said"], row
    assert rows["step"]["step"] == 3  # the signal came in this step, which was ended
    second = rows["second"]
    assert second["code"] not in (0, 75) and second["seconds"] < HANG_SECONDS, second  # a rank would sleep on
    for moment in ("leave first", "leave"):
        row = rows[moment]
        assert row["code"] == 1 and "rank 1 ended with exit code 7" in row["said"], row
    assert rows["none"]["code"] == 0 and rows["none"]["saved"] == rows["none"]["step"] == 12, rows["none"]
