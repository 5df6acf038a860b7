"""Labels of the reward code: tests that can fail, told by their form, else by a run of programs that do nothing."""

import ast
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.storage.prepare.limited import run_limited
from glm46.tasks.rl.rewards import meaningless_programs, tested_program
from glm46.tasks.rl.rewards.code import Case, cases_of

_ENDINGS = frozenset((
    "exit", "quit", "sys.exit", "_exit", "os._exit", "os.abort", "abort", "os.kill", "os.killpg", "SystemExit",
))  # fmt: skip
_VERDICTS = frozenset(("yes", "no", "true", "false", "possible", "impossible"))
_TESTS_OF_PROCESS, _SECONDS_OF_PROCESS = 1_000, 60


def code_label_faults(labels: Sequence[Any]) -> list[str]:
    """For each label the reason why a program without any answer passes its tests, or that it has none; else empty.

    Tests that could pass for a program that does nothing are run against such programs, all in few processes. A test
    that takes too long there has no fault.
    """
    faults, doubtful, alone = [], {}, set()
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
    tests = list(dict.fromkeys(test for some in doubtful.values() for test in some))
    passed = dict(zip(tests, _passed_by_meaningless(tests), strict=True))
    for number, some in doubtful.items():
        for test in some:
            if {"a true object", "a false object", "None"} <= passed[test]:
                faults[number] = f"test {test:.60}: passes whatever the program gives; let it compare a result"
        programs = set.intersection(*(passed[test] for test in some)) if number in alone else set()
        programs -= {"1", "0", *("just True",) * ("1" in programs), *("just False",) * ("0" in programs)}
        if not faults[number] and programs:
            faults[number] = (
                f"test {some[0]:.60}: a program whose functions give {sorted(programs)[0]} passes all tests; "
                "add a test with another result"
            )
    return faults


def _check_form(cases: Sequence[Case]) -> None:
    """Raise ValueError for a test that needs no run to see that it cannot fail."""
    for case in cases:
        if case.expected is not None:
            if case.expected.strip().casefold() in _VERDICTS and len({one.expected for one in cases}) == 1:
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
            is_asked, ending = bool(tested_program.asked_names(case.test)), _ends_itself(case.test)
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
    """True if a statement asserts that a call of the program gives a value that says something, so that a program that
    does nothing fails."""
    names = tested_program.asked_names(test)
    for node in ast.parse(test).body:
        match node:
            case ast.Assert(
                test=ast.Compare(left=ast.Call(func=ast.Name(id=name)), ops=[ast.Eq()], comparators=[value])
            ):
                with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    found = ast.literal_eval(value)
                    if name in names and found is not None and not isinstance(found, bool):
                        return True
    return False


def _ends_itself(test: str) -> str:
    """The call or statement with which a test ends its process, such as ``sys.exit``; empty if it has none."""
    for node in ast.walk(ast.parse(test)):
        found = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
        if (name := ast.unparse(found) if found else "") in _ENDINGS:
            return name
    return ""


def _passed_by_meaningless(tests: Sequence[str]) -> list[set[str]]:
    """For each test the programs of `meaningless_programs` that pass it; none where there was no time."""
    found, script = list[set[str]](), Path(meaningless_programs.__file__).read_text(encoding="utf-8")
    limits = dict(cpu_seconds=_SECONDS_OF_PROCESS, seconds=_SECONDS_OF_PROCESS, memory_gib=1)
    while len(found) < len(tests):
        some = tests[len(found) : len(found) + _TESTS_OF_PROCESS]
        asked = [(one, tested_program.asked_names(one), tested_program.named_modules(one)) for one in some]
        lines = run_limited(script, json.dumps(asked), **limits).output.split("\n")[:-1][: len(some)]
        found += [set(json.loads(line)) for line in lines]
        if len(lines) < len(some):  # a test that ends the process is judged by none; others go to another process
            found.append(set())
    return found
