"""The reward for code: runs Python in a fenced block against tests in limited processes (`judge/limited.py`)."""

import ast
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

from glm46.files.scratch import scratch_folder
from glm46.storage.judge.limited import limited_process, run_limited, status_of
from glm46.tasks.rl.rewards import objects_of_tests, same_outputs, tested_program
from glm46.tasks.rl.rewards.answer import Answer, usable_seconds
from glm46.tasks.rl.rewards.same_outputs import is_same_output

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*(.*)")
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*(?![\w-])", re.IGNORECASE)
_OF_CPU_LIMIT = (-signal.SIGXCPU, -signal.SIGKILL)


class Case(NamedTuple):
    """A test of a program: Python that calls it, or a pair of standard input and output."""

    test: str
    stdin: str = ""
    expected: str | None = None
    """Expected standard output; None if ``test`` decides."""
    is_call: bool = False
    """True for a test that compares the result of a call with a value."""


def code(answer: Answer, options: Mapping[str, Any]) -> float:
    """Return the share of tests that the last block of Python passes, or with ``all`` (true) 1 only if it passes all.

    A test passes by the answers of the program; a program that ends early or replaces its process fails.

    Args:
        answer: its label, or the label parsed as JSON, is a list of tests in Python (assert statements), or a table
            with ``inputs`` and ``outputs`` of equal length: standard input and output of runs of the program, as texts
            or lists of lines. With ``fn_name`` they are arguments and results of that function, or method of
            ``Solution``, as lists of values, or as texts with a JSON value in each line.
        options: ``all``; ``seconds`` (4) and ``memory_gib`` (1) for each run. All runs share `usable_seconds`: once a
            run has used its ``seconds``, later runs get the remaining time, and those without any time fail.

    Raises:
        ValueError: the label has no tests.
        TimeoutError: there are too many tests for that time: no run has used its ``seconds``.
    """
    cases = cases_of(answer.label)
    program = _last_program(answer.result)
    if program is None:
        return 0.0
    budget = usable_seconds(options)
    seconds = min(options.get("seconds", 4), budget)
    end = time.monotonic() + budget
    passed = 0
    is_slow = False
    for number, case in enumerate(cases):
        start = time.monotonic()
        limit = min(seconds, end - start)
        status = None
        output = ""
        if limit > 0:
            limits = dict(cpu_seconds=seconds, seconds=limit, memory_gib=options.get("memory_gib", 1))
            if case.expected is None:
                status = _test_status(program, case.test, **limits)
            else:
                status, output, _ = run_limited(program, case.stdin, **limits)
        # Includes the removal of the folder, which a program can fill.
        has_taken_its_time = time.monotonic() - start > 0.9 * seconds
        is_slow |= status in _OF_CPU_LIMIT or has_taken_its_time
        if status is None and not is_slow:
            raise TimeoutError(f"{number} of {len(cases)} tests took all of {budget:g} s")
        is_passed = status == 0 and (case.expected is None or is_same_output(output, case.expected))
        if options.get("all", True) and not is_passed:
            return 0.0
        passed += is_passed
    return passed / len(cases)


def _last_program(text: str) -> str | None:
    """Return the last fenced block of Python, else the last block without a language that is a program."""
    python_blocks = list[str]()
    plain_blocks = list[str]()
    lines: list[str] | None = None
    for line in text.splitlines():
        fence = _FENCE.fullmatch(line)
        if lines is None:
            if fence and not ("`" in fence[2] and "`" in fence[3]):
                indent, mark, language = fence.groups()
                lines = []
        elif fence and fence[2][0] == mark[0] and len(fence[2]) >= len(mark) and not fence[3].strip():
            if _PYTHON.match(language):
                python_blocks.append("\n".join(lines))
            elif not language.strip():
                plain_blocks.append("\n".join(lines))
            lines = None
        else:
            lines.append(line.removeprefix(indent))
    return next(iter(reversed(python_blocks)), None) or next(
        (block for block in reversed(plain_blocks) if _is_program(block)), None
    )


def _is_program(text: str) -> bool:
    """Return True for Python code with an effect, unlike a block of output."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    calls = (ast.Call, ast.Await, ast.Yield)
    return any(
        not isinstance(statement, ast.Expr) or any(isinstance(n, calls) for n in ast.walk(statement))
        for statement in body
    )


@contextmanager
def without_digit_limit() -> Iterator[None]:
    """Let Python read and write integers of more than 4,300 digits, in labels as in tested programs."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


@without_digit_limit()
def cases_of(label: object) -> list[Case]:
    """Return the tests of a label. Raises ValueError for a label of another form."""
    try:
        tests = json.loads(label) if isinstance(label, str) else label
    except ValueError:
        tests = None
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return [Case(test) for test in tests]
    table = tests if isinstance(tests, Mapping) else {}
    inputs = table.get("inputs")
    outputs = table.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs)):
        raise ValueError(
            "is neither a list of tests in Python (assert statements) nor a table with inputs and outputs, two lists "
            "of one length above 0, nor JSON of them; write it as one of these"
        )
    name = table.get("fn_name")
    if name is not None and name != "":
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ValueError(f"fn_name {name!r:.60}: is not the name of a function; correct it")
        return _calls(name, inputs, outputs)
    return [Case("", _lines(stdin), _lines(stdout)) for stdin, stdout in zip(inputs, outputs, strict=True)]


def _lines(value: object) -> str:
    """Return standard input or output of a label as text."""
    if isinstance(value, list) and all(_is_plain(line) for line in value):
        return "\n".join(map(str, value))
    if _is_plain(value):
        return str(value)
    raise ValueError(f"{value!r:.60}: is neither a text nor a list of lines; correct it, or add fn_name")


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _calls(name: str, inputs: list[Any], outputs: list[Any]) -> list[Case]:
    """Return a test for each call of a function. Results are compared after conversion to JSON, which does not tell
    tuples from lists, by the rules of `same_outputs`."""
    if all(isinstance(entry, str) for entry in inputs):
        try:
            inputs = [[json.loads(line) for line in entry.splitlines() if line.strip()] for entry in inputs]
            outputs = [json.loads(entry) if isinstance(entry, str) else entry for entry in outputs]
        except ValueError as error:
            raise ValueError(f"inputs and outputs of {name}: a line is not JSON ({error}); correct it") from None
    try:
        json.dumps([inputs, outputs], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"inputs and outputs of {name}: {error}; write values that JSON has") from None
    if any(not isinstance(entry, list) for entry in inputs):
        raise ValueError(f"inputs of {name}: are not lists of arguments; write each as a list")
    # Some data sets wrap each result in a list.
    is_wrapped = all(isinstance(entry, list) and len(entry) == 1 for entry in outputs)
    plain = [entry[0] if is_wrapped else entry for entry in outputs]
    if any(all(entry is same for entry in plain) for same in (None, True, False)):
        raise ValueError(
            f"outputs of {name}: all are {json.dumps(plain[0])}, which a function without a body gives, or "
            "one that does not look at its arguments; add a case with another result"
        )
    comparison = Path(same_outputs.__file__).read_text(encoding="utf-8")
    cases = []
    for arguments, output in zip(inputs, outputs, strict=True):
        right_results = [output, *(output if is_wrapped else ())]
        test = (
            f"import json\nfound = json.loads(json.dumps({name}(*{arguments!r})))\n"
            f"assert any(is_same_value(found, expected) for expected in {right_results!r})"
        )
        cases.append(Case(f"{comparison}\n{test}", is_call=True))
    return cases


def _test_status(program: str, test: str, *, cpu_seconds: float, seconds: float, memory_gib: float) -> int | None:
    """Return 0 if a program passes a test, 1 if not, minus the number of the signal that ended the program, or None
    after a timeout. See `tested_program`."""
    limits = cpu_seconds, memory_gib
    script = str(Path(tested_program.__file__).absolute())
    rules = str(Path(objects_of_tests.__file__).absolute())
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    to_program, from_test = os.pipe()
    to_test, from_program = os.pipe()
    verdict, to_verdict = os.pipe()
    with ExitStack() as stack, ExitStack() as child_ends:
        stack.callback(os.close, verdict)
        for descriptor in (to_program, from_test, to_test, from_program, to_verdict):
            child_ends.callback(os.close, descriptor)
        folder = stack.enter_context(scratch_folder(seconds))
        test_folder = stack.enter_context(scratch_folder(seconds))
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace", newline="")
        stdin = stack.enter_context(tempfile.TemporaryFile())
        stdin.write(test.encode(errors="replace"))
        stdin.seek(0)
        tested = stack.enter_context(
            limited_process(
                [script, "program", str(to_program), str(from_program)],
                folder,
                *limits,
                stdin=subprocess.DEVNULL,
                pass_fds=(to_program, from_program),
                **quiet,
            )
        )
        stack.enter_context(
            limited_process(
                [script, "test", str(to_test), str(from_test), str(to_verdict), rules],
                test_folder,
                *limits,
                stdin=stdin,
                pass_fds=(to_test, from_test, to_verdict),
                **quiet,
            )
        )
        child_ends.close()
        if not select.select([verdict], [], [], seconds)[0]:
            return None
        # Only the test's process can write the verdict; without one it has ended.
        return 0 if os.read(verdict, 16) == b"passed" else min(status_of(tested) or 1, 1)
