"""The machine as the kernel describes it, and the processes of each node."""

import pytest

from glm46.config.parallelism import ParallelismConfig
from glm46.engine.observe.peaks import ACCELERATORS, find_accelerator
from glm46.operate.estimate import machine
from glm46.operate.estimate.machine import Gpu, Machine, processes_of_node


def _files(root, **texts):
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_memory_limit_of_a_container_counts(tmp_path):
    _files(tmp_path, proc__meminfo="MemTotal: 8000 kB\nMemAvailable: 6000 kB\n")
    assert machine._memory(tmp_path) == (8000 * 1024, 6000 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert machine._memory(tmp_path) == (8000 * 1024, 6000 * 1024)
    (group / "memory.max").write_text(str(4000 * 1024))
    (group / "memory.current").write_text(str(1000 * 1024))
    assert machine._memory(tmp_path) == (4000 * 1024, 3000 * 1024)


def test_the_core_quota_of_a_container_counts(tmp_path):
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    unlimited = machine._cores(tmp_path)
    (group / "cpu.max").write_text("max 100000")
    assert machine._cores(tmp_path) == unlimited
    (group / "cpu.max").write_text("50000 100000")
    assert machine._cores(tmp_path) == 1


def test_gpus_of_a_machine_without_nvml(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_gpus_from_nvml", lambda: [])
    _files(tmp_path, proc__meminfo="MemTotal: 8000 kB\nMemAvailable: 6000 kB\n")
    for index, bus in enumerate(("0000:01:00.0", "0000:02:00.0")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-{index}abc\n")
    found = machine.detect_machine(root=tmp_path, nodes=3)
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H100 80GB HBM3"] * 2
    assert found.gpus[0].memory_bytes == find_accelerator("H100").memory_bytes
    assert found.nodes == 3
    for visible, count in (("", 0), ("1", 1), ("0,1", 2), ("0,7,1", 1), ("GPU-1abc", 1), ("GPU-9", 0), ("-1", 0)):
        assert len(machine.detect_machine(visible, root=tmp_path).gpus) == count, visible


@pytest.mark.parametrize(
    ("line", "release"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build  (a@b)\n", "570.86"),
        ("", "none"),
    ],
)
def test_the_release_of_the_driver(line, release, tmp_path):
    _files(tmp_path, proc__driver__nvidia__version=line)
    assert machine.driver_version(tmp_path) == release


def test_names_of_the_driver_find_their_entry():
    names = {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H200": "H200", "NVIDIA L4": "L4",
        "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA A100-SXM4-40GB": "A100 40GB", "NVIDIA L40S": "L40S",
        "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA A10G": "A10G",
    }  # fmt: skip
    assert {name: find_accelerator(name).name for name in names} == names
    assert find_accelerator("NVIDIA Quadro P400") is None
    assert all(find_accelerator(accelerator.name) is accelerator for accelerator in ACCELERATORS)


GIB = 2**30


def machine_of(gpus: int, nodes: int, cores: int = 8) -> Machine:
    return Machine(cores, 999 * GIB, 900 * GIB, (Gpu("NVIDIA H100", 79 * GIB),) * gpus, nodes)


@pytest.mark.parametrize(("gpus", "nodes", "degrees", "processes"), [
    (0, 1, {}, 2), (0, 3, {}, 2), (8, 1, {}, 8), (8, 2, {}, 8), (8, 16, {}, 8),
    (8, 1, {"data_parallel_replicate_degree": 3}, 6), (8, 2, {"data_parallel_replicate_degree": 3}, 6),
    (8, 3, {"data_parallel_replicate_degree": 3}, 8), (8, 3, {"data_parallel_replicate_degree": 6}, 8),
    (0, 1, {"data_parallel_replicate_degree": 3}, 3), (0, 2, {"data_parallel_replicate_degree": 4}, 2),
    (8, 2, {"expert_parallel_degree": 16}, 8), (8, 2, {"data_parallel_shard_degree": 16}, 8),
    (8, 2, {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2}, 4),
    (0, 2, {"data_parallel_shard_degree": 1}, 1),
])  # fmt: skip
def test_processes_of_each_node_follow_its_gpus_and_the_degrees_over_all_nodes(gpus, nodes, degrees, processes):
    assert processes_of_node(ParallelismConfig(**degrees), machine_of(gpus, nodes)) == processes


def test_a_node_of_one_core_has_one_process():
    assert processes_of_node(ParallelismConfig(), machine_of(0, 2, cores=1)) == 1
