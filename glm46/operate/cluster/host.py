"""Checks of one host that need neither a GPU nor a config: limits, memory, clock, names, ports, kernel log."""

import ctypes
import errno
import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator

from glm46.config.faults import counted
from glm46.operate.cluster.results import FAIL, PASS, SKIP, WARN, Result, Subject, limited, run_program
from glm46.operate.launch.nodes import is_loopback

_GIB = 2**30

_UNSYNCHRONISED = 5
"""Result of adjtimex for a clock that nothing corrects. Source: adjtimex(2), TIME_ERROR."""

_OPEN_FILES = 1024
_OPEN_FILES_GPU = 65_536
"""A rank of a large run has sockets to thousands of others, and files of data and checkpoints."""
_PROCESSES = 4096
_LOCKED_BYTES = 16 * _GIB
"""RDMA locks the memory that it registers; vendors' health checks require at least this much."""
_SHARED_BYTES = 64 * 2**20
_SHARED_BYTES_GPU = _GIB
"""Space in /dev/shm for each rank: batches of loader workers, and NCCL's buffers between GPUs without peer access."""
_FREE_BYTES = _GIB

_XID_ACTIONS = {
    "RESET the GPU": (48, 62, 64, 95, 109, 110, 136, 140, 143),
    "RESET the GPU: NVLink": (74,),
    "RESET or REBOOT, as the message says": (154,),
    "REBOOT the host: GPU has fallen off the bus": (79,),
    "REBOOT the host: GSP": (119, 120),
    "ISOLATE the host: power connector": (54,),
    "MONITOR this GPU: the fault is of an application, or contained": (13, 31, 43, 45, 63, 92, 94),
}
"""Xid errors in NVIDIA's list by the action that a GPU needs after them; MONITOR is a WARN."""
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_KERNEL_FAULTS = {
    "out of memory": re.compile(r"Out of memory: Killed process|Memory cgroup out of memory"),
    "disk": re.compile(r"I/O error, dev|blk_update_request: .*error|EXT4-fs error|XFS .*[Cc]orruption|Remounting file"),
    "memory": re.compile(r"Hardware Error|Machine check events logged|EDAC .* UE "),
}
_DMESG_SECONDS = 5.0


def process_limits(subject: Subject) -> Iterator[Result]:
    """Check the limits of open files, of processes and threads, and of locked memory, which InfiniBand needs."""
    files = _OPEN_FILES_GPU if subject.has_gpu else _OPEN_FILES
    remedy = "ulimit -n, or LimitNOFILE of the service that starts it"
    yield _limit("open files", resource.RLIMIT_NOFILE, files, f">= {files:,}", remedy)
    remedy = "ulimit -u, or nproc in limits.conf"
    yield _limit("user processes", resource.RLIMIT_NPROC, _PROCESSES, f">= {_PROCESSES:,}", remedy)
    if (subject.root / "sys/class/infiniband").is_dir():
        remedy = "ulimit -l unlimited in limits.conf"
        yield _limit("locked memory", resource.RLIMIT_MEMLOCK, _LOCKED_BYTES, "unlimited, or >= 16 GiB", remedy)
    else:
        yield Result("locked memory", SKIP, "no InfiniBand here, which alone needs it")


def _limit(check: str, kind: int, minimum: int, limit: str, remedy: str) -> Result:
    soft, _ = resource.getrlimit(kind)
    is_unlimited = soft == resource.RLIM_INFINITY
    return limited(check, is_unlimited or soft >= minimum, "unlimited" if is_unlimited else f"{soft:,}", limit, remedy)


def shared_memory(subject: Subject) -> Iterator[Result]:
    """Check the free space of /dev/shm."""
    free = shutil.disk_usage(subject.root / "dev/shm").free
    needed = subject.processes * (_SHARED_BYTES_GPU if subject.has_gpu else _SHARED_BYTES)
    limit = f">= {needed / 2**20:,.0f} MiB for {counted(subject.processes, 'rank')}"
    remedy = "remove what dead processes have left there, or start the container with --shm-size"
    yield limited("/dev/shm", free >= needed, f"{free / 2**20:,.0f} MiB free", limit, remedy)


def free_memory(subject: Subject) -> Iterator[Result]:
    """Check the memory of the host that ranks can use."""
    free = subject.machine.free_bytes
    needed = subject.processes * _FREE_BYTES
    limit = f">= {counted(subject.processes, 'rank')} x 1 GiB"
    remedy = "end what else runs there: ps aux --sort=-rss | head"
    yield limited("host memory", free >= needed, f"{free / _GIB:.1f} GiB available", limit, remedy)


def clock(subject: Subject) -> Iterator[Result]:
    """Check that a program synchronises the clock. The ranks measure its offset to other hosts."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # struct timex is smaller
    remedy = "start chrony or systemd-timesyncd; certificates, logs and file times of hosts are compared"
    value = "not synchronised" if state == _UNSYNCHRONISED else "synchronised"
    yield limited("clock", state != _UNSYNCHRONISED, value, "synchronised", remedy, otherwise=WARN)


def names(subject: Subject) -> Iterator[Result]:
    """Check that the names of this host and of the first node have addresses that other hosts can use."""
    name_by_check = {"own name": socket.gethostname()}
    if subject.nodes > 1:
        name_by_check["first node"] = subject.address
    # A run on one host uses the loopback address.
    otherwise = WARN if subject.nodes == 1 else FAIL
    for check, name in name_by_check.items():
        addresses = addresses_of(name)
        shown = f"{name}: {', '.join(addresses) or 'unknown'}"
        remedy = f"add {name} to DNS or to /etc/hosts of all hosts"
        yield limited(check, bool(addresses), shown, "known", remedy, otherwise=otherwise)
        if not is_loopback(subject.address) and any(address.startswith("127.") for address in addresses):
            remedy = f"take {name} out of the line of 127.0.1.1 in /etc/hosts: other hosts would be sent to themselves"
            yield Result(check, FAIL, shown, "an address of the network", remedy)


def addresses_of(name: str) -> list[str]:
    """Return the IP addresses of a host name, sorted; empty if it is unknown."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def ports(subject: Subject) -> Iterator[Result]:
    """Check that the ports of the run can be opened on the first node."""
    if subject.node != 0:
        return
    free = []
    for name, port in subject.ports.items():
        try:
            socket.create_server(("", port)).close()
            free.append(str(port))
        except OSError as error:
            key = name.partition(" +")[0]
            # A run continues without its exporter, and a later restart may find its port free.
            verdict = FAIL if name == "MASTER_PORT" else WARN
            remedy = f"end what has the port (ss -ltnp 'sport = :{port}' as root), or set another {key} on all hosts"
            if error.errno == errno.EACCES:
                verdict = FAIL
                remedy = f"only root opens it: set {key} to 1024 or more on all hosts"
            yield Result(f"port {name}", verdict, f"{port}: {os.strerror(error.errno or 0)}", "free", remedy)
    if free:
        yield Result("ports", PASS, f"{', '.join(free)} are free", "free")


def kernel_log(subject: Subject) -> Iterator[Result]:
    """Check the kernel's log since boot for faults of GPUs, memory and disks."""
    done = run_program(["dmesg"], _DMESG_SECONDS)
    if done is None or done.returncode:
        reason = "dmesg is not installed" if done is None else done.stdout.strip().splitlines()[-1]
        yield Result("kernel log", SKIP, f"{reason}; as root, or with kernel.dmesg_restrict = 0")
        return
    yield from kernel_faults(done.stdout)


def kernel_faults(log: str) -> Iterator[Result]:
    """Return the results for the text of a kernel log."""
    xids = [(device, int(number)) for device, number in _XID.findall(log)]
    for remedy, numbers in _XID_ACTIONS.items():
        for number in numbers:
            devices = [device for device, xid in xids if xid == number]
            if devices:
                value = f"Xid {number} x {len(devices)} on {', '.join(sorted(set(devices))[:4])}"
                yield Result("kernel log", WARN if remedy.startswith("MONITOR") else FAIL, value, "none", remedy)
    has_faults = bool(xids)
    for kind, pattern in _KERNEL_FAULTS.items():
        lines = [line.strip() for line in log.splitlines() if pattern.search(line)]
        if lines:
            has_faults = True
            value = f"{kind} x {len(lines)}, last: {lines[-1][:80]}"
            yield Result("kernel log", WARN, value, "none", "MONITOR this host: dmesg -T shows when, and what it hit")
    if not has_faults:
        yield Result("kernel log", PASS, "no fault of GPU, memory or disk", "none")


HOST_CHECKS = {
    "process limits": process_limits,
    "/dev/shm": shared_memory,
    "host memory": free_memory,
    "clock": clock,
    "own name": names,
    "port": ports,
    "kernel log": kernel_log,
}
