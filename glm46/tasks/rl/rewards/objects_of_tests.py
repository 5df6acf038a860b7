"""Rules for what a judged program may do with objects that its test hands to it.

Program and test run in two processes. The program asks for each operation on an object of the test, and the process of
the test performs it if these rules permit it. `tested_program.py` loads this file there, so it imports only the
standard library.
"""

import array
import datetime
import io
import re
import sys
import types
from collections.abc import Callable, MutableMapping

_DATA_CLASSES = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    io.StringIO,
    io.BytesIO,
    re.Pattern,
    re.Match,
    range,
    slice,
    array.array,
    types.SimpleNamespace,
)
"""Classes of the standard library whose attributes a program may read: they hold data and lead to nothing else."""
_GENERATOR_METHODS = ("send", "throw", "close")
_REFUSED_FUNCTIONS = (
    eval,
    exec,
    compile,
    open,
    __import__,
    getattr,
    setattr,
    delattr,
    vars,
    dir,
    globals,
    locals,
    type,
    super,
    breakpoint,
)
"""Builtins that give access to everything in the process of the test."""


def permitted_operations(operations: dict[str, Callable[..., object]]) -> dict[str, Callable[..., object]]:
    """Return the operations by name, with these rules for attributes, items and calls.

    A program may call, iterate, index, compare and print objects that it was passed, and may read and write attributes
    of instances of the test's own classes. It cannot reach frames, code or modules, or change classes and functions.
    """
    return {
        **operations,
        "get": _permitted_get,
        "set": _permitted_set,
        "setitem": _permitted_setitem,
        "delitem": _permitted_delitem,
        "call": _permitted_call,
    }


def _is_class_of_test(kind: type) -> bool:
    """Return True for a class that the test defines: its module is `__main__`, but the script there lacks it."""
    return kind.__module__ == "__main__" and getattr(sys.modules["__main__"], kind.__qualname__, None) is not kind


def _names_of_test(kind: type) -> set[str]:
    """Return the names that the test defines in a class and in its bases."""
    names = set(getattr(kind, "__members__", ()))  # the members, if it is an Enum
    for base in kind.__mro__:
        if _is_class_of_test(base):
            names.update(vars(base))
    return names


def _permitted_get(value: object, name: str) -> object:
    """Read an attribute of an instance or class of the test, or of an instance of a class that holds data."""
    if name.startswith("_"):
        raise AttributeError(name)
    kind = type(value)
    if isinstance(value, type):
        is_permitted = name in _names_of_test(value)
    elif isinstance(value, types.GeneratorType):
        is_permitted = name in _GENERATOR_METHODS
    else:
        is_permitted = _is_class_of_test(kind) or isinstance(value, _DATA_CLASSES)
    if not is_permitted:
        raise AttributeError(name)
    return getattr(value, name)


def _permitted_set(value: object, name: str, new: object) -> None:
    """Set an attribute of an instance of a class of the test, such as a node's `next`. Methods cannot be replaced."""
    kind = type(value)
    is_instance = not isinstance(value, type) and (_is_class_of_test(kind) or kind is types.SimpleNamespace)
    if not is_instance or name.startswith("_") or callable(getattr(kind, name, None)):
        raise AttributeError(name)
    setattr(value, name, new)


def _permitted_setitem(value: MutableMapping[object, object], key: object, new: object) -> None:
    _require_mutable_items(value)
    value[key] = new


def _permitted_delitem(value: MutableMapping[object, object], key: object) -> None:
    _require_mutable_items(value)
    del value[key]


def _require_mutable_items(value: object) -> None:
    """Raise TypeError unless a program may change items of an object."""
    is_permitted = _is_class_of_test(type(value)) or isinstance(value, array.array)
    if isinstance(value, type) or not is_permitted:
        raise TypeError(f"items of a {type(value).__name__} of the test cannot be changed")


def _permitted_call(function: Callable[..., object], positional: list[object], named: dict[str, object]) -> object:
    """Call a function, unless it is a builtin that gives access to everything in the process of the test."""
    if any(function is refused for refused in _REFUSED_FUNCTIONS):
        raise TypeError(f"{function.__name__} of the test cannot be called by the program")
    return function(*positional, **named)
