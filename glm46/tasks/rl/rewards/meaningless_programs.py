"""Runs tests of programs against programs that do nothing, as a script, which imports the standard library alone.

Standard input is a list in JSON, of a test, the names of the program in it and the modules that it names without an
import. For each test the script writes a line: the names of the programs that pass it.
"""

import importlib
import json
import os
import signal
import sys
from contextlib import ExitStack


class _Meaningless:
    """A result without a meaning. It is equal to nothing else, has each attribute, and calls give another one."""

    def __init__(self, is_true: bool):
        self._is_true = is_true

    def __bool__(self) -> bool:
        return self._is_true

    def __getattr__(self, name: str):
        return lambda *given, **named: _Meaningless(self._is_true)

    def __call__(self, *given, **named):
        return _Meaningless(self._is_true)

    def __iter__(self):
        return iter(())

    def __len__(self) -> int:
        return 0

    __getitem__ = __add__ = __sub__ = __mul__ = __call__


class _Only(_Meaningless):
    """Equal to one truth value, and unlike it to no number."""

    def __eq__(self, other) -> bool:
        return other is self._is_true


def _raise(*_given, **_named):
    raise RuntimeError


def _returning(value):
    return lambda *_given, **_named: value


_PROGRAMS = {
    "a true object": _Meaningless(True), "a false object": _returning(_Meaningless(False)), "None": _returning(None),
    "an error": _raise, "True": _returning(_Only(True)), "False": _returning(_Only(False)),
    "just True": _returning(True), "just False": _returning(False), "1": _returning(1), "0": _returning(0),
}  # fmt: skip
"""Stand-ins for each name of a program that does nothing, by what its functions give. Python takes True for 1, which
may be a result that says something."""
_SECONDS_OF_TEST = 0.5


def _run() -> None:
    verdicts, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # of the tests
        os.dup2(nowhere, output)

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    for test, names, modules in json.load(sys.stdin):
        passed, compiled, scope = [], compile(test, "test", "exec"), {"__name__": "__main__"}
        with ExitStack() as stack:
            stack.push(lambda *_: True)  # a module that is not here
            scope |= {name: importlib.import_module(module) for name, module in modules.items()}
        for name, stand_in in _PROGRAMS.items():
            with ExitStack() as stack:
                stack.push(lambda *_: True)  # a test that fails, in whatever way
                signal.setitimer(signal.ITIMER_REAL, _SECONDS_OF_TEST)
                exec(compiled, scope | dict.fromkeys(names, stand_in))
                passed.append(name)
            signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(verdicts, json.dumps(passed).encode() + b"\n")


if __name__ == "__main__":
    _run()
