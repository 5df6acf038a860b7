"""Checks of the GPUs of one host, from one XML answer of ``nvidia-smi``. Fields that a driver lacks are not judged."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator

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
    if done.code:
        last_lines = done.output.strip().splitlines()[-1:] or ["nothing"]
        remedy = "the driver does not run: look at dmesg, then REBOOT the host"
        yield Result("GPU", FAIL, f"nvidia-smi: exit code {done.code}: {last_lines[0]}", "0", remedy)
        return
    yield from judge_gpus(done.output, subject.processes)


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
    for check, verdict, limit, remedy, judge in _CHECKS:
        bad = [(number, fault) for number, device in enumerate(devices) if (fault := judge(device))]
        if bad:
            value = ", ".join(f"GPU {number}: {fault}" for number, fault in bad)
            yield Result(check, verdict, value, limit, remedy)
        elif devices:
            yield Result(check, PASS, counted(len(devices), "GPU"), limit)


def _number(text: str | None) -> int | None:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else None


def _not(path: str, good: str) -> Callable[[ElementTree.Element], str]:
    """Return a judge of a field that must have this value. N/A and absent fields are not judged."""

    def judge(device: ElementTree.Element) -> str:
        value = (device.findtext(path) or "N/A").strip()
        return "" if value in (good, "N/A", "[N/A]") else value

    return judge


def _uncorrectable(device: ElementTree.Element) -> str:
    errors = device.findall("ecc_errors/volatile/*")
    counts = {error.tag: _number(error.text) or 0 for error in errors if "uncorrectable" in error.tag}
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _remapped(device: ElementTree.Element) -> str:
    names = ("pending", "failure")
    fields = {name: (device.findtext(f"remapped_rows/remapped_row_{name}") or "No").strip() for name in names}
    return ", ".join(name for name, value in fields.items() if value == "Yes")


def _throttled(device: ElementTree.Element) -> str:
    # Drivers before R535 call this field clocks_throttle_reasons, later ones clocks_event_reasons.
    reasons = device.findall("clocks_event_reasons/*") + device.findall("clocks_throttle_reasons/*")
    active = [reason.tag.partition("_reason_")[2] for reason in reasons if (reason.text or "").strip() == "Active"]
    return ", ".join(name for name in active if name in _THROTTLES)


def _above(path: str, max_value: int, unit: str) -> Callable[[ElementTree.Element], str]:
    def judge(device: ElementTree.Element) -> str:
        value = _number(device.findtext(path))
        return f"{value} {unit}" if value is not None and value > max_value else ""

    return judge


def _narrow(device: ElementTree.Element) -> str:
    widths = "pci/pci_gpu_link_info/link_widths/"
    width = _number(device.findtext(f"{widths}current_link_width"))
    max_width = _number(device.findtext(f"{widths}max_link_width"))
    return f"x{width} of x{max_width}" if width and max_width and width < max_width else ""


_CHECKS = (
    ("GPU ECC", WARN, "on", "nvidia-smi -e 1, then RESET the GPU", _not("ecc_mode/current_ecc", "Enabled")),
    ("GPU memory errors", FAIL, "none uncorrectable since the driver was loaded", "RESET the GPU", _uncorrectable),
    ("GPU remapped rows", FAIL, "none", "pending: RESET the GPU; failure: ISOLATE the host", _remapped),
    ("GPU MIG", FAIL, "off", "nvidia-smi -mig 0", _not("mig_mode/current_mig", "Disabled")),
    ("GPU persistence", WARN, "on", "start nvidia-persistenced", _not("persistence_mode", "Enabled")),
    ("GPU throttling", FAIL, "none", "ISOLATE the host, look at its cooling and power", _throttled),
    (
        "GPU temperature",
        FAIL,
        f"<= {_IDLE_CELSIUS} C without load",
        "look at the cooling; a job may run there",
        _above("temperature/gpu_temp", _IDLE_CELSIUS, "C"),
    ),
    (
        "GPU memory in use",
        FAIL,
        f"<= {_IDLE_MIB} MiB",
        "a job runs there: nvidia-smi shows its processes; end it",
        _above("fb_memory_usage/used", _IDLE_MIB, "MiB"),
    ),
    ("GPU link width", FAIL, "the device's most", "ISOLATE the host, reseat the GPU", _narrow),
    ("GPU recovery", FAIL, "None", "RESET, REBOOT or ISOLATE, as it says", _not("gpu_recovery_action", "None")),
)


def nvlink(subject: Subject) -> Iterator[Result]:
    """Check that all NVLinks of each GPU are up."""
    done = run_program(["nvidia-smi", "nvlink", "--status"], _SECONDS) if subject.has_gpu else None
    if done is None or done.code or "Link" not in done.output:
        yield Result("NVLink", SKIP, "no NVLink here" if subject.has_gpu else "no GPU here")
        return
    yield judge_nvlink(done.output)


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
    failed = [" ".join(line.split()) for line in done.output.splitlines() if re.search(r"\bFail\b", line)]
    value = "; ".join(failed[:3]) or f"exit code {done.code}"
    is_good = not done.code and not failed
    remedy = "dcgmi diag -r 3, then ISOLATE the host"
    yield limited("dcgmi diag", is_good, value, "no test fails", remedy)


GPU_CHECKS = {"GPU": gpus, "NVLink": nvlink, "dcgmi diag": diagnostic}
