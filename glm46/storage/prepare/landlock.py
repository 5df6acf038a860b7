"""Landlock's rules of files and connections, and filters of system calls (seccomp), for `first_program.py`."""

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

_CREATE_RULESET, _ADD_RULE = 444, 445  # of Landlock, on each architecture
_VERSION_FLAG, _BENEATH, _NET_PORT = 1, 1, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _MAKE_DEVICES, _CONTROL = 1, 2, 4, 8, 1 << 6 | 1 << 11, 1 << 15
_FILE_RIGHTS = (13, 13, 14, 15, 15, 16)
"""Number of rights of files by the version of Landlock, from 0; later ones know as many as the last."""
_BIND_AND_CONNECT, _CONNECT = 0b11, 0b10
_ABSTRACT_SOCKETS, _SIGNALS = 0b01, 0b10
_CLONE_THREAD = 0x00010000
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_LOAD, _AND, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06  # of classic BPF
_CALL, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)  # places in struct seccomp_data
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class _Calls(NamedTuple):
    """Numbers of system calls. Source: asm/unistd.h; AUDIT_ARCH in linux/audit.h."""

    architecture: int
    forks: tuple[int, ...]
    """fork, vfork."""
    socket: int
    clone: int
    truncate: int
    clone3: int = 435
    io_uring: int = 425
    """It opens sockets without a call of its own."""


_CALLS = {
    "x86_64": _Calls(0xC000003E, (57, 58), 41, 56, 76), "aarch64": _Calls(0xC00000B7, (), 198, 220, 45),
}.get(platform.machine())  # fmt: skip
_Steps = list[tuple[int, int, int, int]]


class _Step(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


class Access(NamedTuple):
    """Rights of a program beside those on its folder."""

    readable: Sequence[str] = ()
    """Files and folders."""
    port: int | None = None
    """Of the loopback interface, that it may connect to."""
    has_network: bool = False


@cache
def landlock_version() -> int:
    """Of the kernel; 0 without Landlock, or on a machine whose numbers of system calls are not known."""
    return max(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG), 0) if _CALLS else 0


def ruleset_of(folder: str, access: Access) -> int:
    """A descriptor of Landlock's rules: a program under them writes a folder, and can neither read nor signal processes
    that are not its own, the latter from version 6 on."""
    version, call = landlock_version(), ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [ctypes.c_long] * 5
    all_rights = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS) - 1)]) - 1
    net = 0 if access.has_network or version < 4 else _BIND_AND_CONNECT
    attributes = (ctypes.c_uint64 * 3)(
        all_rights, net, _SIGNALS if access.has_network else _SIGNALS | _ABSTRACT_SOCKETS
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = call(_CREATE_RULESET, ctypes.addressof(attributes), size, 0, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    own = all_rights & ~(_MAKE_DEVICES | _CONTROL)
    reading, device = _EXECUTE | _READ_FILE | _READ_FOLDER, _READ_FILE | _WRITE_FILE
    for place, rights in [
        (folder, own),
        *((one, device) for one in _DEVICES),
        *((p, reading) for p in access.readable),
    ]:
        with suppress(OSError):
            parent = os.open(place, os.O_PATH | os.O_CLOEXEC)
            rule = _PathRule(rights if os.path.isdir(place) else rights & ~_READ_FOLDER, parent)
            added = call(_ADD_RULE, ruleset, _BENEATH, ctypes.addressof(rule), 0)
            os.close(parent)
            if added:
                raise OSError(ctypes.get_errno(), f"landlock_add_rule: {place}")
    if net and access.port is not None:
        of_port = (ctypes.c_uint64 * 2)(_CONNECT, access.port)
        call(_ADD_RULE, ruleset, _NET_PORT, ctypes.addressof(of_port), 0)
    return ruleset


def filter_without_processes() -> bytes:
    """A filter of the system calls that start a process or open a socket; empty on a machine whose numbers are not
    known.

    Threads are allowed. clone3 hides its flags from filters: without it glibc takes clone.
    """
    if _CALLS is None:
        return b""
    permission, missing = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    return _filter(
        _CALLS,
        (*_CALLS.forks, _CALLS.socket),
        [
            (_EQUAL, 0, 1, _CALLS.clone3), (_RETURN, 0, 0, missing), (_EQUAL, 0, 3, _CALLS.clone),
            (_LOAD, 0, 0, _ARGUMENTS[0]), (_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, permission),
        ],
    )  # fmt: skip


def filter_of_sockets() -> bytes:
    """A filter under which all sockets are of TCP, which Landlock has rules for; empty as in
    `filter_without_processes`."""
    if _CALLS is None:
        return b""
    domain, kind, protocol = _ARGUMENTS
    permission = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    return _filter(
        _CALLS,
        (),
        [
            (_EQUAL, 0, 12, _CALLS.socket),
            (_LOAD, 0, 0, domain), (_EQUAL, 2, 0, 2), (_EQUAL, 1, 0, 10), permission,  # AF_INET, AF_INET6
            (_LOAD, 0, 0, kind), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, 1), permission,  # SOCK_STREAM
            (_LOAD, 0, 0, protocol), (_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, 6), permission,  # IPPROTO_TCP: not MPTCP
        ],
    )  # fmt: skip


def _filter(calls: _Calls, refused: Sequence[int], more: _Steps) -> bytes:
    permission = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    if landlock_version() < 3:  # it has no right of its own to be refused
        refused = (*refused, calls.truncate)
    steps: _Steps = [
        (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, calls.architecture), permission,
        (_LOAD, 0, 0, _CALL), (_AT_LEAST, 0, 1, 0x40000000), permission,  # other numbers of x86-64
    ]  # fmt: skip
    for number in (*refused, calls.io_uring):
        steps += [(_EQUAL, 0, 1, number), permission]
    steps += [*more, (_RETURN, 0, 0, _ALLOW)]
    return bytes((_Step * len(steps))(*(_Step(*step) for step in steps)))
