"""Ranks that agree: the same numbers on all of them, and an end within the timeout while one of them is away."""

import pytest

from tests.processes import HANG_SECONDS
from tests.ranks.agreements import FAULTS, NAMES, RANKS, VICTIM, values


@pytest.fixture(scope="module")
def rows(server):
    return {row["name"]: row for row in server.rows("agreements.main")}


def test_sums_and_spreads_are_those_of_all_ranks(rows):
    spread = {}
    for name in NAMES:
        of_ranks = {rank: values(rank)[name] for rank in range(RANKS) if name in values(rank)}
        if of_ranks:
            least, most = min(of_ranks.values()), max(of_ranks.values())
            spread |= {
                f"{name}/min": least,
                f"{name}/mean": sum(of_ranks.values()) / len(of_ranks),
                f"{name}/max": most,
            }
            for part, extreme in (("min", least), ("max", most)):
                last = max(rank for rank, value in of_ranks.items() if value == extreme)
                spread[f"extreme_rank/{name}/{part}"] = last
    for row in rows["late"]["ranks"]:
        assert row["sums"] == {"x": [sum(range(RANKS)), RANKS]}
        assert row["spread"].keys() == spread.keys()
        assert row["spread"] == pytest.approx(spread, rel=1e-15)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_is_away_ends_the_others_within_the_timeout(rows, fault):
    waiting = [row for row in rows[fault]["ranks"] if "error" in row]
    assert not any(rows[fault]["codes"]) and len(waiting) >= RANKS - 1
    assert all(row["seconds"] < HANG_SECONDS for row in waiting)  # without a timeout they wait for half an hour
    assert waiting[4]["awaited"] == [VICTIM]
    if fault == "late":
        assert "Timed out waiting" in waiting[4]["error"]
