"""Run untrusted Python programs, each in a process with limits of time, memory and output.

Such a process cannot start another process, open a connection, change attributes of files or leave objects in the
kernel (`system_calls.py`). It runs in the best sandbox of this machine (`jail.py`).
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

from glm46.files.scratch import scratch_folder
from glm46.storage.judge.jail import BUBBLEWRAP, FIRST_FOLDER, filter_of_code, jail_of_code, jailed, places_of
from glm46.storage.judge.landlock import Access

_File: TypeAlias = IO[bytes] | int
_OUTPUT_BYTES = 2**21
"""Largest size of each file that a program writes, its output included."""
_ERROR_BYTES = 4096


class ProgramEnd(NamedTuple):
    """Result of a finished program."""

    status: int | None
    """Exit code, or the negative number of the signal that ended it; None if it took too long."""
    output: str
    """Standard output."""
    error: str
    """Last line of standard error."""


def run_limited(
    program: str, stdin_text: str = "", *, cpu_seconds: float, seconds: float, memory_gib: float
) -> ProgramEnd:
    """Run the text of a Python program in a folder of its own, which is removed.

    Args:
        stdin_text: standard input.
        cpu_seconds: limit of processor time, rounded to whole seconds, at least one.
        seconds: limit of wall-clock time, after which it is killed. Removing the folder is waited for within it too.
        memory_gib: limit of the address space.
    """
    with (
        scratch_folder(seconds) as folder,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace", newline="")
        stdin.write(stdin_text.encode(errors="replace"))
        stdin.seek(0)
        with limited_process(
            ["program.py"], folder, cpu_seconds, memory_gib, stdin=stdin, stdout=stdout, stderr=stderr
        ) as process:
            try:
                process.wait(seconds)
                status = status_of(process)
            except subprocess.TimeoutExpired:
                status = None
        stdout.seek(0)
        stderr.seek(max(stderr.seek(0, os.SEEK_END) - _ERROR_BYTES, 0))
        lines = stderr.read().decode(errors="replace").strip().splitlines()
        return ProgramEnd(status, stdout.read().decode(errors="replace"), lines[-1] if lines else "")


def status_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a limited process, or the negative number of the signal that ended it, which bubblewrap
    reports as 128 plus the number; None while it runs."""
    status = process.poll()
    if status is not None and status > 128 and jail_of_code() == BUBBLEWRAP:
        return 128 - status
    return status


@contextmanager
def limited_process(
    arguments: Sequence[str],
    folder: str,
    cpu_seconds: float,
    memory_gib: float,
    *,
    stdin: _File,
    stdout: _File,
    stderr: _File,
    pass_fds: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start Python in its own session with the limits of `run_limited`; it is killed at the end of the context.

    Args:
        arguments: arguments of Python.
        folder: folder in which it runs.
        stdin, stdout, stderr, pass_fds: as for `subprocess.Popen`.
    """
    limits = [
        (resource.RLIMIT_CPU, max(1, round(cpu_seconds))),
        (resource.RLIMIT_AS, int(memory_gib * 2**30)),
        (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
        (resource.RLIMIT_CORE, 0),
    ]
    words = [sys.executable, "-I", "-X", "int_max_str_digits=0", *arguments]  # results may have any number of digits
    access = Access(places_of(words))
    with jailed(jail_of_code(), words, folder, access, limits, filter_of_code()) as start:
        process = subprocess.Popen(
            start.words,
            cwd=FIRST_FOLDER,
            env={},
            start_new_session=True,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(*pass_fds, *start.descriptors),
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
