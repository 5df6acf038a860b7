"""Filters of system calls: each rule by an interpreter of classic BPF for both architectures, and by this kernel."""

import errno
import os
import resource
import signal
import struct
import subprocess
import sys

import pytest

from glm46.storage.judge import limited
from glm46.storage.judge.jail import BUBBLEWRAP, LANDLOCK, NO_JAIL, has_bubblewrap
from glm46.storage.judge.landlock import landlock_version
from glm46.storage.judge.limited import run_limited
from glm46.storage.judge.system_calls import bubblewrap_filter, code_filter, landlock_filter

LIMITS = dict(cpu_seconds=10, seconds=300, memory_gib=0.5)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003, "arm": 0x40000028}
ALLOWED = 0x7FFF0000
REFUSED = 0x00050000 | errno.EPERM
FAST_OPEN = 0x20000000
THREAD = 0x00010000

# name: numbers on x86-64 and aarch64, from asm/unistd.h
NUMBERS = {
    "read": (0, 63), "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269), "listen": (50, 201),
    "socket": (41, 198), "shmget": (29, 194), "add_key": (248, 217), "pidfd_getfd": (438, 438), "unshare": (272, 97),
    "setns": (308, 268), "clone": (56, 220), "fchmodat": (268, 53), "utimensat": (280, 88), "ioctl": (16, 29),
    "fchmodat2": (452, 452), "setxattr": (188, 5), "ptrace": (101, 117), "truncate": (76, 45),
}  # fmt: skip


def result(program: bytes, number: int, arguments: tuple[int, ...] = (), architecture: int = ARCHITECTURES["x86_64"]):
    """The result of a filter for a system call, as seccomp(2) defines it."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at = 0
    word = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (word,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            word &= value
        else:
            is_true = {0x15: word == value, 0x45: bool(word & value), 0x35: word >= value}[code]
            at += if_true if is_true else if_false


def of_landlock(machine: str, has_network: bool = False, may_change_modes: bool = True) -> bytes:
    return landlock_filter(7, has_network=has_network, may_change_modes=may_change_modes, machine=machine)


@pytest.mark.parametrize(("place", "machine"), [(0, "x86_64"), (1, "aarch64")])
def test_the_rules_of_each_filter(place, machine):
    def is_refused(program: bytes, name: str, *arguments: int) -> bool:
        found = result(program, NUMBERS[name][place], arguments, ARCHITECTURES[machine])
        assert found in (ALLOWED, REFUSED)
        return found == REFUSED

    code = code_filter(7, machine)
    for program in (code, of_landlock(machine), of_landlock(machine, has_network=True)):
        for name in ("prlimit64", "sched_setaffinity"):
            assert not is_refused(program, name, 0, 1) and is_refused(program, name, 4321, 1)
        assert not is_refused(program, "prlimit64", 1 << 32), "the kernel reads 32 bits"
        assert not is_refused(program, "setpriority", 0, 0, 5) and is_refused(program, "setpriority", 0, 4321, 5)
        assert is_refused(program, "setpriority", 2, 0, 5), "all processes of a user"
        assert not is_refused(program, "ioprio_set", 1, 0) and is_refused(program, "ioprio_set", 3, 0)
        for name in ("shmget", "add_key", "pidfd_getfd", "unshare", "setns"):
            assert is_refused(program, name)
        assert is_refused(program, "clone", THREAD | 0x10000000), "in a new namespace"
        assert not is_refused(program, "read") and not is_refused(program, "clone", THREAD)
    for name, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
        arguments = [0] * 4
        assert not is_refused(of_landlock(machine), name, *arguments)
        arguments[flags] = FAST_OPEN | 0x4000
        assert is_refused(of_landlock(machine), name, *arguments)
        assert not is_refused(of_landlock(machine, has_network=True), name, *arguments)
    for arguments, is_wrong in (
        ((2, 1, 0), False), ((10, 0x80801, 6), False), ((1, 1, 0), True), ((2, 2, 0), True), ((2, 1, 262), True),
    ):  # fmt: skip
        assert is_refused(of_landlock(machine), "socket", *arguments) == is_wrong
        assert is_refused(code, "socket", *arguments)
    assert is_refused(of_landlock(machine), "listen") and is_refused(code, "listen")
    attributes = ("fchmodat", "fchmodat2", "utimensat", "setxattr")
    for name in attributes:
        assert is_refused(code, name) and is_refused(of_landlock(machine, may_change_modes=False), name)
        assert not is_refused(of_landlock(machine), name), "git and others need it"
    assert is_refused(code, "ioctl", 3, 0x40086602) and is_refused(code, "ioctl", 3, 0x401C5820)
    assert not is_refused(code, "ioctl", 3, 0x5401)
    assert is_refused(code, "ptrace") and is_refused(code, "clone", 17)
    assert is_refused(code_filter(2, machine), "truncate") and not is_refused(code, "truncate")
    assert is_refused(bubblewrap_filter(machine), "pidfd_getfd") and is_refused(bubblewrap_filter(machine), "add_key")
    assert not is_refused(bubblewrap_filter(machine), "shmget"), "its namespace ends with the program"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls_of_other_architectures_are_refused(machine):
    for program in (code_filter(7, machine), of_landlock(machine), bubblewrap_filter(machine)):
        for name, architecture in ARCHITECTURES.items():
            expected = ALLOWED if name == machine else REFUSED
            assert result(program, NUMBERS["read"][machine == "aarch64"], (), architecture) == expected
        assert result(program, 0x40000000, (), ARCHITECTURES[machine]) == REFUSED, "x32"
    assert not code_filter(7, "riscv64"), "no numbers are known"


KINDS = pytest.mark.parametrize("kind", [
    pytest.param(LANDLOCK, marks=pytest.mark.skipif(not landlock_version(), reason="the kernel has no Landlock")),
    pytest.param(BUBBLEWRAP, marks=pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap does not start here")),
    NO_JAIL,
])  # fmt: skip


@KINDS
def test_code_does_not_reach_limits_cores_and_priority_of_another_process(kind, monkeypatch):
    monkeypatch.setattr(limited, "jail_of_code", lambda: kind)
    with subprocess.Popen([sys.executable, "-S", "-c", "import time\ntime.sleep(1000)"]) as other:

        def state() -> tuple:
            return (
                resource.prlimit(other.pid, resource.RLIMIT_NOFILE), resource.prlimit(other.pid, resource.RLIMIT_CPU),
                os.sched_getaffinity(other.pid), os.getpriority(0, other.pid), os.sched_getscheduler(other.pid),
            )  # fmt: skip

        before = state()
        for call in (
            "resource.prlimit(P, resource.RLIMIT_NOFILE, (7, 7))", "resource.prlimit(P, resource.RLIMIT_CPU, (0, 0))",
            "os.sched_setaffinity(P, [min(os.sched_getaffinity(0))])", "os.setpriority(os.PRIO_PROCESS, P, 19)",
            "os.sched_setscheduler(P, os.SCHED_IDLE, os.sched_param(0))", "os.setpriority(os.PRIO_USER, 0, 19)",
        ):  # fmt: skip
            ended = run_limited(f"import os, resource\nP = {other.pid}\n{call}", **LIMITS)
            assert ended.error.startswith(("PermissionError", "ProcessLookupError")), call
        own = "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\nos.nice(1)\nprint(1)"
        assert run_limited(own, **LIMITS) == (0, "1\n", "")
        assert state() == before and other.poll() is None
        other.send_signal(signal.SIGKILL)


@KINDS
def test_code_changes_no_mode_and_leaves_nothing_in_the_kernel(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(limited, "jail_of_code", lambda: kind)
    private = tmp_path / "key"
    private.touch(mode=0o600)
    refused = ("PermissionError", "FileNotFoundError")
    for call in (
        f"os.chmod({str(private)!r}, 0o666)", f"os.utime({str(private)!r}, (1, 1))",
        f"os.setxattr({str(private)!r}, 'user.a', b'b')", f"os.chown({str(private)!r}, os.getuid(), os.getgid())",
        f"os.fchmod(os.open({os.__file__!r}, os.O_RDONLY), 0o666)",
    ):  # fmt: skip
        assert run_limited(f"import os\n{call}", **LIMITS).error.startswith(refused), call
    assert private.stat().st_mode & 0o777 == 0o600 and private.stat().st_mtime > 1
    for call in ("shmget(0, 4096, 0o1600)", "msgget(0, 0o1600)", "semget(0, 1, 0o1600)"):
        program = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.{call}, ctypes.get_errno())"
        assert run_limited(program, **LIMITS) == (0, f"-1 {errno.EPERM}\n", ""), call
