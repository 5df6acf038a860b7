"""What the planner says that a step sends is what a step of the real code sends, call by call and byte by byte."""

from collections import Counter

import pytest

from glm46.planner.plan import resolve_plan
from glm46.planner.traffic import step_traffic
from tests.ranks.planned_steps import CASES, rank_names


@pytest.mark.parametrize("case", rank_names())
def test_planned_traffic_is_what_a_step_sends(case_row, case):
    row = case_row("planned_steps.main", case=case, seconds=600)
    name, _, rank = case.rpartition(".")
    planned = {}
    for traffic in step_traffic(resolve_plan(CASES[name].config(), CASES[name].ranks))[int(rank)]:
        sums = planned.setdefault(f"{traffic.kind} over {row['axes'][traffic.axis]}", Counter())
        sums.update(calls=traffic.calls, nbytes=traffic.nbytes)
    assert {key: [sums["calls"], sums["nbytes"]] for key, sums in planned.items()} == row["traffic"]
