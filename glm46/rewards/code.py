"""The reward for code: Python in a fenced block, run against tests in a limited process. This is not a sandbox: the
process may read files and use the network as this user may."""

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from glm46.rewards.answer import Answer

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def code(answer: Answer, options: Mapping[str, Any]) -> float:
    """Share of tests that the last block of Python passes, or with ``all`` (true) 1 only if it passes all.

    Args:
        answer: its label is, or is JSON of: a list of assert statements, or a table with ``inputs`` and ``outputs``, of
            equal length: the standard input and output of runs of the program.
        options: ``all``; ``seconds`` (4) and ``memory_gib`` (1) of each run.

    Raises:
        ValueError: the label has no tests.
    """
    tests = json.loads(answer.label) if isinstance(answer.label, str) else answer.label
    cases = _cases(tests)
    blocks = _BLOCK.findall(answer.result)
    if not blocks:
        return 0.0
    passed = 0
    for suffix, given, expected in cases:
        output = _run(f"{blocks[-1]}\n{suffix}", given, options.get("seconds", 4), options.get("memory_gib", 1))
        is_passed = output is not None and (expected is None or output.split() == expected.split())
        if options.get("all", True) and not is_passed:
            return 0.0
        passed += is_passed
    return passed / len(cases)


def _cases(tests: Any) -> list[tuple[str, str, str | None]]:
    """Code behind the program, its standard input, and the expected output, if any, of each test."""
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return [(test, "", None) for test in tests]
    if isinstance(tests, Mapping) and tests.get("inputs") and len(tests["inputs"]) == len(tests.get("outputs", ())):
        return [("", str(one), str(other)) for one, other in zip(tests["inputs"], tests["outputs"], strict=True)]
    raise ValueError(f"label {str(tests)[:60]!r}: neither a list of assert statements nor inputs and outputs")


def _run(program: str, given: str, seconds: float, memory_gib: float) -> str | None:
    """The standard output of a program; None if it failed."""

    def limit() -> None:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        cpu = max(1, round(seconds))
        for what, most in (
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_AS, int(memory_gib * 2**30)),
            (resource.RLIMIT_FSIZE, 2**20),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (most, most))

    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=folder, env={}, text=True, errors="replace", preexec_fn=limit, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(given, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process)
    return output if process.returncode == 0 else None


def _kill(process: subprocess.Popen) -> None:
    """End a program with the processes that it has started and that have not left its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
