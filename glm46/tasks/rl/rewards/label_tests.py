"""Checks that the tests in labels of the reward code can fail: by their form, else against meaningless programs."""

import ast
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.storage.judge.limited import run_limited
from glm46.tasks.rl.rewards import meaningless_programs, tested_program
from glm46.tasks.rl.rewards.code import Case, cases_of, without_digit_limit

_ENDINGS = frozenset(
    (
        "exit",
        "quit",
        "sys.exit",
        "_exit",
        "os._exit",
        "os.abort",
        "abort",
        "os.kill",
        "os.killpg",
        "SystemExit",
    )
)
_VERDICTS = frozenset(("yes", "no", "true", "false", "possible", "impossible"))
_TESTS_OF_PROCESS = 1_000
_SECONDS_OF_PROCESS = 60


@without_digit_limit()
def code_label_faults(labels: Sequence[Any]) -> list[str]:
    """Return for each label why its tests are missing, invalid, or pass without a solution; empty if they are usable.

    Tests whose form does not rule out a meaningless program are run against such programs, in few processes. A test
    that times out there has no fault.
    """
    faults = []
    doubtful = {}
    alone = set()
    for number, label in enumerate(labels):
        try:
            cases = cases_of(label)
            _check_form(cases)
            faults.append("")
            doubtful[number] = [
                case.test for case in cases if case.expected is None and not (case.is_call or _compares(case.test))
            ]
            if len(doubtful[number]) == len(cases):
                alone.add(number)
        except ValueError as error:
            faults.append(str(error))
    tests = list(dict.fromkeys(test for doubtful_tests in doubtful.values() for test in doubtful_tests))
    passed = dict(zip(tests, _passed_by_meaningless(tests), strict=True))
    for number, doubtful_tests in doubtful.items():
        for test in doubtful_tests:
            if {"a true object", "a false object", "None"} <= passed[test]:
                faults[number] = f"test {test:.60}: passes whatever the program gives; let it compare a result"
        programs = set.intersection(*(passed[test] for test in doubtful_tests)) if number in alone else set()
        programs -= {"1", "0", *("just True",) * ("1" in programs), *("just False",) * ("0" in programs)}
        if not faults[number] and programs:
            faults[number] = (
                f"test {doubtful_tests[0]:.60}: a program whose functions give {sorted(programs)[0]} passes all tests; "
                "add a test with another result"
            )
    return faults


def _check_form(cases: Sequence[Case]) -> None:
    """Raise ValueError for a test that is invalid or cannot fail, as far as its form shows."""
    for case in cases:
        if case.expected is not None:
            if case.expected.strip().casefold() in _VERDICTS and len({other.expected for other in cases}) == 1:
                raise ValueError(
                    f"outputs: all are {case.expected.strip()}, which a program gives that does not read its input; "
                    "add a case with another output"
                )
            if not case.expected.split():
                raise ValueError(
                    "an output is empty, and a program that ends at once would pass; leave that test or the row out"
                )
            continue
        shown = " ".join(case.test.split())
        try:
            has_assert = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(case.test)))
            is_asked = bool(tested_program.asked_names(case.test))
            ending = _ends_itself(case.test)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"test {shown:.60}: is not Python ({error}); correct it") from None
        if ending:
            raise ValueError(
                f"test {shown:.60}: {ending} can end the test before it has passed; let assert statements decide"
            )
        if not has_assert or not is_asked:
            raise ValueError(
                f"test {shown:.60}: needs an assert statement and a name of the program, or each program passes; "
                "write it as 'assert f(1) == 2'"
            )


def _compares(test: str) -> bool:
    """Return True if a statement asserts that a call of the program returns a literal other than None, True and False,
    so that a meaningless program fails."""
    names = tested_program.asked_names(test)
    for node in ast.parse(test).body:
        match node:
            case ast.Assert(
                test=ast.Compare(left=ast.Call(func=ast.Name(id=name)), ops=[ast.Eq()], comparators=[value])
            ):
                with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    expected = ast.literal_eval(value)
                    if name in names and expected is not None and not isinstance(expected, bool):
                        return True
    return False


def _ends_itself(test: str) -> str:
    """Return the call or exception with which a test ends its process, such as ``sys.exit``; empty if it has none."""
    for node in ast.walk(ast.parse(test)):
        expression = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
        if (name := ast.unparse(expression) if expression else "") in _ENDINGS:
            return name
    return ""


def _passed_by_meaningless(tests: Sequence[str]) -> list[set[str]]:
    """Return for each test the programs of `meaningless_programs` that pass it; empty after a timeout."""
    passed = list[set[str]]()
    script = Path(meaningless_programs.__file__).read_text(encoding="utf-8")
    limits = dict(cpu_seconds=_SECONDS_OF_PROCESS, seconds=_SECONDS_OF_PROCESS, memory_gib=1)
    while len(passed) < len(tests):
        batch = tests[len(passed) : len(passed) + _TESTS_OF_PROCESS]
        jobs = [(test, tested_program.asked_names(test), tested_program.named_modules(test)) for test in batch]
        lines = run_limited(script, json.dumps(jobs), **limits).output.split("\n")[:-1][: len(batch)]
        passed += [set(json.loads(line)) for line in lines]
        if len(lines) < len(batch):  # the next test ended the process: skip it, and start another process
            passed.append(set())
    return passed
