"""Tests of a label that can fail: told by their form, else by a run against programs that do nothing."""

import ast
import json
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from glm46.storage.prepare.limited import limited_process
from glm46.tasks.rl.rewards import meaningless_programs, tested_program

_ENDINGS = frozenset((
    "exit", "quit", "sys.exit", "_exit", "os._exit", "os.abort", "abort", "os.kill", "os.killpg", "SystemExit",
))  # fmt: skip
_TESTS_OF_PROCESS, _SECONDS_OF_PROCESS = 1_000, 60


def compares(test: str) -> bool:
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


def ends_itself(test: str) -> str:
    """The call or statement with which a test ends its process, such as ``sys.exit``; empty if it has none."""
    for node in ast.walk(ast.parse(test)):
        found = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
        if (name := ast.unparse(found) if found else "") in _ENDINGS:
            return name
    return ""


def passed_by_meaningless(tests: Sequence[str]) -> list[set[str]]:
    """For each test the programs of `meaningless_programs` that pass it; none where there was no time."""
    found: list[set[str]] = []
    while len(found) < len(tests):
        some = tests[len(found) : len(found) + _TESTS_OF_PROCESS]
        script = str(Path(meaningless_programs.__file__).absolute())
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stdin, out = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            asked = [(one, tested_program.asked_names(one), tested_program.named_modules(one)) for one in some]
            stdin.write(json.dumps(asked).encode())
            stdin.seek(0)
            arguments, quiet = [script, str(out.fileno())], subprocess.DEVNULL
            pipes = {"stdin": stdin, "stdout": quiet, "stderr": quiet, "pass_fds": [out.fileno()]}
            with (
                limited_process(arguments, folder, _SECONDS_OF_PROCESS, 1, **pipes) as process,
                suppress(subprocess.TimeoutExpired),
            ):
                process.wait(_SECONDS_OF_PROCESS)
            out.seek(0)
            lines = out.read().split(b"\n")[:-1][: len(some)]
        # A test that ends the process is judged by none; those behind it go to another process.
        missing = 0 if len(lines) == len(some) else 1 if process.poll() is not None else len(some) - len(lines)
        found += [set(json.loads(line)) for line in lines] + [set()] * missing
    return found
