"""Tests of a label that can fail: told by their form, else by a run against programs that do nothing."""

import ast
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from glm46.storage.prepare.limited import run_limited
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
