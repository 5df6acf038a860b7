"""Verify source code with the compilers of this machine, which never run a text; and run Python programs in limited
processes."""

import builtins
import hashlib
import os
import platform
import resource
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError
from glm46.storage.prepare.equal_results import math_verify_version
from glm46.storage.prepare.jail import FIRST_FOLDER, NO_JAIL, jailed
from glm46.storage.prepare.landlock import Access
from glm46.storage.prepare.limited import run_limited

# Processor time of a compiler, independent of the machine's load; a text that needs more counts as not compiling.
CPU_LIMIT_SECONDS = 10

# Wall-clock limit for a compiler that waits without computing; the text is filtered with a reason of its own.
WAIT_LIMIT_SECONDS = 120

# Without it an include of an endless device would fill memory. Not set for node: it reserves more and includes nothing.
_MEMORY_LIMIT_BYTES = 2 * 2**30

# Of a program that is run: processor time, seconds by the clock, which count its waits too, and memory.
_RUN_LIMITS: dict[str, Any] = {"cpu_seconds": 10, "seconds": 30, "memory_gib": 1}

# Program of each language and the argument lists to try; the last argument is the file name. One success is enough:
# JavaScript distinguishes scripts from modules only by the file name. Without -e gofmt stops after ten errors.
COMPILERS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "c": ("gcc", (("-fsyntax-only", "-w", "-x", "c", "text.c"),)),
    "c++": ("g++", (("-fsyntax-only", "-w", "-x", "c++", "text.cc"),)),
    "rust": ("rustc", (("--edition=2021", "--crate-type=lib", "--cap-lints=allow", "--emit=metadata", "text.rs"),)),
    "go": ("gofmt", (("-l", "text.go"),)),
    "javascript": ("node", (("--check", "text.cjs"), ("--check", "text.mjs"))),
}


def require_compiler(language: str) -> None:
    """Check that the compiler of a language of `COMPILERS` is installed.

    Raises:
        UserError: the program is not found.
    """
    if language in COMPILERS and shutil.which(program := COMPILERS[language][0]) is None:
        raise UserError(f"verify = '{language}': {program} is not on this machine; install it or set verify = 'none'")


def verifier_version(language: str) -> str | None:
    """Return the version of a language's verifier, of maths and steps that of math-verify; None if its result depends
    on the text only.

    The first line of ``--version``; gofmt has no such option and is identified by the hash of its file. Headers and
    libraries that a text may include are not part of it.
    """
    if language in ("python", "execute"):
        return f"Python {platform.python_version()}"
    if language in ("maths", "steps"):
        return f"math-verify {math_verify_version() or 'absent'}"
    if language not in COMPILERS or (file := shutil.which(COMPILERS[language][0])) is None:
        return None
    output = subprocess.run([file, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if output.returncode == 0:
        return output.stdout.strip().partition("\n")[0]
    return f"{Path(file).name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"


def compile_fault(text: str, language: str) -> str | None:
    """Return the reason if a text does not compile on its own, else None.

    The compiler runs in a temporary folder without a shell or input, under limits of time and memory.
    """
    program, attempts = COMPILERS[language]
    fault = None
    with tempfile.TemporaryDirectory() as folder:
        for arguments in attempts:
            (Path(folder) / arguments[-1]).write_text(text, encoding="utf-8", newline="")
            status = _status([program, *arguments], folder)
            if status == 0:
                return None
            fault = f"{program} took too long" if status is None else f"does not compile with {program}"
    return fault


def run_fault(text: str) -> str | None:
    """Return the reason if a text does not run to its end as a Python program without input, else None."""
    status, _, error = run_limited(text, **_RUN_LIMITS)
    if status == 0:
        return None
    if status is None or status == -signal.SIGXCPU or status == -signal.SIGKILL:
        return "runs too long"
    if status < 0:
        return f"ends by {signal.Signals(-status).name}"
    name = error.partition(":")[0]
    kind = getattr(builtins, name, None)
    if name == "ModuleNotFoundError":
        return "needs a module that is not here"
    # Only Python's own names: those of programs would give a reason each.
    is_known = isinstance(kind, type) and issubclass(kind, BaseException)
    return f"ends with {name}" if is_known else "ends with an error"


def _status(command: list[str], folder: str) -> int | None:
    """Return the exit status of a command; None if it exceeded `WAIT_LIMIT_SECONDS`."""

    # Compiler drivers start further programs, which inherit these limits.
    most = [(resource.RLIMIT_CPU, CPU_LIMIT_SECONDS), (resource.RLIMIT_CORE, 0)]
    if command[0] != "node":
        most.append((resource.RLIMIT_AS, _MEMORY_LIMIT_BYTES))
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with jailed(NO_JAIL, command, folder, Access(), most, b"") as start:
        process = subprocess.Popen(start.words, cwd=FIRST_FOLDER, start_new_session=True, **quiet)
    try:
        return process.wait(WAIT_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
