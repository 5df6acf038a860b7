"""Verify source code with the compilers of this machine, which never execute it, and run Python programs in limited
processes."""

import builtins
import hashlib
import os
import platform
import resource
import shutil
import signal
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from glm46.compute.distributed.environment import variables_that_are_set
from glm46.config.errors import UserError
from glm46.files.scratch import scratch_folder
from glm46.storage.judge.equal_results import math_verify_version
from glm46.storage.judge.jail import FIRST_FOLDER, NO_JAIL, jail_of_programs, jailed, places_of
from glm46.storage.judge.landlock import Access
from glm46.storage.judge.limited import run_limited

# Processor time of a compiler, independent of the machine's load; a text that needs more counts as not compiling.
CPU_LIMIT_SECONDS = 10

# Wall-clock limit for a compiler that waits without computing; the text is filtered with a separate reason.
WAIT_LIMIT_SECONDS = 120

# Stops an include of an endless device from filling the memory. Not set for node, which reserves more.
_MEMORY_LIMIT_BYTES = 2 * 2**30

# Limits of an executed program: processor time, wall-clock time, and memory.
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


_VALID_TEXTS = {"go": "package main\n"}
"""Language -> a text that compiles; in the other languages the empty text does."""
_COMPILER_VARIABLES = (
    "PATH",
    "HOME",
    "LD_LIBRARY_PATH",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "RUSTUP_HOME",
    "RUSTUP_TOOLCHAIN",
    "CARGO_HOME",
    "GOROOT",
)
"""Variables of this process that decide where a compiler finds its files."""


def require_compiler(language: str) -> None:
    """Check that the compiler of a language of `COMPILERS` is installed.

    Raises:
        UserError: the program is not found.
    """
    if language in COMPILERS and shutil.which(program := COMPILERS[language][0]) is None:
        raise UserError(f"verify = '{language}': {program} is not on this machine; install it or set verify = 'none'")


def verifier_version(language: str) -> str | None:
    """Return the version of a language's verifier, for maths and steps of math-verify; None if the result depends only
    on the text.

    The version is the first line of ``--version``; gofmt has no such option and is identified by the hash of its file.
    Headers and libraries that a text may include are not part of it.
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

    The compiler runs in a temporary folder without a shell or input, under limits of time and memory, with few of the
    variables of this process, and in the sandbox of this machine if it works there.
    """
    program, attempts = COMPILERS[language]
    jail = _jail_of(shutil.which(program) or program, language)
    fault = None
    with scratch_folder() as folder:
        for arguments in attempts:
            (Path(folder) / arguments[-1]).write_text(text, encoding="utf-8", newline="")
            status = _status([program, *arguments], folder, jail)
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
    # Only built-in exceptions: classes of the programs would each become a separate reason.
    is_known = isinstance(kind, type) and issubclass(kind, BaseException)
    return f"ends with {name}" if is_known else "ends with an error"


@cache
def _jail_of(program: str, language: str) -> str:
    """Return the sandbox for a compiler: the one of this machine, unless a valid text does not compile in it."""
    jail = jail_of_programs()
    arguments = COMPILERS[language][1][0]
    with scratch_folder() as folder:
        (Path(folder) / arguments[-1]).write_text(_VALID_TEXTS.get(language, ""), encoding="utf-8")
        return jail if _status([program, *arguments], folder, jail) == 0 else NO_JAIL


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of a compiler: variables that locate its files, but no secrets."""
    return variables_that_are_set(_COMPILER_VARIABLES) | {"TMPDIR": folder}


def _readable_by(command: Sequence[str]) -> tuple[str, ...]:
    """Return the places outside the system that a compiler reads: of its program, and of rustup's toolchains."""
    variables = variables_that_are_set(_COMPILER_VARIABLES)
    toolchains = variables.get("RUSTUP_HOME") or str(Path.home() / ".rustup")
    return (*places_of(command[:1], variables), *([toolchains] if Path(toolchains).is_dir() else []))


def _status(command: Sequence[str], folder: str, jail: str) -> int | None:
    """Return the exit status of a command; None if it exceeded `WAIT_LIMIT_SECONDS`."""

    # Compiler drivers start further programs, which inherit these limits.
    limits = [(resource.RLIMIT_CPU, CPU_LIMIT_SECONDS), (resource.RLIMIT_CORE, 0)]
    if Path(command[0]).name != "node":
        limits.append((resource.RLIMIT_AS, _MEMORY_LIMIT_BYTES))
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    access = Access() if jail == NO_JAIL else Access(_readable_by(command))
    filter_ = b"" if jail == NO_JAIL else None
    with jailed(jail, command, folder, access, limits, filter_) as start:
        process = subprocess.Popen(
            start.words,
            cwd=FIRST_FOLDER,
            env=_environment(folder),
            pass_fds=start.descriptors,
            start_new_session=True,
            **quiet,
        )
    try:
        return process.wait(WAIT_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
