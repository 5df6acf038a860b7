"""Metrics of hardware: peak FLOP/s, memory, utilization, temperature, power."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from glm46.engine.observe.nvml import load_nvml
from glm46.engine.observe.peaks import find_accelerator

_GIB = 2**30
_PEAK_MATRIX_SIZE = 1024
_PEAK_ROUNDS = 12


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device, the reference for MFU; None if unknown.

    For a GPU, the vendor's BF16 peak from the table, and None for other dtypes. None for CPUs: a matmul rate measured
    on a shared machine is not a peak.
    """
    if device.type == "cuda":
        accelerator = find_accelerator(torch.cuda.get_device_name(device))
        return accelerator.bf16_flops if accelerator and dtype == torch.bfloat16 else None
    return None


@functools.cache
def measured_matmul_flops(dtype: torch.dtype, threads: int) -> float:  # noqa: ARG001 - a key of the cache
    """Measure the best FLOP/s of a square matmul on this CPU. Takes a fraction of a second, once per process.

    Args:
        threads: torch's number of threads, part of the cache key.
    """
    size = _PEAK_MATRIX_SIZE
    a = torch.ones(size, size, dtype=dtype)
    b = torch.ones(size, size, dtype=dtype)
    out = torch.empty(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(_PEAK_ROUNDS):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def process_bytes(field: str = "VmRSS") -> int:
    """Return the main memory of this process in bytes, or with "VmHWM" its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class HardwareMonitor:
    """Reader of the hardware metrics of this rank's device."""

    def __init__(self, device: torch.device, sensor: Callable[[], dict[str, float]] | None = None):
        """Open the sensors.

        Args:
            sensor: returns further values by name; None to use NVML, if the device is a GPU that supports it.
        """
        self._device = device
        self._sensor = _gpu_sensor(device) if sensor is None and device.type == "cuda" else sensor

    def read(self) -> dict[str, float]:
        """Return values of this rank by name of their metric. Peaks are since the last call."""
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
    """Return the NVML sensor of a GPU; None without nvidia-ml-py or if the driver denies access, as in some
    containers."""
    nvml = load_nvml()
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError:
        return None
    return functools.partial(read_sensor, nvml, handle)


def read_sensor(nvml: ModuleType, handle: object) -> dict[str, float]:
    """Return values of a GPU by name of their metric; sensors that the board lacks are skipped.

    Args:
        nvml: the module ``pynvml``.
        handle: NVML handle of the GPU.
    """
    row = {}
    sensors: tuple[tuple[str, Callable[[], float], float], ...] = (
        ("gpu_utilization_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 1e-2),  # per cent
        ("gpu_temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), 1.0),
        ("gpu_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle), 1e-3),  # milliwatts
    )
    for column, query, scale in sensors:
        try:
            row[column] = float(query()) * scale
        except nvml.NVMLError:
            continue  # this board has no such sensor
    return row
