"""Checks of one host: limits, ports, InfiniBand, variables, number of ranks, on trees and values of the tests' own.

Checks of GPUs: answers of nvidia-smi of drivers R535 to R580, shortened to the fields that count.
"""

import errno
import os
import re
import resource
import socket
import subprocess
from pathlib import Path

import pytest

from glm46.commands.preflight import preflight_command
from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config
from glm46.operate.cluster import gpu, host, preflight
from glm46.operate.cluster.gpu import judge_gpus
from glm46.operate.cluster.preflight import host_processes, run_ports
from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.launch.nodes import Nodes
from tests.processes import free_port

GIB = 2**30
CONFIGS = Path(__file__).parents[4] / "train_configs"
DOCS = Path(__file__).parents[4] / "docs"
LAPTOP = Machine(8, 16 * GIB, 12 * GIB)
SERVER = Machine(64, 999 * GIB, 900 * GIB, (Gpu("NVIDIA H100", 79 * GIB),) * 8)


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """A function: the result with this limit of each kind; /dev/shm is a folder of the disk."""
    (tmp_path / "dev/shm").mkdir(parents=True)

    def result(limit: int, machine: Machine = LAPTOP, processes: int = 2):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        return host.limits(machine, processes, tmp_path)

    return result


def test_limits_are_higher_on_a_host_with_gpus_and_with_infiniband(limits, tmp_path):
    assert limits(20_000).status == PASS
    assert limits(20_000, SERVER).value == "open files: 20,000"
    assert limits(200).value == "open files: 200; user processes: 200"
    assert limits(resource.RLIM_INFINITY, SERVER).status == PASS
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    result = limits(70_000, SERVER)
    assert result.status == FAIL and "locked memory" in result.value and "ulimit -l" in result.remedy


def test_memory_and_shared_memory_are_counted_by_rank(small_disk, tmp_path):
    mount, _ = small_disk
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "shm").symlink_to(mount)
    result = host.limits(LAPTOP, 13, tmp_path)
    assert result.status == FAIL and ">= 832 MiB in /dev/shm" in result.requirement
    assert "MiB in /dev/shm: " in result.value and "MiB of memory: 12,288" in result.value
    assert "--shm-size" in result.remedy


def test_a_port_that_another_program_has_is_named():
    port = free_port()
    with socket.create_server(("", port)):
        taken = host.ports({"MASTER_PORT": port})
        exporter = host.ports({"metrics.prometheus_port": port})
        later = host.ports({"MASTER_PORT + 1": port})
    assert taken.status == FAIL and f"MASTER_PORT {port}" in taken.value
    assert exporter.status == later.status == WARN  # the run continues, and a restart may find it free
    assert host.ports({"MASTER_PORT": port}).status == PASS
    assert host.ports({}).status == SKIP


@pytest.mark.parametrize(
    ("number", "name", "status", "remedy"),
    [
        (errno.EADDRINUSE, "MASTER_PORT + 3", WARN, "set another MASTER_PORT on all hosts"),
        (errno.EACCES, "metrics.prometheus_port", FAIL, "only root opens it: set metrics.prometheus_port to 1024"),
    ],
)
def test_the_remedy_of_a_port_names_its_key(number, name, status, remedy, monkeypatch):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_server", refuse)
    result = host.ports({name: 80})
    assert result.status == status and remedy in result.remedy and os.strerror(number) in result.value


def test_ports_are_those_of_the_first_node_and_of_restarts(make_config):
    config = make_config(metrics={"prometheus_port": 9400})
    assert run_ports(config, Nodes()) == {"metrics.prometheus_port": 9400}
    assert run_ports(config, Nodes(2, 1, "node0")) == {}
    assert list(run_ports(None, Nodes(2, 0, "node0", 65530)).values()) == list(range(65530, 65536))


def test_an_exporter_on_the_port_where_ranks_meet_is_refused_before_any_check(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "run_check", lambda *_: pytest.fail("a check has run"))
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.toml").write_text(dump_config(make_config(metrics={"prometheus_port": 29777})))
    with pytest.raises(UserError, match="metrics.prometheus_port = 29777: ranks meet at .*; state a port outside"):
        preflight_command(["--config", str(tmp_path / "run.toml")])


PORT_FAULTS = [
    ("state", "1: DOWN", "mlx5_1/1 1: DOWN, 5: LinkUp"),
    ("phys_state", "2: Polling", "mlx5_1/1 4: ACTIVE, 2: Polling"),
    ("rate", "200 Gb/sec (4X HDR)", "mlx5_1/1 200 Gb/s"),
]


@pytest.mark.parametrize(("name", "text", "shown"), PORT_FAULTS)
def test_a_bad_infiniband_port_is_named(tmp_path, name, text, shown):
    assert host.infiniband(tmp_path).status == SKIP
    for adapter in ("mlx5_0", "mlx5_1"):
        port = tmp_path / "sys/class/infiniband" / adapter / "ports/1"
        port.mkdir(parents=True)
        for file, content in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}.items():
            (port / file).write_text(f"{content}\n")
    assert host.infiniband(tmp_path).status == PASS
    (port / name).write_text(text)
    result = host.infiniband(tmp_path)
    assert (result.status, result.value) == (FAIL, shown)


def test_variables_of_nccl_that_harm(monkeypatch):
    good = {"NCCL_DEBUG": "warn", "NCCL_IB_DISABLE": "0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_TIMEOUT": "22"}
    for name, value in good.items():
        monkeypatch.setenv(name, value)
    assert host.nccl_variables().status == PASS
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    result = host.nccl_variables()
    assert (result.status, result.value) == (WARN, "NCCL_DEBUG=INFO")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert host.nccl_variables().status == FAIL


def test_the_page_of_nccl_has_the_statuses_of_the_program():
    part = (DOCS / "nccl.md").read_text().partition("## What preflight calls a fault")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`NCCL_.*?) \| (FAIL|WARN)", part)
    stated = {name: status for names, status in rows for name in re.findall(r"`(\w+)`", names)}
    assert stated == {name: status for name, (status, _, _) in host.NCCL_VARIABLES.items()}


@pytest.mark.parametrize(
    ("machine", "nodes", "config", "overrides", "ranks"),
    [
        (LAPTOP, 1, None, [], 2),
        (LAPTOP, 3, None, [], 2),
        (SERVER, 2, None, [], 8),
        (LAPTOP, 2, "debug.toml", [], 2),
        (
            SERVER,
            2,
            "debug.toml",
            ["--parallelism.data_parallel_replicate_degree=3", "--training.global_batch_size=12"],
            6,
        ),
        (LAPTOP, 2, "debug.toml", ["--parallelism.data_parallel_shard_degree=8", "--training.global_batch_size=32"], 4),
        # Refused by `launch`: the hosts are checked on what they have.
        (LAPTOP, 2, "glm46_phase3.toml", [], 2),
        (SERVER, 2, "glm46_phase1.toml", [], 8),
    ],
)
def test_a_host_has_as_many_ranks_as_a_node_of_the_run(machine, nodes, config, overrides, ranks):
    config = load_config(CONFIGS / config, overrides) if config else None
    machine = Machine(machine.cores, machine.memory_bytes, machine.free_bytes, machine.gpus, nodes)
    assert host_processes(None, config, machine) == ranks
    assert host_processes(5, config, machine) == 5  # a number that is stated goes before


GPU = """
<gpu id="00000000:19:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
<persistence_mode>Enabled</persistence_mode><mig_mode><current_mig>Disabled</current_mig></mig_mode>
<pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
<link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
</pci_gpu_link_info></pci>
<clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>
<fb_memory_usage><total>81559 MiB</total><used>4 MiB</used></fb_memory_usage>
<ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
<ecc_errors><volatile><sram_correctable>0</sram_correctable>
<sram_uncorrectable_parity>0</sram_uncorrectable_parity><dram_uncorrectable>0</dram_uncorrectable></volatile>
<aggregate><dram_uncorrectable>7</dram_uncorrectable></aggregate></ecc_errors>
<remapped_rows><remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows><temperature><gpu_temp>31 C</gpu_temp></temperature>
<gpu_recovery_action>None</gpu_recovery_action></gpu>
"""


def answer(second: str = GPU) -> str:
    return f"<nvidia_smi_log><driver_version>580.105.08</driver_version>{GPU}{second}</nvidia_smi_log>"


def test_a_healthy_host_passes():
    result = judge_gpus(answer(), 2)
    assert result.status == PASS and result.value == "2 x NVIDIA H100 80GB HBM3"


FAULTS = [
    ("<current_ecc>Enabled", "<current_ecc>Disabled", WARN, "ECC: Disabled"),
    ("<dram_uncorrectable>0", "<dram_uncorrectable>2", FAIL, "dram_uncorrectable: 2"),
    ("row_pending>No", "row_pending>Yes", FAIL, "remap pending: Yes"),
    ("row_failure>No", "row_failure>Yes", FAIL, "remap failed: Yes"),
    ("<current_mig>Disabled", "<current_mig>Enabled", FAIL, "MIG: Enabled"),
    ("persistence_mode>Enabled", "persistence_mode>Disabled", WARN, "persistence: Disabled"),
    ("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", FAIL, "throttled: hw_thermal_slowdown"),
    ("<gpu_temp>31 C", "<gpu_temp>71 C", FAIL, "temperature in C without load: 71 > 55"),
    ("<used>4 MiB", "<used>60000 MiB", FAIL, "memory in use in MiB: 60000 > 1024"),
    ("<current_link_width>16x", "<current_link_width>8x", FAIL, "PCIe link: x8 of x16"),
    ("<gpu_recovery_action>None", "<gpu_recovery_action>GPU Reset", FAIL, "recovery action: GPU Reset"),
]
SETTINGS = ("MIG", "persistence", "temperature", "memory in use")


@pytest.mark.parametrize(("good", "bad", "status", "shown"), FAULTS, ids=[row[3] for row in FAULTS])
def test_a_fault_of_the_second_gpu_is_named(good, bad, status, shown):
    assert good in GPU
    result = judge_gpus(answer(GPU.replace(good, bad)), 2)
    assert (result.status, result.value) == (status, f"GPU 1: {shown}")
    assert result.remedy and bool(re.search("RESET|REBOOT|ISOLATE", result.remedy)) != shown.startswith(SETTINGS)


def test_faults_of_several_gpus_are_one_result_with_the_worst_status():
    bad = GPU.replace("persistence_mode>Enabled", "persistence_mode>Disabled")
    worse = GPU.replace("row_pending>No", "row_pending>Yes")
    result = judge_gpus(f"<nvidia_smi_log>{bad}{worse}</nvidia_smi_log>", 2)
    assert result.status == FAIL and result.value == "GPU 0: persistence: Disabled; GPU 1: remap pending: Yes"
    assert result.remedy == "start nvidia-persistenced; RESET the GPU"


def test_reasons_of_throttling_under_their_older_names():
    older = GPU.replace("event_reason", "throttle_reason").replace("hw_slowdown>Not Active", "hw_slowdown>Active")
    assert judge_gpus(answer(older), 2).value == "GPU 1: throttled: hw_slowdown"


def test_a_missing_gpu_and_fields_that_a_driver_does_not_have():
    missing = judge_gpus(f"<nvidia_smi_log>{GPU}</nvidia_smi_log>", 8)
    assert missing.status == FAIL and "1 x NVIDIA H100" in missing.value
    bare = (
        "<nvidia_smi_log><gpu><product_name>T</product_name><mig_mode><current_mig>N/A</current_mig></mig_mode></gpu>"
    )
    assert judge_gpus(f"{bare}</nvidia_smi_log>", 1).status == PASS
    with pytest.raises(ValueError, match="nvidia-smi"):
        judge_gpus("Failed to initialize NVML", 1)


def test_a_host_without_nvidia_smi_and_one_whose_driver_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path / "version")
    assert gpu.gpus(1).status == SKIP
    (tmp_path / "version").touch()
    assert gpu.gpus(1).status == FAIL
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho Unable to determine the device handle; exit 15\n")
    program.chmod(0o755)
    result = gpu.gpus(1)
    assert result.status == FAIL and "exit code 15: Unable" in result.value
    program.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    monkeypatch.setattr(gpu, "_SECONDS", 0.1)
    with pytest.raises(subprocess.TimeoutExpired, match="nvidia-smi"):
        gpu.gpus(1)
