"""The reward for code: Python in a fenced block, run against tests in a limited process (`glm46.prepare.limited`)."""

import json
import re
import signal
import time
from collections.abc import Mapping
from typing import Any

from glm46.prepare.limited import Ended, run_limited
from glm46.rewards.answer import Answer, usable_seconds

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_OF_CPU_LIMIT = (-signal.SIGXCPU, -signal.SIGKILL)


def code(answer: Answer, options: Mapping[str, Any]) -> float:
    """Share of tests that the last block of Python passes, or with ``all`` (true) 1 only if it passes all.

    Args:
        answer: its label is, or is JSON of: a list of assert statements, or a table with ``inputs`` and ``outputs``, of
            equal length: the standard input and output of runs of the program.
        options: ``all``; ``seconds`` (4) and ``memory_gib`` (1) of each run. All runs share `usable_seconds`: once a
            run has taken its ``seconds``, later ones get what is left, and those without any time have not passed.

    Raises:
        ValueError: the label has no tests.
        TimeoutError: the tests are too many for that time: no run has taken its ``seconds``.
    """
    tests = json.loads(answer.label) if isinstance(answer.label, str) else answer.label
    cases = _cases(tests)
    blocks = _BLOCK.findall(answer.result)
    if not blocks:
        return 0.0
    whole = usable_seconds(options)
    seconds, end = min(options.get("seconds", 4), whole), time.monotonic() + whole
    passed, is_slow = 0, False
    for number, (suffix, given, expected) in enumerate(cases):
        limit, ended = min(seconds, end - time.monotonic()), Ended(None, "", "")
        if limit > 0:
            ended = run_limited(
                f"{blocks[-1]}\n{suffix}", given,
                cpu_seconds=seconds, seconds=limit, memory_gib=options.get("memory_gib", 1),
            )  # fmt: skip
        is_slow |= ended.status in _OF_CPU_LIMIT or (ended.status is None and limit > 0.9 * seconds)
        if ended.status is None and not is_slow:
            raise TimeoutError(f"{number} of {len(cases)} tests took all of {whole:g} s")
        is_passed = ended.status == 0 and (expected is None or ended.output.split() == expected.split())
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
