"""Throughput and hardware metrics against numbers computed by hand."""

import mmap
from types import SimpleNamespace

import pytest
import torch

from glm46.engine.observe.hardware import (
    HardwareMonitor,
    device_peak_flops,
    measured_matmul_flops,
    process_bytes,
    read_sensor,
)
from glm46.engine.observe.metrics import find_metric
from glm46.engine.training.throughput import ThroughputMeter

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
