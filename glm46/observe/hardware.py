"""Hardware metrics: peak FLOP/s, memory, temperature, power."""

import functools
import time
from pathlib import Path

import torch

from glm46.planner.peaks import find_accelerator

_GIB = 2**30
_PEAK_MATRIX_SIZE = 1024
_PEAK_ROUNDS = 12


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device, the reference for MFU; None if unknown.

    For a GPU the vendor's BF16 peak from the table, None in other dtypes. For a CPU a measured matmul.
    """
    if device.type == "cuda":
        accelerator = find_accelerator(torch.cuda.get_device_name(device))
        return accelerator.bf16_flops if accelerator and dtype == torch.bfloat16 else None
    if device.type == "cpu":
        return measured_matmul_flops(dtype, torch.get_num_threads())
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

    def __init__(self, device: torch.device):
        self._device = device
        self._sensor = _open_sensor(device) if device.type == "cuda" else None

    def read(self) -> dict[str, float]:
        """Columns of metrics.jsonl. Peaks are since the last call."""
        row = {"resident_memory_gib": process_bytes() / _GIB}
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            reserved = torch.cuda.max_memory_reserved(self._device)
            row["memory_peak_gib"] = torch.cuda.max_memory_allocated(self._device) / _GIB
            row["memory_reserved_gib"] = reserved / _GIB
            row["memory_peak_ratio"] = reserved / total
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._sensor is not None:
            row |= _read_sensor(self._sensor)
        return row


def _open_sensor(device: torch.device) -> object | None:
    """NVML handle of a GPU; None without nvidia-ml-py or if the driver denies access, as in some containers."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


def _read_sensor(handle: object) -> dict[str, float]:
    import pynvml

    row = {}
    for column, query, scale in (
        ("gpu_temperature_celsius", lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU), 1.0),
        ("gpu_power_watts", lambda: pynvml.nvmlDeviceGetPowerUsage(handle), 1e-3),  # NVML reports milliwatts
    ):
        try:
            row[column] = float(query()) * scale
        except pynvml.NVMLError:
            continue  # this board has no such sensor
    return row
