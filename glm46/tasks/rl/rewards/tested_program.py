"""The two ends of the pipes between a test and the program that it tests. Each runs in a limited process of its own, as
a script, which imports the standard library alone.

The test runs at its end for real. Names that the program defines are stand-ins there: a call goes to the other process,
and its result comes back as a value, so that the test compares values by Python's own operators. The program sees calls
and never what they are compared with. If its process ends, or is replaced, the test fails.
"""

import ast
import builtins
import importlib
import json
import operator
import os
import sys
import types
from collections import deque
from contextlib import ExitStack
from decimal import Decimal
from fractions import Fraction

_KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_NUMBERS = {"Fraction": Fraction, "Decimal": Decimal, "complex": complex}
_CHANGEABLE = (list, dict, set, deque)
_ANSWERS_OF_DATA = {
    name for kind in (str, set, float) for name in dir(kind) if name.startswith(("is", "startswith", "endswith"))
}
"""Methods of built-in types that say true or false: an object of the program's that has them would be believed."""

_UNARY = (
    "len", "iter", "next", "str", "repr", "int", "float", "bool", "hash", "neg", "abs",
    "getitem", "setitem", "delitem",
)  # fmt: skip
_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OPERATIONS = {
    **{name: getattr(operator, name, None) or getattr(builtins, name) for name in (*_UNARY, *_BINARY)},
    "get": getattr, "set": setattr, "isinstance": isinstance,
    "call": lambda function, given, named: function(*given, **named),
}  # fmt: skip


class _Peer:
    """This end: asks the other one for operations on its objects, and answers its questions in the meantime.

    Args:
        reading, writing: file descriptors.
        operations: what this end answers.
    """

    def __init__(self, reading: int, writing: int, operations: dict):
        self._lines, self._writing, self._operations = os.fdopen(reading, "rb"), writing, operations
        self._objects, self._remotes = list[object](), dict[int, object]()
        for descriptor in (reading, writing):
            os.set_inheritable(descriptor, False)

    def ask(self, operation: str, *values):
        """The result of an operation at the other end.

        Raises:
            Exception: what the operation raised there, as the nearest built-in class.
        """
        word = os.urandom(16).hex()  # a program cannot write a reply before it has read the question
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
            for mine, changed in zip(values[1], self.decode(message["changed"]), strict=True):
                _replace(mine, changed)
        return self.decode(message["result"])

    def serve(self) -> None:
        """Answer questions until the other end is closed."""
        while True:
            self._answer(self._receive())

    def _answer(self, message: dict) -> None:
        reply = {"word": message["word"]}

        def tell(_kind, error, _trace) -> bool:
            if error is not None:
                kind = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
                reply.update(error=kind.__name__, text=str(error))
            return True

        with ExitStack() as stack:
            stack.push(tell)
            values = self.decode(message["values"])
            reply["result"] = self.encode(self._operations[message["ask"]](*values))
            if message["ask"] == "call":
                reply["changed"] = self.encode([x if isinstance(x, _CHANGEABLE) else None for x in values[1]])
        self._send(reply)

    def _send(self, message: dict) -> None:
        left = json.dumps(message).encode() + b"\n"
        try:
            while left:
                left = left[os.write(self._writing, left) :]
        except BrokenPipeError:
            os._exit(1)

    def _receive(self) -> dict:
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            os._exit(1)  # the other process is gone; a test could catch an error
        return json.loads(line)

    def encode(self, value):
        """A value as JSON: data by what it holds, other objects by a number."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(one)] for key, one in value.items()]}
        for name, kind in _KINDS.items():
            if isinstance(value, kind):
                return {name: [self.encode(one) for one in value]}
        if isinstance(value, bytes | bytearray):
            return {"bytes": value.hex()}
        if isinstance(value, (*_NUMBERS.values(),)):
            return {type(value).__name__: str(value)}
        if type(value).__module__ == "numpy":
            return self.encode(value.tolist())
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def decode(self, found):
        """The value of JSON."""
        if not isinstance(found, dict):
            return found
        [(name, held)] = found.items()
        if name == "dict":
            return {self.decode(key): self.decode(one) for key, one in held}
        if name in _KINDS:
            return _KINDS[name](self.decode(one) for one in held)
        if name == "bytes":
            return bytes.fromhex(held)
        if name in _NUMBERS:
            return _NUMBERS[name](held)
        if name == "yours":
            return self._objects[held]
        return self._remotes.setdefault(held, Remote(self, held))


class Remote:
    """An object of the other process. It is equal to no value of this one, whatever its class says."""

    def __init__(self, peer: _Peer, number: int):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *given, **named):
        return self._peer.ask("call", self, list(given), named)

    def __getattr__(self, name: str):
        if name in _ANSWERS_OF_DATA:
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value) -> None:
        self._peer.ask("set", self, name, value)

    def __instancecheck__(self, one) -> bool:
        return isinstance(one, Remote) and self._peer.ask("isinstance", one, self)


def _asking(name: str):
    return lambda self, *values: self._peer.ask(name, self, *values)


def _asking_of_two(name: str):
    return lambda self, other: self._peer.ask(name, self, other) if isinstance(other, Remote) else NotImplemented


for _name in _UNARY:
    setattr(Remote, f"__{_name}__", _asking(_name))
for _name in _BINARY:
    setattr(Remote, f"__{_name}__", _asking_of_two(_name))


def _replace(mine, changed) -> None:
    """Give a list, set or table that was handed over the values that the call left in it."""
    if isinstance(mine, _CHANGEABLE) and type(mine) is type(changed) and mine != changed:
        mine.clear()
        (mine.extend if isinstance(mine, list | deque) else mine.update)(changed)


def asked_names(test: str) -> list[str]:
    """Names that a test reads and does not define: those of the program; of built-in ones only if there are no others,
    those that it calls.

    Raises:
        SyntaxError: it is not Python.
    """
    read, called, own, modules = dict[str, None](), dict[str, None](), set[str](), set[str]()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Name):
            read.setdefault(node.id) if isinstance(node.ctx, ast.Load) else own.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            own.update((one.asname or one.name).partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.setdefault(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _is_module(node.value.id):
            modules.add(node.value.id)
    free = [name for name in read if name not in own and name not in modules and not hasattr(builtins, name)]
    return free or [name for name in called if name not in own and hasattr(builtins, name)]


def _is_module(name: str) -> bool:
    return name in sys.stdlib_module_names or name == "np"


def _run_program(reading: int, writing: int) -> None:
    """At the end of the program, which is ``program.py``."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    with open("program.py", encoding="utf-8") as file:
        source = file.read()

    def named(name: str):
        if hasattr(module, name) or not hasattr(module, "Solution"):
            found = getattr(module, name)
        else:
            found = getattr(module.Solution(), name)
        if isinstance(found, types.ModuleType):
            raise AttributeError(name)
        return found

    peer = _Peer(reading, writing, {**_OPERATIONS, "name": named})
    exec(compile(source, "program.py", "exec"), module.__dict__)
    peer.serve()


def _run_test(reading: int, writing: int, verdict: int) -> None:
    """At the end of the test, which is standard input; writes to ``verdict`` if it passes."""

    def get(one, name: str):
        if name.startswith("_"):  # what functions and classes know of the test
            raise AttributeError(name)
        return getattr(one, name)

    test = sys.stdin.read()
    peer = _Peer(reading, writing, {**_OPERATIONS, "get": get})
    peer.ask("bool", True)  # the program has come to its end
    scope: dict[str, object] = {"__name__": "__main__"}
    scope |= {name: importlib.import_module(module) for name, module in named_modules(test).items()}
    for name in asked_names(test):
        try:
            scope[name] = peer.ask("name", name)
        except AttributeError:
            continue  # the test meets a NameError, if it comes to this name
    exec(compile(test, "test", "exec"), scope)
    os.write(verdict, b"passed")


def named_modules(test: str) -> dict[str, str]:
    """Modules that a test names without an import, by their names in it."""
    names = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name) and _is_module(node.id)}
    return {name: {"np": "numpy"}.get(name, name) for name in names}


if __name__ == "__main__":
    side, *descriptors = sys.argv[1:]
    (_run_test if side == "test" else _run_program)(*map(int, descriptors))
