"""Runs Python programs that nobody has read, each in a process with limits of time, memory and output, which can start
no other process and open no network connection, nor, where the kernel has Landlock, memory and descriptors of other
processes. This is not a sandbox: it may read and write files as this user may."""

import ctypes
import errno
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

_OUTPUT_BYTES = 2**21
"""Most bytes of each file that a program writes, its output included."""
_ERROR_BYTES = 4096

_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES, _SECCOMP, _SECCOMP_FILTER = 1, 38, 22, 2  # of prctl
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # of Landlock, on each architecture
_MAKE_SOCKET, _MAKE_BLOCK_DEVICE, _SIGNALS = (
    1 << 9,
    1 << 11,
    1 << 1,
)  # in the fields handled_access_fs and scoped of its rules
_CLONE_THREAD = 0x00010000
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # of classic BPF
_CALL, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # places in struct seccomp_data


class _Calls(NamedTuple):
    """Numbers of system calls. Source: asm/unistd.h; AUDIT_ARCH in linux/audit.h."""

    architecture: int
    refused: tuple[int, ...]
    """fork, vfork, socket."""
    clone: int
    clone3: int = 435


_CALLS = {"x86_64": _Calls(0xC000003E, (57, 58, 41), 56), "aarch64": _Calls(0xC00000B7, (198,), 220)}


class _Step(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(_Step)))


class ProgramEnd(NamedTuple):
    """The end of a program."""

    status: int | None
    """Exit code, or minus the number of the signal that ended it; None if it took too long."""
    output: str
    """Its standard output."""
    error: str
    """The last line of its standard error."""


def run_limited(program: str, given: str = "", *, cpu_seconds: float, seconds: float, memory_gib: float) -> ProgramEnd:
    """Run the text of a Python program in a folder of its own, which is removed.

    Args:
        given: standard input.
        cpu_seconds: rounded to whole seconds, at least one.
        seconds: by the clock; then it is killed.
        memory_gib: most address space.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace", newline="")
        stdin.write(given.encode(errors="replace"))
        stdin.seek(0)
        with limited_process(
            ["program.py"], folder, cpu_seconds, memory_gib, stdin=stdin, stdout=stdout, stderr=stderr
        ) as process:
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
        stdout.seek(0)
        stderr.seek(max(stderr.seek(0, os.SEEK_END) - _ERROR_BYTES, 0))
        lines = stderr.read().decode(errors="replace").strip().splitlines()
        return ProgramEnd(status, stdout.read().decode(errors="replace"), lines[-1] if lines else "")


@contextmanager
def limited_process(
    arguments: Sequence[str], folder: str, cpu_seconds: float, memory_gib: float, **files: Any
) -> Iterator[subprocess.Popen]:
    """A Python in a session of its own with the limits of `run_limited`, which is killed at the end of the context.

    Args:
        arguments: of Python.
        folder: where it runs.
        files: standard files and ``pass_fds`` of `subprocess.Popen`.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", *arguments], cwd=folder, env={}, start_new_session=True,
        preexec_fn=_limits(max(1, round(cpu_seconds)), int(memory_gib * 2**30)), **files,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def limits_of_session() -> Callable[[], None]:
    """As `_limits`, for a program that may start others and open connections: it ends with the thread that starts it,
    and can neither read nor signal processes other than its own where the kernel has Landlock."""
    return _before_program([(resource.RLIMIT_CORE, 0)], None, _MAKE_BLOCK_DEVICE)


def _limits(cpu_seconds: int, memory: int) -> Callable[[], None]:
    """A function for a process to call before it becomes the program."""
    most = [
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
        (resource.RLIMIT_CORE, 0),
    ]
    return _before_program(most, _filter(_CALLS.get(platform.machine())), _MAKE_SOCKET)


def _before_program(most: Sequence[tuple[int, int]], filter_: "_Program | None", forbidden: int) -> Callable[[], None]:
    """Made before the fork: after it little is safe."""
    libc = ctypes.CDLL(None, use_errno=True)
    prctl, call, domain = libc.prctl, libc.syscall, (ctypes.c_uint64 * 3)(forbidden, 0, _SIGNALS)
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    call.argtypes = [ctypes.c_long] * 4

    def limit() -> None:
        prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        for what, value in most:
            resource.setrlimit(what, (value, value))
        if prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        # In a domain of its own it cannot open memory and descriptors of other processes, as root neither. Linux
        # before 6.12 does not know the third field, and some machines no Landlock.
        for size in (24, 8):
            if (ruleset := call(_CREATE_RULESET, ctypes.addressof(domain), size, 0)) >= 0:
                if call(_RESTRICT_SELF, ruleset, 0, 0):
                    raise OSError(ctypes.get_errno(), "landlock_restrict_self")
                break
        if filter_ is not None and prctl(_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(filter_), 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")

    return limit


def _filter(calls: _Calls | None) -> _Program | None:
    """The filter of system calls that start a process or open a socket; None on a machine whose numbers are not known.

    Threads are allowed. clone3 hides its flags from filters: without it glibc takes clone.
    """
    if calls is None:
        return None
    permission, missing = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, calls.architecture), (_RETURN, 0, 0, permission),
        (_LOAD, 0, 0, _CALL), (_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, permission),  # other numbers of x86-64
    ]  # fmt: skip
    for number in calls.refused:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, permission)]
    steps += [
        (_EQUAL, 0, 1, calls.clone3), (_RETURN, 0, 0, missing), (_EQUAL, 0, 3, calls.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, permission),
        (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    return _Program(len(steps), (_Step * len(steps))(*steps))
