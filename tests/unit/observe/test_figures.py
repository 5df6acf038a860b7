"""Balance, throughput and hardware figures against numbers done by hand."""

import math
import mmap

import pytest
import torch

from glm46.observe.balance import balance_metrics
from glm46.observe.hardware import HardwareMonitor, device_peak_flops, measured_matmul_flops, process_bytes
from glm46.observe.metrics import find_metric
from glm46.observe.throughput import ThroughputMeter

# Figures are computed in FP64; what remains is the rounding of a handful of operations.
_CLOSE = 1e-12


def test_an_even_load_has_no_deviation():
    figures = balance_metrics(torch.full((3, 8), 25), torch.zeros(3, dtype=torch.int64))
    assert figures == {
        "expert_balance_cv": 0.0,
        "expert_balance_cv_max": 0.0,
        "expert_load_max_ratio": 1.0,
        "expert_load_min_ratio": 1.0,
        "expert_overflow_ratio": 0.0,
        "dead_experts": 0.0,
    }
    for name in figures:
        find_metric(name)


def test_an_uneven_load():
    tokens = torch.tensor([[10, 10, 10, 10], [0, 0, 20, 60]])
    figures = balance_metrics(tokens, torch.tensor([0, 30]))
    # Second layer: mean 20, deviations -20, -20, 0, 40, variance (400 + 400 + 0 + 1600) / 4.
    cv = math.sqrt(600) / 20
    assert figures["expert_balance_cv"] == pytest.approx(cv / 2, rel=_CLOSE)
    assert figures["expert_balance_cv_max"] == pytest.approx(cv, rel=_CLOSE)
    assert figures["expert_load_max_ratio"] == 3.0
    assert figures["expert_load_min_ratio"] == 0.0
    assert figures["dead_experts"] == 2.0
    assert figures["expert_overflow_ratio"] == pytest.approx(30 / 150, rel=_CLOSE)


def test_layers_without_tokens_and_models_without_experts():
    idle = balance_metrics(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert all(math.isfinite(value) for value in idle.values())
    assert (idle["expert_balance_cv"], idle["expert_load_max_ratio"], idle["dead_experts"]) == (0.0, 1.0, 4.0)
    assert balance_metrics(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) == {}


class _Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_throughput_leaves_validation_out_and_starts_anew():
    clock = _Clock()
    meter = ThroughputMeter(peak_flops=4e12, num_ranks=2, clock=clock)
    for _ in range(4):
        clock.now += 1.0
        meter.add_step(1000, data_seconds=0.25, flops=1e12)
    with meter.left_out():
        clock.now += 60.0
    row = meter.read()
    assert row == pytest.approx(
        {
            "tokens_per_second": 1000.0,
            "tokens_per_second_per_device": 500.0,
            "tflops_per_device": 0.5,
            "step_seconds": 1.0,
            "data_seconds": 0.25,
            "mfu": 0.125,
        },
        rel=_CLOSE,
    )
    for name in row:
        find_metric(name)
    clock.now += 2.0
    meter.add_step(1000, 0.0, 1e12)
    assert meter.read()["tokens_per_second"] == 500.0


def test_an_unknown_peak_gives_no_mfu():
    meter = ThroughputMeter(None, 1)
    meter.add_step(1, 0.0, 1.0)
    assert "mfu" not in meter.read()


def test_the_measured_peak_is_measured_once():
    peak = device_peak_flops(torch.device("cpu"), torch.float32)
    assert peak == measured_matmul_flops(torch.float32, torch.get_num_threads())
    # Any CPU that runs torch does more than 1 GFLOP/s and less than 100 TFLOP/s in FP32.
    assert 1e9 < peak < 1e14


def test_resident_memory_grows_with_memory_that_is_touched():
    before = process_bytes()
    if before is None:
        pytest.skip("no /proc on this system")
    size = 64 * 2**20
    # A mapping of its own: a tensor may land on pages that an earlier test freed and the allocator kept.
    with mmap.mmap(-1, size) as block:
        block[::4096] = b"x" * (size // 4096)
        grown = process_bytes() - before
    # Other threads of this process may free a little meanwhile.
    assert 0.9 * size < grown < 1.5 * size


def test_a_cpu_reports_its_memory_only():
    row = HardwareMonitor(torch.device("cpu")).read()
    assert set(row) <= {"resident_memory_gib"}
