"""Checks of GPUs, on answers of nvidia-smi of drivers R535 to R580, shortened to the fields that count."""

import re

import pytest

from glm46.operate.cluster.gpu import judge_gpus, judge_nvlink
from glm46.operate.cluster.results import FAIL, PASS, WARN

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
NVLINK = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-aa)\n\t Link 0: 26.562 GB/s\n\t Link 1: {}\n"


def answer(second: str = GPU) -> str:
    return f"<nvidia_smi_log><driver_version>580.105.08</driver_version>{GPU}{second}</nvidia_smi_log>"


def test_a_healthy_host_passes_every_check():
    assert {result.verdict for result in judge_gpus(answer(), 2)} == {PASS}


@pytest.mark.parametrize(("good", "bad", "check", "verdict", "shown"), [
    ("<current_ecc>Enabled", "<current_ecc>Disabled", "GPU ECC", WARN, "Disabled"),
    ("<dram_uncorrectable>0", "<dram_uncorrectable>2", "GPU memory errors", FAIL, "dram_uncorrectable 2"),
    ("row_pending>No", "row_pending>Yes", "GPU remapped rows", FAIL, "pending"),
    ("row_failure>No", "row_failure>Yes", "GPU remapped rows", FAIL, "failure"),
    ("<current_mig>Disabled", "<current_mig>Enabled", "GPU MIG", FAIL, "Enabled"),
    ("persistence_mode>Enabled", "persistence_mode>Disabled", "GPU persistence", WARN, "Disabled"),
    ("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", "GPU throttling", FAIL, "hw_thermal_slowdown"),
    ("<gpu_temp>31 C", "<gpu_temp>71 C", "GPU temperature", FAIL, "71 C"),
    ("<used>4 MiB", "<used>60000 MiB", "GPU memory in use", FAIL, "60000 MiB"),
    ("<current_link_width>16x", "<current_link_width>8x", "GPU link width", FAIL, "x8 of x16"),
    ("<gpu_recovery_action>None", "<gpu_recovery_action>GPU Reset", "GPU recovery", FAIL, "GPU Reset"),
])  # fmt: skip
def test_a_fault_of_the_second_gpu_is_named(good, bad, check, verdict, shown):
    assert good in GPU
    found = [result for result in judge_gpus(answer(GPU.replace(good, bad)), 2) if result.verdict != PASS]
    assert [(result.check, result.verdict) for result in found] == [(check, verdict)]
    assert found[0].value == f"GPU 1: {shown}" and found[0].remedy
    of_settings = ("GPU MIG", "GPU persistence", "GPU temperature", "GPU memory in use")
    assert bool(re.search("RESET|REBOOT|ISOLATE", found[0].remedy)) == (check not in of_settings)


def test_reasons_of_throttling_under_their_older_names():
    older = GPU.replace("event_reason", "throttle_reason").replace("hw_slowdown>Not Active", "hw_slowdown>Active")
    assert [r.check for r in judge_gpus(answer(older), 2) if r.verdict == FAIL] == ["GPU throttling"]


def test_a_missing_gpu_and_fields_that_a_driver_does_not_have():
    found = {result.check: result for result in judge_gpus(f"<nvidia_smi_log>{GPU}</nvidia_smi_log>", 8)}
    assert found["GPU count"].verdict == FAIL and "1 x NVIDIA H100" in found["GPU count"].value
    bare = (
        "<nvidia_smi_log><gpu><product_name>T</product_name><mig_mode><current_mig>N/A</current_mig></mig_mode></gpu>"
    )
    assert {result.verdict for result in judge_gpus(f"{bare}</nvidia_smi_log>", 1)} == {PASS}
    with pytest.raises(ValueError, match="nvidia-smi"):
        list(judge_gpus("Failed to initialize NVML", 1))


def test_nvlinks_that_are_down_or_missing():
    up, down = (NVLINK.format(number, speed) for number, speed in ((0, "26.562 GB/s"), (1, "<inactive>")))
    assert judge_nvlink(up + up.replace("GPU 0", "GPU 1")).verdict == PASS
    found = judge_nvlink(up + down)
    assert found.verdict == FAIL and found.value == "GPU 1: 1 of 2 down"
    fewer = up.replace("GPU 0", "GPU 1").replace("\t Link 1: 26.562 GB/s\n", "")
    assert judge_nvlink(up + fewer).value == "GPU 1: 1 links"
