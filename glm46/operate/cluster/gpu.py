"""Checks of the GPUs of one host, from one XML answer of ``nvidia-smi``. Fields that a driver lacks are not judged."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from glm46.config.faults import counted
from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN, Result, Subject, limited, run_program

_SECONDS = 30.0
_DIAGNOSTIC_SECONDS = 240.0
_IDLE_CELSIUS = 55
_IDLE_MIB = 1024
_THROTTLES = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_DRIVER = "proc/driver/nvidia/version"


def gpus(subject: Subject) -> Iterator[Result]:
    """Check the state of each GPU."""
    has_driver = subject.read(_DRIVER) is not None
    done = run_program(["nvidia-smi", "-q", "-x"], _SECONDS)
    if done is None:
        remedy = "install nvidia-utils of the driver's version"
        if has_driver:
            yield Result("GPU", FAIL, "a driver without nvidia-smi", "nvidia-smi", remedy)
        else:
            yield Result("GPU", SKIP, "no NVIDIA driver here")
        return
    if done.returncode:
        last_lines = done.stdout.strip().splitlines()[-1:] or ["nothing"]
        remedy = "the driver does not run: look at dmesg, then REBOOT the host"
        yield Result("GPU", FAIL, f"nvidia-smi: exit code {done.returncode}: {last_lines[0]}", "0", remedy)
        return
    yield from judge_gpus(done.stdout, subject.processes)


_CHECKS = {
    "GPU ECC": (WARN, "on", "nvidia-smi -e 1, then RESET the GPU"),
    "GPU memory errors": (FAIL, "none uncorrectable since the driver was loaded", "RESET the GPU"),
    "GPU remapped rows": (FAIL, "none", "pending: RESET the GPU; failure: ISOLATE the host"),
    "GPU MIG": (FAIL, "off", "nvidia-smi -mig 0"),
    "GPU persistence": (WARN, "on", "start nvidia-persistenced"),
    "GPU throttling": (FAIL, "none", "ISOLATE the host, look at its cooling and power"),
    "GPU temperature": (FAIL, f"<= {_IDLE_CELSIUS} C without load", "look at the cooling; a job may run there"),
    "GPU memory in use": (FAIL, f"<= {_IDLE_MIB} MiB", "a job runs there: nvidia-smi shows its processes; end it"),
    "GPU link width": (FAIL, "the device's most", "ISOLATE the host, reseat the GPU"),
    "GPU recovery": (FAIL, "None", "RESET, REBOOT or ISOLATE, as it says"),
}
"""Verdict of a fault, limit and remedy of each check of `_faults`."""


def judge_gpus(xml: str, processes: int) -> Iterator[Result]:
    """Return the results for the output of ``nvidia-smi -q -x``.

    Args:
        processes: ranks of this host, one for each GPU.

    Raises:
        ValueError: the output is not XML.
    """
    try:
        devices = ElementTree.fromstring(xml).findall("gpu")
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi -q -x: {error}") from error
    names = sorted({device.findtext("product_name", "GPU") for device in devices})
    inventory = f"{len(devices)} x {', '.join(names)}"
    remedy = "a GPU is missing: nvidia-smi -L, dmesg for Xid 79; REBOOT the host, ISOLATE it if the GPU stays away"
    yield limited("GPU count", len(devices) >= processes, inventory, f">= {processes}, one for each rank", remedy)
    faults = [_faults(device) for device in devices]
    for check, (verdict, limit, remedy) in _CHECKS.items():
        bad = [f"GPU {number}: {device[check]}" for number, device in enumerate(faults) if device[check]]
        if bad:
            yield Result(check, verdict, ", ".join(bad), limit, remedy)
        elif devices:
            yield Result(check, PASS, counted(len(devices), "GPU"), limit)


def _faults(device: ElementTree.Element) -> dict[str, str]:
    """Return the fault of a GPU in each of `_CHECKS`; empty without a fault, and for a field that a driver lacks."""

    def text(path: str) -> str:
        value = (device.findtext(path) or "").strip()
        return "" if value in ("N/A", "[N/A]") else value

    def number(path: str) -> int:
        match = re.match(r"\d+", text(path))
        return int(match[0]) if match else 0

    def unless(good: str, path: str) -> str:
        return "" if text(path) == good else text(path)

    def above(maximum: int, unit: str, path: str) -> str:
        return f"{number(path)} {unit}" if number(path) > maximum else ""

    errors = device.findall("ecc_errors/volatile/*")
    uncorrectable = [f"{error.tag} {(error.text or '').strip()}" for error in errors if "uncorrectable" in error.tag]
    remapped = [name for name in ("pending", "failure") if text(f"remapped_rows/remapped_row_{name}") == "Yes"]
    # Drivers before R535 call this field clocks_throttle_reasons, later ones clocks_event_reasons.
    reasons = device.findall("clocks_event_reasons/*") + device.findall("clocks_throttle_reasons/*")
    active = [reason.tag.partition("_reason_")[2] for reason in reasons if (reason.text or "").strip() == "Active"]
    width = number("pci/pci_gpu_link_info/link_widths/current_link_width")
    max_width = number("pci/pci_gpu_link_info/link_widths/max_link_width")
    return {
        "GPU ECC": unless("Enabled", "ecc_mode/current_ecc"),
        "GPU memory errors": ", ".join(error for error in uncorrectable if re.search(r" [1-9]\d*$", error)),
        "GPU remapped rows": ", ".join(remapped),
        "GPU MIG": unless("Disabled", "mig_mode/current_mig"),
        "GPU persistence": unless("Enabled", "persistence_mode"),
        "GPU throttling": ", ".join(reason for reason in active if reason in _THROTTLES),
        "GPU temperature": above(_IDLE_CELSIUS, "C", "temperature/gpu_temp"),
        "GPU memory in use": above(_IDLE_MIB, "MiB", "fb_memory_usage/used"),
        "GPU link width": f"x{width} of x{max_width}" if 0 < width < max_width else "",
        "GPU recovery": unless("None", "gpu_recovery_action"),
    }


def nvlink(subject: Subject) -> Iterator[Result]:
    """Check that all NVLinks of each GPU are up."""
    done = run_program(["nvidia-smi", "nvlink", "--status"], _SECONDS) if subject.has_gpu else None
    if done is None or done.returncode or "Link" not in done.stdout:
        yield Result("NVLink", SKIP, "no NVLink here" if subject.has_gpu else "no GPU here")
        return
    yield judge_nvlink(done.stdout)


def judge_nvlink(output: str) -> Result:
    """Return the result for the output of ``nvidia-smi nvlink --status``: lines ``Link 0: 26.562 GB/s`` below each GPU,
    ``<inactive>`` for a link that is down."""
    links: dict[str, list[bool]] = {}
    for line in output.splitlines():
        if line.startswith("GPU"):
            device = line.partition(":")[0]
            links[device] = []
        elif (match := re.match(r"\s+Link \d+: (.*)", line)) and links:
            links[device].append("inactive" not in match[1])
    bad = [f"{device}: {up.count(False)} of {len(up)} down" for device, up in links.items() if not all(up)]
    counts = {sum(up) for up in links.values()}
    if not bad and len(counts) > 1:
        bad = [f"{device}: {sum(up)} links" for device, up in links.items() if sum(up) < max(counts)]
    value = ", ".join(bad) or f"{len(links)} GPUs with {counts.pop() if counts else 0} links each"
    return limited("NVLink", not bad, value, "all links up", "RESET the GPUs and NVSwitches, or REBOOT the host")


def diagnostic(subject: Subject) -> Iterator[Result]:
    """Run NVIDIA's diagnostic of a node, which takes minutes."""
    if not (subject.is_full and subject.has_gpu):
        return
    done = run_program(["dcgmi", "diag", "-r", "2"], _DIAGNOSTIC_SECONDS)
    if done is None:
        yield Result("dcgmi diag", SKIP, "dcgmi is not installed")
        return
    failed = [" ".join(line.split()) for line in done.stdout.splitlines() if re.search(r"\bFail\b", line)]
    value = "; ".join(failed[:3]) or f"exit code {done.returncode}"
    is_good = not done.returncode and not failed
    remedy = "dcgmi diag -r 3, then ISOLATE the host"
    yield limited("dcgmi diag", is_good, value, "no test fails", remedy)


GPU_CHECKS = {"GPU": gpus, "NVLink": nvlink, "dcgmi diag": diagnostic}
