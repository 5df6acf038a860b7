"""Runs a test and the program that it tests in two limited processes, connected by pipes. Each process runs this file
as a script, which imports only the standard library.

In the process of the test, the names that the program defines are stand-ins: a call goes to the other process, and its
result comes back as a value, which the test compares with Python's own operators. The program sees calls, but not the
expected values. If its process ends or replaces itself, the test fails.
"""

import ast
import builtins
import importlib
import importlib.util
import json
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from decimal import Decimal
from fractions import Fraction
from typing import Any

_KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_NUMBERS = {"Fraction": Fraction, "Decimal": Decimal, "complex": complex}
_CHANGEABLE = (list, dict, set, deque)
_ANSWERS_OF_DATA = {
    name for kind in (str, set, float) for name in dir(kind) if name.startswith(("is", "startswith", "endswith"))
}
"""Predicates of built-in types. Objects of the program do not get them, because a test would trust their answers."""

_UNARY = (
    "len",
    "iter",
    "next",
    "str",
    "repr",
    "int",
    "float",
    "bool",
    "hash",
    "neg",
    "abs",
    "getitem",
    "setitem",
    "delitem",
)
_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OPERATIONS = {
    **{name: getattr(operator, name, None) or getattr(builtins, name) for name in (*_UNARY, *_BINARY)},
    "get": getattr,
    "set": setattr,
    "isinstance": isinstance,
    "call": lambda function, args, kwargs: function(*args, **kwargs),
}


_NEVER_SENT = (
    types.ModuleType,
    types.FrameType,
    types.CodeType,
    types.TracebackType,
    types.CellType,
    types.MappingProxyType,
)
"""Types that give access to all other objects of a process."""


def _is_namespace(value: object) -> bool:
    """Return True for the namespace of a module, which gives access to Python's built-in functions."""
    return isinstance(value, dict) and ("__builtins__" in value or "__spec__" in value)


class _Peer:
    """This end of the pipes: requests operations on objects of the other end, and meanwhile serves its requests.

    Args:
        reading, writing: file descriptors.
        operations: functions that the other end may call.
    """

    def __init__(self, reading: int, writing: int, operations: dict[str, Callable[..., object]]):
        self._lines = os.fdopen(reading, "rb")
        self._writing = writing
        self._operations = operations
        self._objects = list[object]()
        self._remotes = dict[int, object]()
        for descriptor in (reading, writing):
            os.set_inheritable(descriptor, False)

    def ask(self, operation: str, *values: object) -> object:
        """Return the result of an operation at the other end.

        Raises:
            Exception: the error of the operation there, as the nearest built-in class.
        """
        word = os.urandom(16).hex()  # so that a program cannot write a reply before it has read the request
        self._send({"ask": operation, "values": self.encode(values), "word": word})
        while True:
            message = self._receive()
            if "ask" in message:
                self._answer(message)
            elif message.get("word") == word:
                break
        if "error" in message:
            kind = getattr(builtins, message["error"])
            raise kind(message["text"]) if issubclass(kind, BaseException) else ValueError
        if operation == "call":
            arguments: Any = values[1]
            changes: Any = self.decode(message["changed"])
            for mine, changed in zip(arguments, changes, strict=True):
                _replace(mine, changed)
        return self.decode(message["result"])

    def serve(self) -> None:
        """Serve requests until the other end is closed."""
        while True:
            self._answer(self._receive())

    def _answer(self, message: dict[str, Any]) -> None:
        reply = {"word": message["word"]}

        def tell(_kind: object, error: BaseException | None, _trace: object) -> bool:
            if error is not None:
                kind = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
                reply.update(error=kind.__name__, text=str(error))
            return True

        with ExitStack() as stack:
            stack.push(tell)
            values: Any = self.decode(message["values"])
            reply["result"] = self.encode(self._operations[message["ask"]](*values))
            if message["ask"] == "call":
                reply["changed"] = self.encode([x if isinstance(x, _CHANGEABLE) else None for x in values[1]])
        self._send(reply)

    def _send(self, message: dict[str, Any]) -> None:
        unsent = json.dumps(message).encode() + b"\n"
        try:
            while unsent:
                unsent = unsent[os.write(self._writing, unsent) :]
        except BrokenPipeError:
            os._exit(1)

    def _receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            os._exit(1)  # the other process is gone; a test could catch an error
        message: dict[str, Any] = json.loads(line)
        return message

    def encode(self, value: object) -> object:
        """Convert a value to JSON: data by content, other objects by number."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, _NEVER_SENT) or _is_namespace(value):
            raise TypeError(f"a {type(value).__name__} of the other process stays there")
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(entry)] for key, entry in value.items()]}
        for name, kind in _KINDS.items():
            if isinstance(value, kind):
                return {name: [self.encode(entry) for entry in value]}
        if isinstance(value, bytes | bytearray):
            return {"bytes": value.hex()}
        if isinstance(value, (*_NUMBERS.values(),)):
            return {type(value).__name__: str(value)}
        if type(value).__module__ == "numpy":
            array: Any = value
            return self.encode(array.tolist())
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def decode(self, encoded: object) -> object:
        """Convert JSON of `encode` back to a value."""
        if not isinstance(encoded, dict):
            return encoded
        [(name, content)] = encoded.items()
        if name == "dict":
            return {self.decode(key): self.decode(entry) for key, entry in content}
        if name in _KINDS:
            return _KINDS[name](self.decode(entry) for entry in content)
        if name == "bytes":
            return bytes.fromhex(content)
        if name in _NUMBERS:
            return _NUMBERS[name](content)
        if name == "yours":
            return self._objects[content]
        return self._remotes.setdefault(content, Remote(self, content))


class Remote:
    """An object of the other process. It equals no value of this process, whatever its class defines."""

    _peer: _Peer

    def __init__(self, peer: _Peer, number: int):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._peer.ask("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> object:
        if name in _ANSWERS_OF_DATA:
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.ask("set", self, name, value)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and bool(self._peer.ask("isinstance", instance, self))


def _asking(name: str) -> Callable[..., object]:
    return lambda self, *values: self._peer.ask(name, self, *values)


def _asking_of_two(name: str) -> Callable[..., object]:
    return lambda self, other: self._peer.ask(name, self, other) if isinstance(other, Remote) else NotImplemented


for _name in _UNARY:
    setattr(Remote, f"__{_name}__", _asking(_name))
for _name in _BINARY:
    setattr(Remote, f"__{_name}__", _asking_of_two(_name))


def _replace(mine: object, changed: object) -> None:
    """Update a list, set or dict that was passed as an argument with the changes that the call made."""
    if isinstance(mine, _CHANGEABLE) and type(mine) is type(changed) and mine != changed:
        mine.clear()
        (mine.extend if isinstance(mine, list | deque) else mine.update)(changed)


def asked_names(test: str) -> list[str]:
    """Return the names that a test reads and does not define, which the program must define. If there are only built-in
    names, return those that it calls.

    Raises:
        SyntaxError: the test is not Python.
    """
    read = dict[str, None]()
    called = dict[str, None]()
    defined = set[str]()
    modules = set[str]()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Name):
            read.setdefault(node.id) if isinstance(node.ctx, ast.Load) else defined.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.setdefault(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _is_module(node.value.id):
            modules.add(node.value.id)
    free = [name for name in read if name not in defined and name not in modules and not hasattr(builtins, name)]
    return free or [name for name in called if name not in defined and hasattr(builtins, name)]


def _is_module(name: str) -> bool:
    return name in sys.stdlib_module_names or name == "np"


def _run_program(reading: int, writing: int) -> None:
    """Run the program ``program.py`` and serve requests of the test."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    with open("program.py", encoding="utf-8") as file:
        source = file.read()

    def named(name: str) -> object:
        if hasattr(module, name) or not hasattr(module, "Solution"):
            value = getattr(module, name)
        else:
            value = getattr(module.Solution(), name)
        if isinstance(value, types.ModuleType):
            raise AttributeError(name)
        return value

    peer = _Peer(reading, writing, {**_OPERATIONS, "name": named})
    exec(compile(source, "program.py", "exec"), module.__dict__)
    peer.serve()


def _run_test(reading: int, writing: int, verdict: int, rules: str) -> None:
    """Run the test, which is read from standard input; write to ``verdict`` if it passes.

    Args:
        rules: path of ``objects_of_tests.py``.
    """
    test = sys.stdin.read()
    spec = importlib.util.spec_from_file_location("objects_of_tests", rules)
    assert spec is not None and spec.loader is not None, rules
    objects_of_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(objects_of_tests)
    peer = _Peer(reading, writing, objects_of_tests.permitted_operations(_OPERATIONS))
    peer.ask("bool", True)  # returns when the program has run to its end
    scope: dict[str, object] = {"__name__": "__main__"}
    scope |= {name: importlib.import_module(module) for name, module in named_modules(test).items()}
    for name in asked_names(test):
        try:
            scope[name] = peer.ask("name", name)
        except AttributeError:
            continue  # the test raises NameError if it reaches this name
    exec(compile(test, "test", "exec"), scope)
    os.write(verdict, b"passed")


def named_modules(test: str) -> dict[str, str]:
    """Return the modules that a test uses without an import, by their names in it."""
    names = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name) and _is_module(node.id)}
    return {name: {"np": "numpy"}.get(name, name) for name in names}


def _main(side: str, *words: str) -> None:
    if side == "test":
        reading, writing, verdict, rules = words
        _run_test(int(reading), int(writing), int(verdict), rules)
    else:
        _run_program(*map(int, words))


if __name__ == "__main__":
    _main(*sys.argv[1:])
