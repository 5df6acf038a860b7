"""Checks of one host that need no ranks: limits, clock, ports, InfiniBand, and variables of NCCL."""

import ctypes
import errno
import math
import os
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from glm46.compute.distributed.environment import variables_that_begin
from glm46.config.faults import counted
from glm46.operate.cluster.results import FAIL, SKIP, WARN, Defect, Result, judge
from glm46.operate.estimate.machine import Machine

_ROOT = Path("/")
"""Folder of /sys and /dev; tests pass their own."""
_MIB = 2**20
_UNSYNCHRONISED = 5
"""Result of adjtimex for a clock that nothing corrects. Source: adjtimex(2), TIME_ERROR."""
_OPEN_FILES = 1024
_OPEN_FILES_GPU = 65_536
"""A rank of a large run has sockets to thousands of others, and files of data and checkpoints."""
_PROCESSES = 4096
_LOCKED_MIB = 16 * 1024
"""RDMA locks the memory that it registers; vendors' health checks require at least this much."""
_SHARED_MIB = 64
_SHARED_MIB_GPU = 1024
"""Space in /dev/shm for each rank: batches of loader workers, and NCCL's buffers between GPUs without peer access."""
_FREE_MIB = 1024
NCCL_VARIABLES = {
    "NCCL_ALGO": (FAIL, "", "unset it: Tree has no all-gather and no reduce-scatter, which FSDP calls"),
    "NCCL_PROTO": (WARN, "", "unset it: Simple slows the small messages of experts"),
    "NCCL_IB_HCA": (WARN, "", "unset it, or exclude one: ^=mlx5_2"),
    "NCCL_IB_DISABLE": (WARN, "0", "unset it: 1 sends everything over TCP"),
    "NCCL_P2P_DISABLE": (WARN, "0", "unset it: 1 sends everything between GPUs of a host through its memory"),
    "NCCL_SHM_DISABLE": (WARN, "0", "unset it: 1 sends what has no peer access over the network of the host"),
    "NCCL_TREE_THRESHOLD": (WARN, "", "unset it: removed in NCCL 2.5, without effect"),
    "NCCL_TIMEOUT": (WARN, "", "unset it: NCCL has no such variable; [comm] has the timeouts of a run"),
    "NCCL_DEBUG": (WARN, "WARN VERSION", "unset it, or VERSION or WARN, once the fault is found"),
    "NCCL_NVLS_ENABLE": (WARN, "1 2", "unset it: 0 costs a quarter of the bandwidth inside of a host with NVSwitch"),
}
"""Status, values without harm and remedy of variables that a user may have set, see docs/nccl.md."""


def limits(machine: Machine, processes: int, root: Path = _ROOT) -> Result:
    """Check the limits of processes, which InfiniBand and many sockets need, and the memory that ranks can use.

    Args:
        processes: ranks of this host.
    """
    files = _OPEN_FILES_GPU if machine.gpus else _OPEN_FILES
    shared = processes * (_SHARED_MIB_GPU if machine.gpus else _SHARED_MIB)
    free_shared = shutil.disk_usage(root / "dev/shm").free / _MIB
    free = machine.free_bytes / _MIB
    rows = [
        ("open files", _soft_limit(resource.RLIMIT_NOFILE), files, "ulimit -n, or LimitNOFILE of the service"),
        ("user processes", _soft_limit(resource.RLIMIT_NPROC), _PROCESSES, "ulimit -u, or nproc in limits.conf"),
        ("MiB in /dev/shm", free_shared, shared, "remove files of dead processes, or --shm-size of the container"),
        ("MiB of memory", free, processes * _FREE_MIB, "end what else runs there: ps aux --sort=-rss | head"),
    ]
    if (root / "sys/class/infiniband").is_dir():
        locked = _soft_limit(resource.RLIMIT_MEMLOCK) / _MIB
        rows.append(("MiB of locked memory", locked, _LOCKED_MIB, "ulimit -l unlimited in limits.conf"))
    faults = [
        Defect(FAIL, f"{name}: {measured:,.0f}", remedy) for name, measured, least, remedy in rows if measured < least
    ]
    value = ", ".join(f"{measured:,.0f} {name}" for name, measured, _, _ in rows)
    return judge("limits", faults, value, ", ".join(f">= {least:,} {name}" for name, _, least, _ in rows))


def _soft_limit(kind: int) -> float:
    soft, _ = resource.getrlimit(kind)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def clock() -> Result:
    """Check that a program synchronises the clock. The ranks measure its offset to other hosts."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # struct timex is smaller
    remedy = "start chrony or systemd-timesyncd; certificates, logs and file times of hosts are compared"
    faults = [Defect(WARN, "not synchronised", remedy)] if state == _UNSYNCHRONISED else []
    return judge("clock", faults, "synchronised", "synchronised")


def ports(run_ports: Mapping[str, int]) -> Result:
    """Check that the ports of the run can be opened on this host, the first node.

    Args:
        run_ports: ports by the variable or key that sets them.
    """
    if not run_ports:
        return Result("ports", SKIP, "the run opens none here")
    faults = []
    for name, port in run_ports.items():
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            key = name.partition(" +")[0]
            # A run continues without its exporter, and a later restart may find its port free.
            status = FAIL if name == "MASTER_PORT" or error.errno == errno.EACCES else WARN
            remedy = f"end what has the port (ss -ltnp 'sport = :{port}' as root), or set another {key} on all hosts"
            if error.errno == errno.EACCES:
                remedy = f"only root opens it: set {key} to 1024 or more on all hosts"
            faults.append(Defect(status, f"{name} {port}: {os.strerror(error.errno or 0)}", remedy))
    return judge("ports", faults, ", ".join(map(str, run_ports.values())), "free")


def infiniband(root: Path = _ROOT) -> Result:
    """Check that each InfiniBand or RoCE port is up, and as fast as the others."""
    folders = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    if not folders:
        return Result("InfiniBand", SKIP, "no adapter here")
    rates = {}
    faults = []
    for folder in folders:
        name = f"{folder.parents[1].name}/{folder.name}"
        state, link, rate = ((folder / file).read_text().strip() for file in ("state", "phys_state", "rate"))
        rates[name] = float((rate.split() or ["0"])[0])  # "400 Gb/sec (4X NDR)"
        if (state, link) != ("4: ACTIVE", "5: LinkUp"):
            remedy = "look at cable and switch port; exclude an adapter that is not wired: NCCL_IB_HCA=^=NAME"
            faults.append(Defect(FAIL, f"{name} {state}, {link}", remedy))
    highest = max(rates.values())
    remedy = "ISOLATE the host, replace the cable"
    faults += [Defect(FAIL, f"{name} {rate:g} Gb/s", remedy) for name, rate in rates.items() if rate < highest]
    value = f"{counted(len(rates), 'port')} up, {highest:g} Gb/s"
    return judge("InfiniBand", faults, value, "all ACTIVE and LinkUp, as fast as the fastest port")


def nccl_variables() -> Result:
    """Check for variables of NCCL that slow or break a run, see docs/nccl.md."""
    variables = variables_that_begin("NCCL_")
    faults = [
        Defect(status, f"{name}={variables[name]}", remedy)
        for name, (status, harmless, remedy) in NCCL_VARIABLES.items()
        if name in variables and variables[name].upper() not in harmless.split()
    ]
    return judge("NCCL variables", faults, ", ".join(sorted(variables)) or "none set", "none that harms")
