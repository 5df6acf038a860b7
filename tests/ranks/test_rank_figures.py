"""Rows have the figures of all ranks: the spread of what each one measures, and every dropped assignment."""

import sys
from functools import partial
from pathlib import Path

import pytest

from glm46.engine.observe import observers
from glm46.engine.observe.hardware import HardwareMonitor
from glm46.engine.observe.history import read_history
from glm46.operate.launch.train_rank import train
from tests.builders import TINY, small_config
from tests.harness import Ranks, call, in_halves, this_rank

LAYOUTS = {
    "fsdp": {}, "experts": {"expert_parallel_degree": 2}, "tensor": {"tensor_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2}, "context": {"context_parallel_degree": 2},
}  # fmt: skip
SENSORS = (
    {"memory_peak_gib": 60.5, "gpu_utilization_ratio": 0.25},
    {"memory_peak_gib": 70.0, "gpu_utilization_ratio": 1.0, "gpu_power_watts": 300.0},
)
"""By rank; the first GPU tells nothing of its power."""


def train_with_sensors(config) -> None:
    """On each rank."""
    observers.HardwareMonitor = partial(HardwareMonitor, sensor=lambda: SENSORS[this_rank()])
    sys.exit(train(config))


def run_layouts(source: Path, folder: Path) -> list[dict]:
    """Three steps on each layout."""

    def run(label: str) -> dict:
        config = small_config(
            source, folder / label, parallelism=LAYOUTS[label], checkpoint={"enable": False},
            model={"num_key_value_heads": 2}, moe={"capacity_factor": 0.75},
            training={"steps": 3, "global_batch_size": 8},
        )  # fmt: skip
        ranks = Ranks(2, train_with_sensors, config)
        ranks.results()
        return {"said": ranks.text(0), "rows": read_history(folder / label / "metrics.jsonl")}

    return in_halves(list(LAYOUTS), run)


MOE_LAYERS = 2
"""One of the two decoder layers, and the prediction layer."""


def test_rows_have_the_figures_of_all_ranks(source_folder, tmp_path):
    for layout in call(run_layouts, source_folder, tmp_path):
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
