"""Runs Python programs that nobody has read, each in a process with limits of time, memory and output, which can start
no other process and open no network connection, in the sandbox that this machine has (`jail.py`)."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from glm46.storage.prepare.jail import BUBBLEWRAP, FIRST_FOLDER, jail_of_code, jailed, places_of
from glm46.storage.prepare.landlock import Access, filter_without_processes

_OUTPUT_BYTES = 2**21
"""Most bytes of each file that a program writes, its output included."""
_ERROR_BYTES = 4096


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
                process.wait(seconds)
                status = status_of(process)
            except subprocess.TimeoutExpired:
                status = None
        stdout.seek(0)
        stderr.seek(max(stderr.seek(0, os.SEEK_END) - _ERROR_BYTES, 0))
        lines = stderr.read().decode(errors="replace").strip().splitlines()
        return ProgramEnd(status, stdout.read().decode(errors="replace"), lines[-1] if lines else "")


def status_of(process: subprocess.Popen) -> int | None:
    """Exit code of a limited process, or minus the number of the signal that ended it, which bubblewrap adds to 128;
    None while it runs."""
    status = process.poll()
    if status is not None and status > 128 and jail_of_code() == BUBBLEWRAP:
        return 128 - status
    return status


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
    most = [
        (resource.RLIMIT_CPU, max(1, round(cpu_seconds))),
        (resource.RLIMIT_AS, int(memory_gib * 2**30)),
        (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
        (resource.RLIMIT_CORE, 0),
    ]
    words = [sys.executable, "-I", *arguments]
    access = Access(places_of(words))
    with jailed(jail_of_code(), words, folder, access, most, filter_without_processes()) as start:
        files["pass_fds"] = (*files.get("pass_fds", ()), *start.descriptors)
        process = subprocess.Popen(start.words, cwd=FIRST_FOLDER, env={}, start_new_session=True, **files)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
