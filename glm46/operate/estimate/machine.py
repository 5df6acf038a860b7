"""Detects cores, memory and GPUs of this machine, without torch and without a CUDA context."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from glm46.config.parallelism import ParallelismConfig
from glm46.engine.observe.nvml import load_nvml
from glm46.engine.observe.peaks import find_accelerator
from glm46.run.layout import fixed_processes, smallest_world

_PROCESSES_WITHOUT_GPU = 2
"""Enough to exercise sharding and collectives; more would only split the same cores further."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Gpu:
    """One accelerator that this process may use."""

    name: str
    memory_bytes: int | None
    """None if neither the driver nor the table of peaks has the size."""


@dataclass(frozen=True)
class Machine:
    """One node as a process sees it, with the limits of its container."""

    cores: int
    memory_bytes: int
    """Total memory that this container may use."""
    free_bytes: int
    """Memory that the container may use now, including memory that the kernel can reclaim."""
    gpus: tuple[Gpu, ...] = ()
    nodes: int = 1
    """Number of equal machines in the run."""

    def describe(self) -> str:
        """Describe GPUs and cores in a short text."""
        names = sorted({gpu.name for gpu in self.gpus})
        gpus = [f"{sum(gpu.name == name for gpu in self.gpus)} x {name}" for name in names] or ["no GPU"]
        return ", ".join([*gpus, f"{self.cores} cores" if self.cores > 1 else "1 core"])


def detect_machine(visible_devices: str | None = None, *, nodes: int = 1, root: Path = Path("/")) -> Machine:
    """Detect the cores, the memory and the GPUs of this machine.

    Args:
        visible_devices: value of CUDA_VISIBLE_DEVICES; None when it is not set.
        nodes: number of machines in the run; all are assumed equal to this one.
        root: folder of /proc, /sys and /dev; tests pass their own.
    """
    total, free = _memory(root)
    gpus = _gpus_from_nvml() or _gpus_from_proc(root)
    return Machine(_cores(root), total, free, tuple(_visible(gpus, visible_devices)), nodes)


def processes_of_node(parallelism: ParallelismConfig, machine: Machine) -> int:
    """Return the number of ranks per node: one per GPU, two without GPUs, as far as the degrees allow.

    Args:
        machine: one of ``machine.nodes`` equal nodes. The degrees divide the ranks of all nodes together.
    """
    if parallelism.data_parallel_shard_degree != -1:
        return max(fixed_processes(parallelism) // machine.nodes, 1)
    processes = len(machine.gpus) or min(_PROCESSES_WITHOUT_GPU, machine.cores)
    smallest = smallest_world(parallelism)
    step = smallest // math.gcd(smallest, machine.nodes)
    return max(processes - processes % step, step)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def _cores(root: Path) -> int:
    cores = len(os.sched_getaffinity(0))
    quota = _read(root / "sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        # A container's share of a large machine is rounded up: half a core still runs one process.
        cores = min(cores, max(1, -(-int(quota[0]) // int(quota[1]))))
    return cores


def _memory(root: Path) -> tuple[int, int]:
    fields = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    total = fields["MemTotal"]
    free = fields["MemAvailable"]
    for limit_file, usage_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit = _read(root / limit_file)
        usage = _read(root / usage_file)
        if limit.isdigit() and int(limit) < total:
            total = int(limit)
            # The usage counts cached files, which the kernel can reclaim: assume that at least half of the limit is
            # free.
            used = int(usage) if usage.isdigit() else 0
            free = min(free, max(total - used, total // 2))
    return total, free


def _gpus_from_nvml() -> list[tuple[str, Gpu]]:
    nvml = load_nvml()
    if nvml is None:
        return []
    try:
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _query(nvml.nvmlDeviceGetName, handle, nvml.NVMLError) or "GPU"
            memory = _query(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.NVMLError)
            uuid = _query(nvml.nvmlDeviceGetUUID, handle, nvml.NVMLError) or ""
            gpus.append((uuid, _gpu(name, int(memory.total) if memory else None)))
        return gpus
    finally:
        nvml.nvmlShutdown()


def _gpu(name: str, memory_bytes: int | None = None) -> Gpu:
    accelerator = find_accelerator(name)
    return Gpu(name, accelerator.memory_bytes if memory_bytes is None and accelerator else memory_bytes)


def _query(question: Callable[[object], _Answer], handle: object, refused: type[Exception]) -> _Answer | None:
    """Return NVML's answer, or None if a device does not support the query (memory of unified-memory boards)."""
    try:
        return question(handle)
    except refused:
        return None


def driver_version(root: Path = Path("/")) -> str:
    """Return the release of the NVIDIA driver, such as "550.54.15"; "none" without a driver."""
    text = _read(root / "proc/driver/nvidia/version")
    release = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return release[1] if release else text.partition("\n")[0] or "none"


def _gpus_from_proc(root: Path) -> list[tuple[str, Gpu]]:
    gpus = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        fields = dict(line.split(":", 1) for line in _read(folder / "information").splitlines() if ":" in line)
        name = fields.get("Model", "GPU").strip()
        gpus.append((fields.get("GPU UUID", "").strip(), _gpu(name)))
    return gpus


def _visible(gpus: list[tuple[str, Gpu]], visible_devices: str | None) -> list[Gpu]:
    """Return the devices that CUDA shows for a list of indices or UUIDs, up to the first unknown one."""
    if visible_devices is None:
        return [gpu for _, gpu in gpus]
    chosen = []
    for entry in (part.strip() for part in visible_devices.split(",")):
        if entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)][1])
        elif entry.startswith(("GPU-", "MIG-")):
            # A MIG slice is not in the list of devices; it counts as one device of unknown size.
            matches = [gpu for uuid, gpu in gpus if uuid.startswith(entry)]
            if not matches and not entry.startswith("MIG-"):
                break
            chosen.append(matches[0] if matches else Gpu("MIG slice", None))
        else:
            break
    return chosen
