"""Rows have the figures of all ranks: the spread of what each one measures, and every dropped assignment."""

import pytest

from tests.ranks.rank_figures import LAYOUTS
from tests.small_run import TINY

MOE_LAYERS = 2
"""One of the two decoder layers, and the prediction layer."""


def test_rows_have_the_figures_of_all_ranks(server):
    layouts = {row["name"]: row for row in server.rows("rank_figures.main")}
    assert layouts.keys() == LAYOUTS.keys()
    for layout in layouts.values():
        assert len(layout["rows"]) == 3
        for row in layout["rows"]:
            assert [row[f"memory_peak_gib/{part}"] for part in ("min", "mean", "max")] == [60.5, 65.25, 70.0]
            assert [row[f"gpu_utilization_ratio/{part}"] for part in ("min", "mean", "max")] == [0.25, 0.625, 1.0]
            assert {row[f"gpu_power_watts/{part}"] for part in ("min", "mean", "max")} == {300.0}
            assert "gpu_temperature_celsius/max" not in row and "extreme_rank/gpu_temperature_celsius/max" not in row
            ranks = [row[f"extreme_rank/{figure}"] for figure in ("memory_peak_gib/min", "memory_peak_gib/max")]
            assert ranks == [0, 1]
            # The one rank that has a sensor has both.
            assert row["extreme_rank/gpu_power_watts/min"] == row["extreme_rank/gpu_power_watts/max"] == 1
            low, mean, high = (row[f"resident_memory_gib/{part}"] for part in ("min", "mean", "max"))
            assert 0 < low <= high and mean == pytest.approx((low + high) / 2, rel=1e-12)
            # All assignments of all ranks, dropped or not: the ratio is of these.
            assigned = row["batch_tokens"] * TINY["num_experts_per_tok"] * MOE_LAYERS
            dropped = row["expert_overflow_count"]
            assert isinstance(dropped, int) and assigned / 4 <= dropped < assigned
            assert row["expert_overflow_ratio"] == dropped / assigned
        assert "GiB  70.0" in layout["said"]  # the line has the largest alone
