"""Filters of system calls (seccomp) for untrusted programs.

`code_filter`, `landlock_filter` and `bubblewrap_filter` choose tables of `system_call_rules.py` and turn them into a
program of classic BPF, which `first_program.py` installs. A filter is made for one architecture, and refuses all calls
of others.
"""

import ctypes
import errno
import platform
from collections.abc import Sequence
from typing import NamedTuple

from glm46.storage.judge.system_call_rules import (
    EVERYWHERE,
    FILE_ATTRIBUTES,
    JUDGED_CODE,
    TCP_BY_PORT,
    TRUNCATE,
    WITHOUT_NAMESPACES,
    ArgumentCondition,
    ArgumentTest,
    CallRule,
)

_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_MACHINE = platform.machine()
_FIRST_NUMBER_OF_X32 = 0x40000000
"""First number of the x32 ABI, whose calls x86-64 kernels also accept, with the same architecture."""

# Classic BPF, linux/filter.h
_LOAD_WORD = 0x20
_AND = 0x54
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_ANY_BIT = 0x45
_JUMP_IF_AT_LEAST = 0x35
_RETURN = 0x06
# Results and struct seccomp_data, linux/seccomp.h
_RETURN_ALLOW = 0x7FFF0000
_RETURN_ERROR = 0x00050000
_OFFSET_OF_NUMBER = 0
_OFFSET_OF_ARCHITECTURE = 4
_OFFSET_OF_ARGUMENTS = 16
_BYTES_OF_ARGUMENT = 8


class _Step(NamedTuple):
    """Instruction of classic BPF. A jump skips this many of the next instructions."""

    code: int
    jump_if_true: int
    jump_if_false: int
    value: int


class _SockFilter(ctypes.Structure):
    """The struct sock_filter: a `_Step` as the kernel reads it."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


def has_call_numbers() -> bool:
    """Return True if the numbers of system calls of this machine are known."""
    return _MACHINE in _AUDIT_ARCHITECTURES


def code_filter(landlock_version: int, machine: str = _MACHINE) -> bytes:
    """Return the filter for judged code; empty on an unknown machine.

    It refuses new processes, sockets, changes of the attributes of a file, and calls that change other processes or
    outlive the code. Threads are allowed.
    """
    calls = [*EVERYWHERE, *JUDGED_CODE, *WITHOUT_NAMESPACES, *FILE_ATTRIBUTES]
    return _filter_next_to_landlock(calls, landlock_version, machine)


def landlock_filter(
    landlock_version: int, *, has_network: bool, may_change_modes: bool, machine: str = _MACHINE
) -> bytes:
    """Return the filter for programs under Landlock that may start others; empty on an unknown machine.

    It refuses what Landlock has no rules for.
    """
    calls = [*EVERYWHERE, *WITHOUT_NAMESPACES]
    if not has_network:
        calls += TCP_BY_PORT
    if not may_change_modes:
        calls += FILE_ATTRIBUTES
    return _filter_next_to_landlock(calls, landlock_version, machine)


def bubblewrap_filter(machine: str = _MACHINE) -> bytes:
    """Return the filter for programs in bubblewrap that may start others; empty on an unknown machine.

    It refuses what namespaces do not separate.
    """
    return _filter(EVERYWHERE, machine)


def _filter_next_to_landlock(calls: Sequence[CallRule], landlock_version: int, machine: str) -> bytes:
    """Return a filter that also refuses truncate where Landlock cannot."""
    if landlock_version < 3:
        calls = [*calls, TRUNCATE]
    return _filter(calls, machine)


def _filter(calls: Sequence[CallRule], machine: str) -> bytes:
    """Return the BPF program that refuses these calls; empty on an unknown machine."""
    if machine not in _AUDIT_ARCHITECTURES:
        return b""
    refuse = _Step(_RETURN, 0, 0, _RETURN_ERROR | errno.EPERM)
    steps = [
        _Step(_LOAD_WORD, 0, 0, _OFFSET_OF_ARCHITECTURE),
        _Step(_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        refuse,
        _Step(_LOAD_WORD, 0, 0, _OFFSET_OF_NUMBER),
        _Step(_JUMP_IF_AT_LEAST, 0, 1, _FIRST_NUMBER_OF_X32),
        refuse,
    ]
    # A call may be in several tables. All its rules apply.
    rules_by_number: dict[int, list[CallRule]] = {}
    for call in calls:
        number = getattr(call, machine)
        if number is not None:
            rules_by_number.setdefault(number, []).append(call)
    for number, rules in rules_by_number.items():
        steps += _rules_of_number(number, rules)
    steps.append(_Step(_RETURN, 0, 0, _RETURN_ALLOW))
    return b"".join(bytes(_SockFilter(*step)) for step in steps)


def _rules_of_number(number: int, rules: Sequence[CallRule]) -> list[_Step]:
    """Return the steps that refuse a call by its rules.

    Before the steps the accumulator holds the number of the call. It still does if execution continues after them,
    because then no argument was loaded.
    """
    body: list[_Step] = []
    for rule in rules:
        refuse = _Step(_RETURN, 0, 0, _RETURN_ERROR | rule.error)
        if not rule.conditions:
            body.append(refuse)  # always: the other rules cannot matter
            break
        for condition in rule.conditions:
            body += _condition_steps(condition)
            body.append(refuse)
    else:
        body.append(_Step(_RETURN, 0, 0, _RETURN_ALLOW))
    return [_Step(_JUMP_IF_EQUAL, 0, len(body), number), *body]


def _condition_steps(condition: ArgumentCondition) -> list[_Step]:
    """Return steps that continue with the next step, the refusal, if a condition holds, and else skip it."""
    steps = [_Step(_LOAD_WORD, 0, 0, _OFFSET_OF_ARGUMENTS + _BYTES_OF_ARGUMENT * condition.argument)]
    if condition.mask != 0xFFFFFFFF:
        steps.append(_Step(_AND, 0, 0, condition.mask))
    if condition.test is ArgumentTest.HAS_ANY_BIT:
        steps.append(_Step(_JUMP_IF_ANY_BIT, 0, 1, condition.values[0]))
    elif condition.test is ArgumentTest.HAS_NO_BIT:
        steps.append(_Step(_JUMP_IF_ANY_BIT, 1, 0, condition.values[0]))
    elif condition.test is ArgumentTest.IS_NONE_OF:
        for place, value in enumerate(condition.values):
            steps.append(_Step(_JUMP_IF_EQUAL, len(condition.values) - place, 0, value))
    else:
        last = len(condition.values) - 1
        for place, value in enumerate(condition.values):
            is_last = place == last
            steps.append(_Step(_JUMP_IF_EQUAL, last - place, 1 if is_last else 0, value))
    return steps
