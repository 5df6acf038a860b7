"""Bootstrap of a limited process: applies the limits to itself, then executes the target program.

A trainer cannot do this between fork and exec: it has threads, and Python in such a child has crashed with SIGSEGV.
This script imports only the standard library.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

# Options of prctl.
_DIE_WITH_PARENT = 1
_DROP_CAPABILITY = 24
_NO_NEW_PRIVILEGES = 38
_SECCOMP = 22
_SECCOMP_FILTER = 2
_MOST_CAPABILITIES = 64
_RESTRICT_SELF = 446  # system call of Landlock, on each architecture


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def main() -> None:
    """Apply the limits and execute the program. Arguments: `Limits` of jail.py as JSON, and the words of the
    program."""
    limits = json.loads(sys.argv[1])
    words = sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    libc.syscall.argtypes = [ctypes.c_long] * 4
    if limits["parent"]:
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != limits["parent"]:
            sys.exit("the process that started this one has ended")
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first process that the kernel kills when memory is short
    if limits["port"]:
        with (
            socket.create_server(("127.0.0.1", limits["port"])) as listener,
            socket.socket(fileno=limits["channel"]) as trainer,
        ):
            socket.send_fds(trainer, [b"1"], [listener.fileno()])
    for kind, value in limits["most"]:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    if limits["ruleset"] >= 0:
        for capability in range(_MOST_CAPABILITIES):  # capabilities of root; bubblewrap drops them itself
            libc.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
        _check(libc.syscall(_RESTRICT_SELF, limits["ruleset"], 0, 0))
        os.close(limits["ruleset"])
    if steps := bytes.fromhex(limits["filter"]):
        program = _Filter(len(steps) // 8, steps)
        _check(libc.prctl(_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(program), 0, 0))
    for signal_number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores them, and the executed program would inherit that
        signal.signal(signal_number, signal.SIG_DFL)
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
