"""Programs in limited processes: what hangs, forks or fills memory meets its limit; the filters of system calls."""

import errno
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time

import pytest

from glm46.config.text_recipe import TextRecipe
from glm46.storage.data.manifest import load_manifest
from glm46.storage.judge import compilers, limited
from glm46.storage.judge.compilers import run_fault
from glm46.storage.judge.jail import BUBBLEWRAP, LANDLOCK, NO_JAIL, has_bubblewrap
from glm46.storage.judge.landlock import landlock_version
from glm46.storage.judge.limited import run_limited
from glm46.storage.judge.system_calls import bubblewrap_filter, code_filter, landlock_filter
from glm46.storage.prepare.pipeline import prepare_text

LIMITS = dict(cpu_seconds=1, seconds=300, memory_gib=0.25)
CLONE = "import ctypes\nprint(ctypes.CDLL(None).syscall({}, {}, 0, 0, 0, 0))"


@pytest.mark.parametrize("program, error", [
    ("import os\nos.fork()", "PermissionError"), ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
    ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "PermissionError"),
    ("import socket\nsocket.socket()", "PermissionError"), ("bytearray(2**30)", "MemoryError"),
    ("x = []\nwhile True: x.append('a' * 2**20)", "MemoryError"), ("while True: print('x' * 2**16)", "OSError"),
    ("import os\nos.environ['HOME']", "KeyError"),
    ("open('big', 'wb').write(bytes(2**23))", "OSError"), ("import sys\nsys.exit('no')", "no"),
])  # fmt: skip
def test_a_program_meets_its_limits(program, error):
    ended = run_limited(program, **LIMITS)
    assert ended.status > 0 and ended.error.startswith(error)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    pytest.param(LANDLOCK, marks=pytest.mark.skipif(not landlock_version(), reason="the kernel has no Landlock")),
    pytest.param(BUBBLEWRAP, marks=pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap does not start here")),
])  # fmt: skip
def test_files_and_processes_of_others_are_out_of_reach(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(limited, "jail_of_code", lambda: kind)
    secret = tmp_path / "secret"
    secret.write_text("key")
    for place in (secret, *(f"/proc/{os.getpid()}/{name}" for name in ("mem", "environ", "fd/0")), "/etc/shadow"):
        assert run_limited(f"open({str(place)!r})", **LIMITS).error.startswith(("PermissionError", "FileNotFound")), (
            place
        )
    run_limited(f"open({str(secret)!r}, 'w')", **LIMITS)
    assert secret.read_text() == "key"
    assert run_limited("open('own', 'w').write('a')\nprint(open('own').read())", **LIMITS) == (0, "a\n", "")
    assert run_limited("while True: pass", **LIMITS).status == -signal.SIGKILL
    assert run_limited("import os\nos.fork()", **LIMITS).error.startswith("PermissionError")


@pytest.mark.parametrize("flags", [int(signal.SIGCHLD), 0x100 | int(signal.SIGCHLD)])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls")
def test_system_calls_that_start_a_process_fail_without_libc_too(flags):
    for number in (56, 57, 58, 435, 0x40000000 | 57):  # clone, fork, vfork, clone3, fork by another number
        assert run_limited(CLONE.format(number, flags), **LIMITS)[:2] == (0, "-1\n")


def test_a_lower_hard_limit_of_the_job_stays(tmp_path):
    """A limit that could not be taken on would be a verdict on each program."""
    script = tmp_path / "job.py"
    script.write_text(
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "from glm46.storage.judge.compilers import run_fault\n"
        "print(run_fault('print(1)'), run_fault('open(\"a\", \"wb\").write(bytes(2**21))'))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert ended.stdout == "None ends with OSError\n", ended.stderr


def test_threads_input_and_output_are_there():
    program = "import threading, sys\nt = threading.Thread(target=lambda: print(sys.stdin.read()))\nt.start()\nt.join()"
    assert run_limited(program, "é\n", **LIMITS) == (0, "é\n\n", "")
    assert run_limited("x = 1\n" * 50_000, **LIMITS).status == 0  # longer than an argument of a program may be


@pytest.mark.slow
def test_time_ends_a_program_that_computes_and_one_that_waits():
    start = time.monotonic()
    assert run_limited("while True: pass", **LIMITS).status == -signal.SIGKILL
    assert run_limited("import time\ntime.sleep(999)", **LIMITS | {"seconds": 0.3}).status is None
    ignores = "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(999)"
    assert run_limited(ignores, **LIMITS | {"seconds": 0.3}).status is None
    assert time.monotonic() - start < 100


@pytest.mark.parametrize(
    "program, fault",
    [
        ("assert sum(range(10)) == 45\n", None),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "runs too long"),  # as the limit of CPU time does
        ("bytearray(2**40)\n", "ends with MemoryError"),
        ("import a_module_that_is_nowhere\n", "needs a module that is not here"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "ends by SIGSEGV"),
        ("class Odd(Exception):\n    pass\nraise Odd\n", "ends with an error"),
        ("import os\nos._exit(3)", "ends with an error"),
    ],
)
def test_the_cause_is_told(program, fault, monkeypatch):
    monkeypatch.setattr(compilers, "_RUN_LIMITS", LIMITS)
    assert run_fault(program) == fault


@pytest.mark.slow
def test_documents_that_do_not_run_are_dropped_and_counted_by_cause(tmp_path):
    programs = [
        "assert sum(range(10)) == 45\n", "def f(:\n", "assert sum(range(10)) == 44\n", "assert sum(range(10)) == 46\n",
        "import os\nwhile True:\n    os.fork()\n",
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in programs))
    recipe = TextRecipe(
        input=(str(tmp_path / "a.jsonl"),), output=str(tmp_path / "out"), verify="execute", held_out=0.0, processes=1,
        deduplicate="exact",
    )  # fmt: skip
    said = []
    prepare_text(recipe, report=said.append)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.splits["train"].documents == 1
    causes = {"ends with SyntaxError": 1, "ends with AssertionError": 2, "ends with PermissionError": 1}
    assert manifest.dropped == causes
    assert all(f"{cause}: {number}" in "\n".join(said) for cause, number in causes.items())


LOOSE_LIMITS = dict(cpu_seconds=10, seconds=300, memory_gib=0.5)
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
            ended = run_limited(f"import os, resource\nP = {other.pid}\n{call}", **LOOSE_LIMITS)
            assert ended.error.startswith(("PermissionError", "ProcessLookupError")), call
        own = "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\nos.nice(1)\nprint(1)"
        assert run_limited(own, **LOOSE_LIMITS) == (0, "1\n", "")
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
        assert run_limited(f"import os\n{call}", **LOOSE_LIMITS).error.startswith(refused), call
    assert private.stat().st_mode & 0o777 == 0o600 and private.stat().st_mtime > 1
    for call in ("shmget(0, 4096, 0o1600)", "msgget(0, 0o1600)", "semget(0, 1, 0o1600)"):
        program = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.{call}, ctypes.get_errno())"
        assert run_limited(program, **LOOSE_LIMITS) == (0, f"-1 {errno.EPERM}\n", ""), call
