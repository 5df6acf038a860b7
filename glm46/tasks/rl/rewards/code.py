"""The reward for code: Python in a fenced block, run against tests in processes with limits (`prepare/limited.py`)."""

import ast
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

from glm46.storage.prepare.limited import limited_process, run_limited, status_of
from glm46.tasks.rl.rewards import tested_program
from glm46.tasks.rl.rewards.answer import Answer, usable_seconds

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*(.*)")
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*(?![\w-])", re.IGNORECASE)
_OF_CPU_LIMIT = (-signal.SIGXCPU, -signal.SIGKILL)


class Case(NamedTuple):
    """A test of a program: Python that calls it, or its standard input and output."""

    test: str
    given: str = ""
    expected: str | None = None
    """None: ``test`` decides."""
    is_call: bool = False
    """A test that compares the result of a call with a value."""


def code(answer: Answer, options: Mapping[str, Any]) -> float:
    """Share of tests that the last block of Python passes, or with ``all`` (true) 1 only if it passes all.

    A test passes by what the program answers: one that ends early or replaces itself has not passed.

    Args:
        answer: its label is, or is JSON of: a list of tests in Python (assert statements), or a table with ``inputs``
            and ``outputs``, of equal length: standard input and output of runs of the program, as texts or lists of
            lines; with ``fn_name`` arguments and results of that function, or method of ``Solution``, as lists of
            values, or as texts with a JSON value in each line.
        options: ``all``; ``seconds`` (4) and ``memory_gib`` (1) of each run. All runs share `usable_seconds`: once a
            run has taken its ``seconds``, later ones get what is left, and those without any time have not passed.

    Raises:
        ValueError: the label has no tests.
        TimeoutError: the tests are too many for that time: no run has taken its ``seconds``.
    """
    cases, program = cases_of(answer.label), _last_program(answer.result)
    if program is None:
        return 0.0
    whole = usable_seconds(options)
    seconds, end = min(options.get("seconds", 4), whole), time.monotonic() + whole
    passed, is_slow = 0, False
    for number, case in enumerate(cases):
        limit, status, output = min(seconds, end - time.monotonic()), None, ""
        if limit > 0:
            limits = dict(cpu_seconds=seconds, seconds=limit, memory_gib=options.get("memory_gib", 1))
            if case.expected is None:
                status = _test_status(program, case.test, **limits)
            else:
                status, output, _ = run_limited(program, case.given, **limits)
        is_slow |= status in _OF_CPU_LIMIT or (status is None and limit > 0.9 * seconds)
        if status is None and not is_slow:
            raise TimeoutError(f"{number} of {len(cases)} tests took all of {whole:g} s")
        is_passed = status == 0 and (case.expected is None or output.split() == case.expected.split())
        if options.get("all", True) and not is_passed:
            return 0.0
        passed += is_passed
    return passed / len(cases)


def _last_program(text: str) -> str | None:
    """The last fenced block of Python; without one, the last block without a language that is a program."""
    of_python, plain = list[str](), list[str]()
    lines: list[str] | None = None
    for line in text.splitlines():
        fence = _FENCE.fullmatch(line)
        if lines is None:
            if fence and not ("`" in fence[2] and "`" in fence[3]):
                indent, mark, language, lines = *fence.groups(), []
        elif fence and fence[2][0] == mark[0] and len(fence[2]) >= len(mark) and not fence[3].strip():
            if _PYTHON.match(language):
                of_python.append("\n".join(lines))
            elif not language.strip():
                plain.append("\n".join(lines))
            lines = None
        else:
            lines.append(line.removeprefix(indent))
    return next(iter(reversed(of_python)), None) or next((one for one in reversed(plain) if _is_program(one)), None)


def _is_program(text: str) -> bool:
    """True if it is Python that does something, unlike an output."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    calls = (ast.Call, ast.Await, ast.Yield)
    return any(not isinstance(one, ast.Expr) or any(isinstance(n, calls) for n in ast.walk(one)) for one in body)


def cases_of(label: Any) -> list[Case]:
    """The tests of a label; ValueError for one of another form."""
    try:
        tests = json.loads(label) if isinstance(label, str) else label
    except ValueError:
        tests = None
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return [Case(test) for test in tests]
    inputs, outputs = (tests.get("inputs"), tests.get("outputs")) if isinstance(tests, Mapping) else (None, None)
    if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs)):
        raise ValueError(
            "is neither a list of tests in Python (assert statements) nor a table with inputs and outputs, two lists "
            "of one length above 0, nor JSON of them; write it as one of these"
        )
    if (name := tests.get("fn_name")) not in (None, ""):
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ValueError(f"fn_name {name!r:.60}: is not the name of a function; correct it")
        return _calls(name, inputs, outputs)
    return [Case("", _lines(one), _lines(other)) for one, other in zip(inputs, outputs, strict=True)]


def _lines(value: Any) -> str:
    """Standard input or output of a label as text."""
    if isinstance(value, list) and all(_is_plain(line) for line in value):
        return "\n".join(map(str, value))
    if _is_plain(value):
        return str(value)
    raise ValueError(f"{value!r:.60}: is neither a text nor a list of lines; correct it, or add fn_name")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _calls(name: str, inputs: list, outputs: list) -> list[Case]:
    """A test for each call of a function. Results are compared as JSON, which has one kind of list."""
    if all(isinstance(one, str) for one in inputs):
        try:
            inputs = [[json.loads(line) for line in one.splitlines() if line.strip()] for one in inputs]
            outputs = [json.loads(one) if isinstance(one, str) else one for one in outputs]
        except ValueError as error:
            raise ValueError(f"inputs and outputs of {name}: a line is not JSON ({error}); correct it") from None
    try:
        json.dumps([inputs, outputs], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"inputs and outputs of {name}: {error}; write values that JSON has") from None
    if any(not isinstance(one, list) for one in inputs):
        raise ValueError(f"inputs of {name}: are not lists of arguments; write each as a list")
    # Some data sets have each result in a list of one.
    is_wrapped = all(isinstance(one, list) and len(one) == 1 for one in outputs)
    plain = [one[0] if is_wrapped else one for one in outputs]
    if any(all(one is same for one in plain) for same in (None, True, False)):
        raise ValueError(
            f"outputs of {name}: all are {json.dumps(plain[0])}, which a function without a body gives, or "
            "one that does not look at its arguments; add a case with another result"
        )
    return [
        Case(
            f"import json\nfound = json.loads(json.dumps({name}(*{given!r})))\n"
            f"assert found in {[wanted, *(wanted if is_wrapped else ())]!r}",
            is_call=True,
        )
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _test_status(program: str, test: str, *, cpu_seconds: float, seconds: float, memory_gib: float) -> int | None:
    """0 if a program passes a test, 1 if not, minus the number of the signal that ended the program, None if both took
    too long. See `tested_program`."""
    limits, script = (cpu_seconds, memory_gib), str(Path(tested_program.__file__).absolute())
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    (to_program, from_test), (to_test, from_program), (verdict, of_test) = os.pipe(), os.pipe(), os.pipe()
    with ExitStack() as stack, ExitStack() as theirs:
        stack.callback(os.close, verdict)
        for descriptor in (to_program, from_test, to_test, from_program, of_test):
            theirs.callback(os.close, descriptor)
        folder, other = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace", newline="")
        stdin = stack.enter_context(tempfile.TemporaryFile())
        stdin.write(test.encode(errors="replace"))
        stdin.seek(0)
        tested = stack.enter_context(
            limited_process(
                [script, "program", str(to_program), str(from_program)], folder, *limits,
                stdin=subprocess.DEVNULL, pass_fds=(to_program, from_program), **quiet,
            )
        )  # fmt: skip
        stack.enter_context(
            limited_process(
                [script, "test", str(to_test), str(from_test), str(of_test)], other, *limits,
                stdin=stdin, pass_fds=(to_test, from_test, of_test), **quiet,
            )
        )  # fmt: skip
        theirs.close()
        if not select.select([verdict], [], [], seconds)[0]:
            return None
        # Nothing but the process of the test can write it; that process has ended, or passed.
        return 0 if os.read(verdict, 16) == b"passed" else min(status_of(tested) or 1, 1)
