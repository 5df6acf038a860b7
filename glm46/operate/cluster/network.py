"""Checks of the network of one host: InfiniBand ports, named interfaces, variables of NCCL."""

import time
from collections.abc import Iterator
from pathlib import Path

from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN, Result, Subject, limited

_INFINIBAND = "sys/class/infiniband"
_INTERFACES = "sys/class/net"
_RISING = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
_WATCH_SECONDS = 0.5

NCCL_VARIABLES = {
    "NCCL_ALGO": (
        FAIL,
        "unset it: without a fall-back, Tree has no all-gather and no reduce-scatter, which FSDP calls",
    ),
    "NCCL_PROTO": (WARN, "unset it: NCCL chooses by message size; Simple slows the small messages of experts"),
    "NCCL_IB_HCA": (
        WARN,
        "unset it, or exclude one: ^=mlx5_2; a name is a prefix, and one adapter is all there is then",
    ),
    "NCCL_IB_DISABLE": (WARN, "unset it, unless InfiniBand is to be avoided: 1 sends everything over TCP"),
    "NCCL_P2P_DISABLE": (WARN, "unset it: 1 sends everything between GPUs of a host through its memory"),
    "NCCL_SHM_DISABLE": (WARN, "unset it: 1 sends what has no peer access over the network of the host"),
    "NCCL_TREE_THRESHOLD": (WARN, "unset it: removed in NCCL 2.5, without effect"),
    "NCCL_TIMEOUT": (WARN, "unset it: NCCL has no such variable; [comm] has the timeouts of a run"),
    "NCCL_DEBUG": (WARN, "unset it, or VERSION or WARN, once the fault is found"),
    "NCCL_NVLS_ENABLE": (WARN, "unset it: 0 costs a quarter of the bandwidth inside of a host with NVSwitch"),
}
"""Verdict and remedy of variables that a user may have set, see docs/nccl.md."""
_HARMLESS = {
    "NCCL_IB_DISABLE": "0",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_SHM_DISABLE": "0",
    "NCCL_DEBUG": "WARN VERSION",
    "NCCL_NVLS_ENABLE": "1 2",
}
"""Values that are the defaults of these variables, or that only change a line of output."""


def infiniband(subject: Subject) -> Iterator[Result]:
    """Check the state, rate and error counters of each InfiniBand or RoCE port."""
    ports = sorted((subject.root / _INFINIBAND).glob("*/ports/*"))
    if not ports:
        yield Result("InfiniBand", SKIP, "no adapter here")
        return
    names = {port: f"{port.parents[1].name}/{port.name}" for port in ports}
    states = {port: _read(port / "state").partition(": ")[2] for port in ports}  # "4: ACTIVE"
    links = {port: _read(port / "phys_state").partition(": ")[2] for port in ports}  # "5: LinkUp"
    down = [
        f"{names[port]} {states[port]}, {links[port]}"
        for port in ports
        if (states[port], links[port]) != ("ACTIVE", "LinkUp")
    ]
    remedy = "look at cable and switch port; exclude an adapter that is not wired: NCCL_IB_HCA=^=NAME"
    yield limited("InfiniBand", not down, ", ".join(down) or f"{len(ports)} ports up", "all ACTIVE, LinkUp", remedy)
    rates = {port: float((_read(port / "rate").split() or ["0"])[0]) for port in ports}  # "400 Gb/sec (4X NDR)"
    slow = [f"{names[port]} {rate:g} Gb/s" for port, rate in rates.items() if rate < max(rates.values())]
    limit = f"{max(rates.values()):g} Gb/s, as the fastest port"
    yield limited("InfiniBand rate", not slow, ", ".join(slow) or "equal", limit, "ISOLATE the host, replace the cable")
    before = {port: _counters(port) for port in ports}
    time.sleep(_WATCH_SECONDS)
    rising = [
        f"{names[port]} {name} + {count - before[port][name]}"
        for port in ports
        for name, count in _counters(port).items()
        if count > before[port].get(name, count)
    ]
    value = ", ".join(rising) or "none rise"
    remedy = "ISOLATE the host, replace the cable"
    yield limited("InfiniBand errors", not rising, value, "none rise", remedy)


def _counters(port: Path) -> dict[str, int]:
    texts = {name: _read(port / "counters" / name) for name in _RISING}
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def interfaces(subject: Subject) -> Iterator[Result]:
    """Check that the interfaces in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME exist and are up."""
    present = sorted(path.name for path in (subject.root / _INTERFACES).glob("*"))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = subject.variables.get(variable)
        if value is None:
            continue
        is_nccl = variable.startswith("NCCL")
        is_excluded = value.startswith("^")
        patterns = [name.lstrip("=") for name in value.lstrip("^=").split(",")]
        is_exact = not is_nccl or value.lstrip("^").startswith("=")
        chosen = [name for name in present if _matches(name, patterns, is_exact=is_exact)]
        chosen = sorted(set(present) - set(chosen)) if is_excluded else chosen
        up = [name for name in chosen if (subject.read(f"{_INTERFACES}/{name}/operstate") or "") in ("up", "unknown")]
        limit = f"one of {', '.join(present)} that is up"
        remedy = f"correct or unset {variable}; ip -br link shows them"
        yield limited(variable, bool(up), f"{value}: {', '.join(up) or 'none up'}", limit, remedy)


def _matches(interface: str, patterns: list[str], *, is_exact: bool) -> bool:
    """True if a pattern is the name of an interface, or, unless exact, its prefix."""
    return any(interface == pattern if is_exact else interface.startswith(pattern) for pattern in patterns)


def nccl_variables(subject: Subject) -> Iterator[Result]:
    """Check for variables of NCCL that slow or break a run, see docs/nccl.md."""
    listed = [name for name in NCCL_VARIABLES if name in subject.variables]
    bad = [name for name in listed if subject.variables[name].upper() not in _HARMLESS.get(name, "").split()]
    for name in bad:
        verdict, remedy = NCCL_VARIABLES[name]
        yield Result("NCCL variables", verdict, f"{name}={subject.variables[name]}", "unset", remedy)
    if not bad:
        set_names = sorted(name for name in subject.variables if name.startswith("NCCL_"))
        yield Result("NCCL variables", PASS, ", ".join(set_names) or "none set", "none that harms")


NETWORK_CHECKS = {"InfiniBand": infiniband, "interfaces": interfaces, "NCCL variables": nccl_variables}
