"""Metrics of speed and hardware: tokens per second and MFU, peak FLOP/s, memory, utilization, temperature, power."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from glm46.engine.observe.peaks import find_accelerator

_GIB = 2**30
_PEAK_MATRIX_SIZE = 1024
_PEAK_ROUNDS = 12


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device, the reference for MFU; None if unknown.

    For a GPU the vendor's BF16 peak from the table, None in other dtypes. A CPU has none: what a matmul reaches beside
    other programs is no peak, and steps would go beyond it.
    """
    if device.type == "cuda":
        accelerator = find_accelerator(torch.cuda.get_device_name(device))
        return accelerator.bf16_flops if accelerator and dtype == torch.bfloat16 else None
    return None


@functools.cache
def measured_matmul_flops(dtype: torch.dtype, threads: int) -> float:
    """Best FLOP/s of a square matmul on this CPU. Takes a fraction of a second, once per process.

    Args:
        threads: torch's number of threads, part of the cache key.
    """
    size = _PEAK_MATRIX_SIZE
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    out = torch.empty(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(_PEAK_ROUNDS):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def process_bytes(field: str = "VmRSS") -> int:
    """Main memory of this process in bytes; with "VmHWM" its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class HardwareMonitor:
    """Reads the hardware metrics of this rank's device."""

    def __init__(self, device: torch.device, sensor: Callable[[], dict[str, float]] | None = None):
        """Open the sensors.

        Args:
            sensor: returns further values by name; None for those of NVML, if the device is a GPU that has them.
        """
        self._device = device
        self._sensor = _gpu_sensor(device) if sensor is None and device.type == "cuda" else sensor

    def read(self) -> dict[str, float]:
        """Values of this rank by the name of their metric. Peaks are since the last call."""
        row = {"resident_memory_gib": process_bytes() / _GIB}
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            reserved = torch.cuda.max_memory_reserved(self._device)
            row["memory_peak_gib"] = torch.cuda.max_memory_allocated(self._device) / _GIB
            row["memory_reserved_gib"] = reserved / _GIB
            row["memory_peak_ratio"] = reserved / total
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._sensor is not None:
            row |= self._sensor()
        return row


def _gpu_sensor(device: torch.device) -> Callable[[], dict[str, float]] | None:
    """NVML's values of a GPU; None without nvidia-ml-py or if the driver denies access, as in some containers."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return functools.partial(read_sensor, pynvml, handle)
    except pynvml.NVMLError:
        return None


def read_sensor(nvml: Any, handle: Any) -> dict[str, float]:
    """Values of a GPU by the name of their metric; without those that the board does not have.

    Args:
        nvml: the module ``pynvml``.
        handle: NVML's of the GPU.
    """
    row = {}
    for column, query, scale in (
        ("gpu_utilization_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 1e-2),  # per cent
        ("gpu_temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), 1.0),
        ("gpu_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle), 1e-3),  # milliwatts
    ):
        try:
            row[column] = float(query()) * scale
        except nvml.NVMLError:
            continue  # this board has no such sensor
    return row


class ThroughputMeter:
    """Counts tokens and time between two rows of metrics. Validation and saves can be excluded from the time."""

    def __init__(self, peak_flops: float | None, num_ranks: int, clock: Callable[[], float] = time.perf_counter):
        """Start counting.

        Args:
            peak_flops: peak FLOP/s of one rank's device; None to report no MFU.
            clock: seconds; for tests.
        """
        self._peak_flops, self._num_ranks = peak_flops, num_ranks
        self._clock = clock
        self._restart()

    def _restart(self) -> None:
        self._tokens = self._budget_tokens = self._steps = 0
        self._flops = 0.0
        self._excluded_seconds = self._data_seconds = self._model_seconds = 0.0
        self._start = self._clock()

    def add_step(
        self, tokens: int, data_seconds: float, flops: float, budget_tokens: int, model_seconds: float
    ) -> None:
        """Count a finished step.

        Args:
            tokens: computed over all ranks.
            data_seconds: wait for the loader.
            flops: of forward and backward over all ranks.
            budget_tokens: what the step takes of ``training.tokens``: others than `tokens` where rows hold several
                samples.
            model_seconds: of generation, forward and backward.
        """
        self._tokens += tokens
        self._budget_tokens += budget_tokens
        self._flops += flops
        self._steps += 1
        self._data_seconds += data_seconds
        self._model_seconds += model_seconds

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time inside this context from the throughput."""
        start = self._clock()
        yield
        self._excluded_seconds += self._clock() - start

    def read(self) -> dict[str, float]:
        """Columns of metrics.jsonl since the last call; restarts the counts. At least one step must have been added.

        The caller must first read a value from the device, so that queued work is done.
        """
        assert self._steps > 0, "no step since the last reading"
        # A coarse clock may not advance within a tiny step.
        seconds = max(self._clock() - self._start - self._excluded_seconds, 1e-9)
        rate = self._tokens / seconds
        flops = self._flops / seconds / self._num_ranks
        row = {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self._num_ranks,
            "tflops_per_device": flops / 1e12,
            "step_seconds": seconds / self._steps,
            "data_seconds": self._data_seconds / self._steps,
            "overhead_ratio": 1 - self._model_seconds / seconds,
        }
        if self._budget_tokens != self._tokens:
            row["budget_tokens_per_second"] = self._budget_tokens / seconds
        if self._peak_flops is not None:
            row["mfu"] = flops / self._peak_flops
        self._restart()
        return row
