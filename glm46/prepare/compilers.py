"""Whether a text compiles, by the compilers that this machine has. Texts are compiled or parsed, never run."""

import hashlib
import os
import platform
import resource
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from glm46.config.errors import UserError

# Processor time of a compiler, which a busy machine does not move; a text that needs more does not compile.
CPU_LIMIT_SECONDS = 10

# By the clock, for a program that waits without computing; left out under a reason of its own.
WAIT_LIMIT_SECONDS = 120

# An include of an endless device would fill the machine. Node reserves more than this and reads no other file.
_MEMORY_LIMIT_BYTES = 2 * 2**30

# Language to its program and the argument lists to try, each for one file name; one that succeeds is enough. JavaScript
# tells scripts from modules only by the name of the file. Without -e gofmt stops at ten faults, which is as good here.
COMPILERS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "c": ("gcc", (("-fsyntax-only", "-w", "-x", "c", "text.c"),)),
    "c++": ("g++", (("-fsyntax-only", "-w", "-x", "c++", "text.cc"),)),
    "rust": ("rustc", (("--edition=2021", "--crate-type=lib", "--cap-lints=allow", "--emit=metadata", "text.rs"),)),
    "go": ("gofmt", (("-l", "text.go"),)),
    "javascript": ("node", (("--check", "text.cjs"), ("--check", "text.mjs"))),
}


def require_compiler(language: str) -> None:
    """Refuse a language of `COMPILERS` whose program is not on this machine.

    Raises:
        UserError: it is not found.
    """
    if language in COMPILERS and shutil.which(program := COMPILERS[language][0]) is None:
        raise UserError(f"verify = '{language}': {program} is not on this machine; install it or set verify = 'none'")


def verifier_version(language: str) -> str | None:
    """What the verdicts on a language depend on besides the texts; None if on nothing.

    What the program says of its version; gofmt says nothing, so it is known by the hash of its file. Headers and
    libraries that a text may include are not looked at.
    """
    if language == "python":
        return f"Python {platform.python_version()}"
    if language not in COMPILERS:
        return None
    file = shutil.which(COMPILERS[language][0])
    told = subprocess.run([file, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if told.returncode == 0:
        return told.stdout.strip().partition("\n")[0]
    return f"{Path(file).name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"


def compile_fault(text: str, language: str) -> str | None:
    """Why a text does not compile alone; None if it does.

    The program gets a folder of its own, no shell, no input, and limits of time and memory.
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


def _status(command: list[str], folder: str) -> int | None:
    """Exit status of a command; None if it was ended for the time it took."""

    def limit() -> None:
        # The drivers start further programs; those inherit these limits.
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_SECONDS, CPU_LIMIT_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if command[0] != "node":
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))

    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=folder, start_new_session=True, preexec_fn=limit, **quiet)
    try:
        return process.wait(WAIT_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
