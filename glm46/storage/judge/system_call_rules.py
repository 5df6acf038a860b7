"""Tables of system calls that are refused to untrusted programs, each with its reason.

The tables are the whole policy: calls that no table names are allowed.
"""

import errno
from enum import Enum
from typing import NamedTuple

_NEW_NAMESPACES = 0x7E020000
"""All flags CLONE_NEW* of clone(2), except CLONE_NEWTIME, which clone does not accept."""
_CLONE_THREAD = 0x00010000
_MSG_FASTOPEN = 0x20000000
_PRIO_PROCESS = 0
_IOPRIO_WHO_PROCESS = 1
_FS_IOC_SETFLAGS = 0x40086602
_FS_IOC_FSSETXATTR = 0x401C5820
_AF_INET = 2
_AF_INET6 = 10
_SOCK_STREAM = 1
_SOCK_TYPES = 0xF
_IPPROTO_TCP = 6


class ArgumentTest(Enum):
    """A comparison of the value of an argument."""

    IS_NONE_OF = "is not one of the values"
    IS_ONE_OF = "is one of the values"
    HAS_ANY_BIT = "has a bit of the value"
    HAS_NO_BIT = "has no bit of the value"


class ArgumentCondition(NamedTuple):
    """Refuses a call if the comparison holds.

    Only the lower 32 bits of the argument are compared: the kernel uses only these of each argument named in this file.
    """

    argument: int
    """Index of the argument, from 0."""
    test: ArgumentTest
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    """Bits of the argument that are compared."""


class CallRule(NamedTuple):
    """A system call that is refused, always or under conditions."""

    name: str
    x86_64: int | None
    """Number of the call, from asm/unistd.h; None if the architecture does not have it."""
    aarch64: int | None
    reason: str
    """Reason for the refusal."""
    conditions: tuple[ArgumentCondition, ...] = ()
    """The call is refused if any of them holds. Without conditions it is always refused."""
    error: int = errno.EPERM
    """Error code that the program receives."""


def _only(argument: int, *values: int, mask: int = 0xFFFFFFFF) -> ArgumentCondition:
    """Refuse a call unless an argument has one of the values."""
    return ArgumentCondition(argument, ArgumentTest.IS_NONE_OF, values, mask)


_ONLY_ITSELF = (_only(0, 0),)
"""For calls whose first argument is a process; 0 is the caller."""
_CHANGES_OTHERS = "changes another process of this user, which Landlock does not refuse"
_OUTLIVES = "is kept by the kernel after the program has ended, outside its memory limit, and is seen by the next one"
_KEYS = "reads and writes keys of this user, which outlive the program"
_NAMESPACES = "gives capabilities in new namespaces"
_FILE_OF_USER = "changes a file that the program may only read"
_FAST_OPEN = "connects to any port, which Landlock's rule of ports does not see"

EVERYWHERE = (
    CallRule("pidfd_getfd", 438, 438, "takes descriptors of another process, such as its standard output"),
    CallRule("add_key", 248, 217, _KEYS),
    CallRule("request_key", 249, 218, _KEYS),
    CallRule("keyctl", 250, 219, _KEYS),
    CallRule("perf_event_open", 298, 241, "measures other processes"),
)
"""Refused in every sandbox, bubblewrap included."""

WITHOUT_NAMESPACES = (
    CallRule("prlimit64", 302, 261, _CHANGES_OTHERS, _ONLY_ITSELF),
    CallRule("sched_setaffinity", 203, 122, _CHANGES_OTHERS, _ONLY_ITSELF),
    CallRule("sched_setscheduler", 144, 119, _CHANGES_OTHERS, _ONLY_ITSELF),
    CallRule("sched_setparam", 142, 118, _CHANGES_OTHERS, _ONLY_ITSELF),
    CallRule("sched_setattr", 314, 274, _CHANGES_OTHERS, _ONLY_ITSELF),
    CallRule("setpriority", 141, 140, _CHANGES_OTHERS, (_only(0, _PRIO_PROCESS), _only(1, 0))),
    CallRule("ioprio_set", 251, 30, _CHANGES_OTHERS, (_only(0, _IOPRIO_WHO_PROCESS), _only(1, 0))),
    CallRule("shmget", 29, 194, _OUTLIVES),
    CallRule("shmat", 30, 196, _OUTLIVES),
    CallRule("shmctl", 31, 195, _OUTLIVES),
    CallRule("semget", 64, 190, _OUTLIVES),
    CallRule("semop", 65, 193, _OUTLIVES),
    CallRule("semtimedop", 220, 192, _OUTLIVES),
    CallRule("semctl", 66, 191, _OUTLIVES),
    CallRule("msgget", 68, 186, _OUTLIVES),
    CallRule("msgsnd", 69, 189, _OUTLIVES),
    CallRule("msgrcv", 70, 188, _OUTLIVES),
    CallRule("msgctl", 71, 187, _OUTLIVES),
    CallRule("mq_open", 240, 180, _OUTLIVES),
    CallRule("mq_unlink", 241, 181, _OUTLIVES),
    CallRule("unshare", 272, 97, _NAMESPACES),
    CallRule("setns", 308, 268, _NAMESPACES),
    CallRule("clone", 56, 220, _NAMESPACES, (ArgumentCondition(0, ArgumentTest.HAS_ANY_BIT, (_NEW_NAMESPACES,)),)),
    CallRule("clone3", 435, 435, "hides its flags from filters; without it glibc takes clone", (), errno.ENOSYS),
    CallRule("io_uring_setup", 425, 425, "opens sockets without a call of its own"),
)
"""Refused where no namespaces hide the processes and queues of the host: under Landlock, and to judged code."""

TCP_BY_PORT = (
    CallRule(
        "socket",
        41,
        198,
        "opens what Landlock has no rule for: UDP, Unix, MPTCP and others",
        (_only(0, _AF_INET, _AF_INET6), _only(1, _SOCK_STREAM, mask=_SOCK_TYPES), _only(2, 0, _IPPROTO_TCP)),
    ),
    CallRule("sendto", 44, 206, _FAST_OPEN, (ArgumentCondition(3, ArgumentTest.HAS_ANY_BIT, (_MSG_FASTOPEN,)),)),
    CallRule("sendmsg", 46, 211, _FAST_OPEN, (ArgumentCondition(2, ArgumentTest.HAS_ANY_BIT, (_MSG_FASTOPEN,)),)),
    CallRule("sendmmsg", 307, 269, _FAST_OPEN, (ArgumentCondition(3, ArgumentTest.HAS_ANY_BIT, (_MSG_FASTOPEN,)),)),
    CallRule("listen", 50, 201, "opens a port of all addresses without bind, which Landlock does not see"),
)
"""Refused under Landlock to programs that may not use the network: what Landlock's port rules do not cover."""

FILE_ATTRIBUTES = (
    CallRule("chmod", 90, None, _FILE_OF_USER),
    CallRule("fchmod", 91, 52, _FILE_OF_USER),
    CallRule("fchmodat", 268, 53, _FILE_OF_USER),
    CallRule("fchmodat2", 452, 452, _FILE_OF_USER),
    CallRule("chown", 92, None, _FILE_OF_USER),
    CallRule("fchown", 93, 55, _FILE_OF_USER),
    CallRule("lchown", 94, None, _FILE_OF_USER),
    CallRule("fchownat", 260, 54, _FILE_OF_USER),
    CallRule("utime", 132, None, _FILE_OF_USER),
    CallRule("utimes", 235, None, _FILE_OF_USER),
    CallRule("futimesat", 261, None, _FILE_OF_USER),
    CallRule("utimensat", 280, 88, _FILE_OF_USER),
    CallRule("setxattr", 188, 5, _FILE_OF_USER),
    CallRule("lsetxattr", 189, 6, _FILE_OF_USER),
    CallRule("fsetxattr", 190, 7, _FILE_OF_USER),
    CallRule("setxattrat", 463, 463, _FILE_OF_USER),
    CallRule("removexattr", 197, 14, _FILE_OF_USER),
    CallRule("lremovexattr", 198, 15, _FILE_OF_USER),
    CallRule("fremovexattr", 199, 16, _FILE_OF_USER),
    CallRule("removexattrat", 466, 466, _FILE_OF_USER),
    CallRule("file_setattr", 469, 469, _FILE_OF_USER),
    CallRule(
        "ioctl",
        16,
        29,
        _FILE_OF_USER,
        (ArgumentCondition(1, ArgumentTest.IS_ONE_OF, (_FS_IOC_SETFLAGS, _FS_IOC_FSSETXATTR)),),
    ),
)
"""Changes of modes, owners, times and attributes of files, which Landlock cannot refuse."""

JUDGED_CODE = (
    CallRule("fork", 57, None, "starts a process"),
    CallRule("vfork", 58, None, "starts a process"),
    CallRule(
        "clone",
        56,
        220,
        "starts a process, unless it starts a thread",
        (ArgumentCondition(0, ArgumentTest.HAS_NO_BIT, (_CLONE_THREAD,)),),
    ),
    CallRule("socket", 41, 198, "opens a connection"),
    CallRule("listen", 50, 201, "opens a port"),
    CallRule("ptrace", 101, 117, "reads and writes the memory of another process"),
    CallRule("process_vm_readv", 310, 270, "reads the memory of another process"),
    CallRule("process_vm_writev", 311, 271, "writes the memory of another process"),
)
"""Refused to judged code, which starts no process and opens no connection."""

TRUNCATE = CallRule("truncate", 76, 45, "Landlock cannot refuse it before version 3")
