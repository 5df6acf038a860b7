"""Landlock rules for files and connections, for `first_program.py`."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from glm46.storage.judge.system_calls import has_call_numbers

# System calls, on each architecture, and their arguments: linux/landlock.h.
_CREATE_RULESET = 444
_ADD_RULE = 445
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_RULE_NET_PORT = 2
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_MAKE_CHARACTER_DEVICE = 1 << 6
_MAKE_BLOCK_DEVICE = 1 << 11
_CONTROL_DEVICE = 1 << 15
_BIND_TCP = 1 << 0
_CONNECT_TCP = 1 << 1
_ABSTRACT_SOCKETS = 1 << 0
_SIGNALS = 1 << 1
_FILE_RIGHTS = (13, 13, 14, 15, 15, 16)
"""Number of file rights by version of Landlock, from 0; later versions have as many as the last entry."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


class Access(NamedTuple):
    """Rights of a program in addition to those on its folder."""

    readable: Sequence[str] = ()
    """Files and folders that it may read."""
    port: int | None = None
    """Port of the loopback interface to which it may connect."""
    has_network: bool = False
    may_change_modes: bool = True
    """True if it may change modes, owners and times, under Landlock of all files of this user."""


@cache
def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 without Landlock, or if the numbers of system calls are
    unknown."""
    if not has_call_numbers():
        return 0
    version: int = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    return max(version, 0)


def ruleset_of(folder: str, access: Access) -> int:
    """Return the descriptor of a Landlock ruleset. A program under it can write its folder, read what ``access`` names,
    and neither read nor signal processes of others (signals: from version 6)."""
    version = landlock_version()
    all_rights = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS) - 1)]) - 1
    has_port_rules = version >= 4 and not access.has_network
    scoped = _SIGNALS if access.has_network else _SIGNALS | _ABSTRACT_SOCKETS
    ruleset = _new_ruleset(version, all_rights, _BIND_TCP | _CONNECT_TCP if has_port_rules else 0, scoped)
    _allow(ruleset, folder, all_rights & ~(_MAKE_CHARACTER_DEVICE | _MAKE_BLOCK_DEVICE | _CONTROL_DEVICE))
    for device in _DEVICES:
        _allow(ruleset, device, _READ_FILE | _WRITE_FILE)
    for place in access.readable:
        _allow(ruleset, place, _EXECUTE | _READ_FILE | _READ_FOLDER)
    if has_port_rules and access.port is not None:
        rule = (ctypes.c_uint64 * 2)(_CONNECT_TCP, access.port)
        _system_call(_ADD_RULE, ruleset, _RULE_NET_PORT, ctypes.addressof(rule))
    return ruleset


def _new_ruleset(version: int, file_rights: int, port_rights: int, scoped: int) -> int:
    attributes = (ctypes.c_uint64 * 3)(file_rights, port_rights, scoped)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _system_call(_CREATE_RULESET, ctypes.addressof(attributes), size, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    return ruleset


def _allow(ruleset: int, place: str, rights: int) -> None:
    """Grant rights on a file or folder, if it exists."""
    with suppress(OSError):
        parent = os.open(place, os.O_PATH | os.O_CLOEXEC)
        rule = _PathRule(rights if os.path.isdir(place) else rights & ~_READ_FOLDER, parent)
        status = _system_call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.addressof(rule))
        os.close(parent)
        if status:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule: {place}")


def _system_call(number: int, first: int, second: int, third: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [ctypes.c_long] * 5
    status: int = call(number, first, second, third, 0)
    return status
