"""What the observer adds to a run: throughput, hardware, the time of the start, and warnings of loading."""

import json
import logging
import mmap
from types import SimpleNamespace

import pytest
import torch

from glm46.engine.observe import observers
from glm46.engine.observe.exporter import Exporter
from glm46.engine.observe.hardware import (
    HardwareMonitor,
    device_peak_flops,
    measured_matmul_flops,
    process_bytes,
    read_sensor,
)
from glm46.engine.observe.kept_warnings import KeptWarnings
from glm46.engine.observe.metrics import find_metric
from glm46.engine.observe.start_times import VARIABLE, StartTimes
from glm46.engine.training.throughput import ThroughputMeter


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


# Metrics are computed in FP64; the tolerance covers the rounding of a few operations.
_CLOSE = 1e-12


class _Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_throughput_leaves_validation_out_and_starts_anew():
    clock = _Clock()
    meter = ThroughputMeter(num_ranks=2, clock=clock)
    for _ in range(4):
        clock.now += 1.0
        meter.add_step(1000, data_seconds=0.25, flops=1e12, budget_tokens=1000, model_seconds=0.875)
    with meter.excluded():
        clock.now += 60.0
    row = meter.read()
    assert row == pytest.approx(
        {
            "tokens_per_second": 1000.0,
            "tokens_per_second_per_device": 500.0,
            "tflops_per_device": 0.5,
            "step_seconds": 1.0,
            "data_seconds": 0.25,
            "overhead_ratio": 0.125,
        },
        rel=_CLOSE,
    )
    for name in row:
        find_metric(name)
    clock.now += 2.0
    meter.add_step(1000, 0.0, 1e12, budget_tokens=4000, model_seconds=2.0)
    packed = meter.read()
    assert packed["tokens_per_second"] == 500.0 and packed["budget_tokens_per_second"] == 2000.0
    assert packed["overhead_ratio"] == 0.0


def test_a_cpu_has_no_peak_for_mfu_and_a_measured_matmul_is_measured_once():
    """A busy CPU, measured by one rank while the others wait, gave ratios above 1."""
    assert device_peak_flops(torch.device("cpu"), torch.float32) is None
    peak = measured_matmul_flops(torch.float32, torch.get_num_threads())
    assert peak == measured_matmul_flops(torch.float32, torch.get_num_threads())
    # Any CPU that runs torch does more than 1 GFLOP/s and less than 100 TFLOP/s in FP32.
    assert 1e9 < peak < 1e14


def test_resident_memory_grows_with_memory_that_is_touched():
    before = process_bytes()
    size = 64 * 2**20
    # A mapping of its own: a tensor may land on pages that an earlier test freed and the allocator kept.
    with mmap.mmap(-1, size) as block:
        block[::4096] = b"x" * (size // 4096)
        grown = process_bytes() - before
    # Other threads of this process may free a little meanwhile.
    assert 0.9 * size < grown < 1.5 * size


def test_a_cpu_reports_its_memory_and_what_a_sensor_of_ours_does():
    row = HardwareMonitor(torch.device("cpu")).read()
    assert set(row) == {"resident_memory_gib"}
    row = HardwareMonitor(torch.device("cpu"), lambda: {"gpu_power_watts": 1.0}).read()
    assert set(row) == {"resident_memory_gib", "gpu_power_watts"}


def test_values_of_nvml_have_the_units_of_their_columns():
    class NVMLError(Exception):
        pass

    def fail(handle):
        raise NVMLError

    board = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=75, memory=10),
        nvmlDeviceGetTemperature=lambda handle, kind: 64,
        nvmlDeviceGetPowerUsage=lambda handle: 512_500,
    )
    row = {"gpu_utilization_ratio": 0.75, "gpu_temperature_celsius": 64.0, "gpu_power_watts": 512.5}
    assert read_sensor(board, "handle") == row
    board.nvmlDeviceGetPowerUsage = fail  # a board without this sensor
    assert read_sensor(board, "handle") == {name: row[name] for name in row if name != "gpu_power_watts"}


def test_the_begin_is_handed_on():
    times = StartTimes("the failure", 12.5)
    assert StartTimes.inherited({VARIABLE: times.to_text()}).to_text() == times.to_text()


@pytest.mark.parametrize("others", [[], [[["ranks", 12.5]]], [None], ["12.5"], [12.5, 13.5]])
def test_the_form_of_another_version_begins_now(others, monkeypatch):
    monkeypatch.setattr("glm46.engine.observe.start_times.time.time", lambda: 100.0)
    times = StartTimes.inherited({VARIABLE: json.dumps(["the failure", *others])})
    assert times.to_text() == '["the failure", 100.0]'
    assert times.first_step() == "first step 0.0 s after the failure" and times.first_step() is None


def test_warnings_are_printed_once_and_written_when_there_is_a_log(capsys):
    kept, log, written = KeptWarnings(), logging.getLogger("glm46.storage.huggingface.import_weights"), []
    with kept.listening():
        log.warning("a plain %s folder", "DCP")
        log.info("not this")
        with kept.written(written.append):
            log.warning("while training")
            assert written == ["a plain DCP folder", "while training"]
        log.warning("between two logs")
        with kept.written(written.append):
            assert written[2:] == ["between two logs"]
    log.warning("after the run")
    assert written[3:] == [] and capsys.readouterr().err.splitlines()[:3] == [
        "a plain DCP folder", "while training", "between two logs"
    ]  # fmt: skip
