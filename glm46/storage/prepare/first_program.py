"""The program that a limited process runs first: it takes on the limits, and becomes the program that is to have them.

A trainer cannot do so between fork and exec: it has threads, and Python that runs in such a child has ended by SIGSEGV.
A script that imports the standard library alone.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

_DIE_WITH_PARENT, _DROP_CAPABILITY, _NO_NEW_PRIVILEGES, _SECCOMP, _SECCOMP_FILTER = 1, 24, 38, 22, 2  # of prctl
_MOST_CAPABILITIES = 64
_RESTRICT_SELF = 446  # system call of Landlock, on each architecture


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def main() -> None:
    """Arguments: `Limits` of jail.py as JSON, and the words of the program."""
    limits, words = json.loads(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    libc.syscall.argtypes = [ctypes.c_long] * 4
    if limits["parent"]:
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != limits["parent"]:
            sys.exit("the process that started this one has ended")
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first that the kernel kills when memory is short
    if limits["port"]:
        with (
            socket.create_server(("127.0.0.1", limits["port"])) as listener,
            socket.socket(fileno=limits["channel"]) as trainer,
        ):
            socket.send_fds(trainer, [b"1"], [listener.fileno()])
    for what, value in limits["most"]:
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    if limits["ruleset"] >= 0:
        for capability in range(_MOST_CAPABILITIES):  # of root; bubblewrap drops them itself
            libc.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
        _check(libc.syscall(_RESTRICT_SELF, limits["ruleset"], 0, 0))
        os.close(limits["ruleset"])
    if steps := bytes.fromhex(limits["filter"]):
        program = _Filter(len(steps) // 8, steps)
        _check(libc.prctl(_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(program), 0, 0))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and then by what it becomes
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.chdir(limits["folder"])
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}{limits['remedy']}")


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "this kernel refuses the limits of the sandbox")


if __name__ == "__main__":
    main()
