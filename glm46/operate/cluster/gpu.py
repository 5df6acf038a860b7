"""Checks of the GPUs of one host by ``nvidia-smi``. Fields that a driver lacks are not judged."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from glm46.operate.cluster.results import FAIL, SKIP, WARN, Defect, Result, judge

_SECONDS = 30.0
_DRIVER = Path("/proc/driver/nvidia/version")
_EXPECTED = (
    ("ECC", "ecc_mode/current_ecc", "Enabled", WARN, "nvidia-smi -e 1, then RESET the GPU"),
    ("MIG", "mig_mode/current_mig", "Disabled", FAIL, "nvidia-smi -mig 0"),
    ("persistence", "persistence_mode", "Enabled", WARN, "start nvidia-persistenced"),
    ("remap pending", "remapped_rows/remapped_row_pending", "No", FAIL, "RESET the GPU"),
    ("remap failed", "remapped_rows/remapped_row_failure", "No", FAIL, "ISOLATE the host"),
    ("recovery action", "gpu_recovery_action", "None", FAIL, "RESET, REBOOT or ISOLATE, as the action says"),
)
"""Fields with words: name, field, good value, and status and remedy of any other value."""
_LARGEST = (
    ("temperature in C without load", "temperature/gpu_temp", 55, "look at the cooling; a job may run there"),
    ("memory in use in MiB", "fb_memory_usage/used", 1024, "end the job that nvidia-smi shows there"),
)
"""Fields with numbers: name, field, largest good value, and remedy of a larger one, which is a FAIL."""
_THROTTLED = re.compile("hw_slowdown|hw_thermal_slowdown|hw_power_brake_slowdown|sw_thermal_slowdown")


def gpus(processes: int) -> Result:
    """Check the number of GPUs and the state of each.

    Args:
        processes: ranks of this host, one for each GPU.
    """
    if shutil.which("nvidia-smi") is None:
        if not _DRIVER.exists():
            return Result("GPUs", SKIP, "no NVIDIA driver here")
        remedy = "install nvidia-utils of the driver's version"
        return Result("GPUs", FAIL, "a driver without nvidia-smi", "nvidia-smi answers", remedy)
    done = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        value = f"nvidia-smi: exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-200:]}"
        remedy = "the driver does not run: look at dmesg, then REBOOT the host"
        return Result("GPUs", FAIL, value, "nvidia-smi answers", remedy)
    return judge_gpus(done.stdout, processes)


def judge_gpus(xml: str, processes: int) -> Result:
    """Return the result for the output of ``nvidia-smi -q -x``.

    Raises:
        ValueError: the output is not XML.
    """
    try:
        devices = ElementTree.fromstring(xml).findall("gpu")
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi -q -x: {error}") from error
    models = sorted({device.findtext("product_name", "GPU") for device in devices})
    inventory = f"{len(devices)} x {', '.join(models)}"
    remedy = "look at dmesg for Xid 79; REBOOT the host, ISOLATE it if the GPU stays away"
    faults = [Defect(FAIL, inventory, remedy)] if len(devices) < processes else []
    for number, device in enumerate(devices):
        faults += [fault._replace(value=f"GPU {number}: {fault.value}") for fault in _faults(device)]
    return judge("GPUs", faults, inventory, f">= {processes}, without errors, cool and unused")


def _faults(device: ElementTree.Element) -> list[Defect]:
    texts = {path: _text(device.find(path)) for _, path, *_ in (*_EXPECTED, *_LARGEST)}
    faults = [
        Defect(status, f"{name}: {texts[path]}", remedy)
        for name, path, good, status, remedy in _EXPECTED
        if texts[path] not in ("", good)
    ]
    faults += [
        Defect(FAIL, f"{name}: {_number(texts[path])} > {largest}", remedy)
        for name, path, largest, remedy in _LARGEST
        if _number(texts[path]) > largest
    ]
    errors = [error for error in device.findall("ecc_errors/volatile/*") if "uncorrectable" in error.tag]
    faults += [Defect(FAIL, f"{error.tag}: {error.text}", "RESET the GPU") for error in errors if _number(_text(error))]
    # Drivers before R535 call this field clocks_throttle_reasons, later ones clocks_event_reasons.
    reasons = device.findall("clocks_event_reasons/*") + device.findall("clocks_throttle_reasons/*")
    active = [reason.tag.partition("_reason_")[2] for reason in reasons if _text(reason) == "Active"]
    remedy = "ISOLATE the host, look at its cooling and power"
    faults += [Defect(FAIL, f"throttled: {reason}", remedy) for reason in active if _THROTTLED.fullmatch(reason)]
    links = "pci/pci_gpu_link_info/link_widths"
    width = _number(_text(device.find(f"{links}/current_link_width")))
    full_width = _number(_text(device.find(f"{links}/max_link_width")))
    if 0 < width < full_width:
        faults.append(Defect(FAIL, f"PCIe link: x{width} of x{full_width}", "ISOLATE the host, reseat the GPU"))
    return faults


def _text(element: ElementTree.Element | None) -> str:
    text = (element.text or "").strip() if element is not None else ""
    return "" if text in ("N/A", "[N/A]") else text


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
