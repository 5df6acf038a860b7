"""Columns that the observer adds to rows of the trainer."""

import pytest

from glm46.engine.observe import observers
from glm46.engine.observe.exporter import Exporter
from glm46.engine.observe.kept_warnings import KeptWarnings
from glm46.engine.observe.start_times import StartTimes


class _Report:
    def __init__(self):
        self.rows = []

    def train(self, row):
        self.rows.append(row)


class _Hardware:
    def read(self):
        return {"resident_memory_gib": 2.0}


@pytest.mark.parametrize("peak, mfu", [(4e12, {"mfu": 0.125}), (None, {})])
def test_a_training_row_gets_hardware_of_all_ranks_and_mfu_if_the_peak_is_known(tmp_path, monkeypatch, peak, mfu):
    monkeypatch.setattr(
        observers, "spread_over_ranks", lambda values, names: {f"{key}/max": values[key] for key in values}
    )
    observer = observers.Observers(tmp_path, Exporter("run", None, print), KeptWarnings(), StartTimes("the command"))
    observer._report = _Report()
    observer._hardware = _Hardware()
    observer._peak_flops = peak
    observer.row("train", {"step": 1, "tflops_per_device": 0.5})
    (row,) = observer._report.rows
    assert row == {"step": 1, "tflops_per_device": 0.5, "resident_memory_gib/max": 2.0} | mfu
