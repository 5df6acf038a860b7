"""Checks of GPUs, on answers of nvidia-smi of drivers R535 to R580, shortened to the fields that count."""

import re
import subprocess

import pytest

from glm46.operate.cluster import gpu
from glm46.operate.cluster.gpu import judge_gpus
from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN

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
