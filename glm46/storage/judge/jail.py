"""Sandboxes for untrusted programs: bubblewrap or Landlock, whether they work on this machine, and how to start a
program in them.

Bubblewrap gives a program separate namespaces for files, processes and the network, which has only a loopback
interface. All that the program can reach there is a socket that `first_program.py` creates inside and passes to the
trainer, which accepts on it: nothing is forwarded, and no other port of the host exists. Landlock has rules for the
same files and for TCP ports, but no namespaces: file names and process times stay visible, and a process that the
program starts in another session may outlive it. A filter of system calls (`system_calls.py`) refuses what Landlock has
no rules for, except changes of modes and times of files, which programs such as git need.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypedDict

from glm46.config.errors import UserError
from glm46.files.local_disk import real_path
from glm46.files.scratch import scratch_folder
from glm46.storage.judge import first_program
from glm46.storage.judge.landlock import Access, landlock_version, ruleset_of
from glm46.storage.judge.system_calls import bubblewrap_filter, code_filter, landlock_filter

NO_JAIL = "none"
LANDLOCK = "landlock"
BUBBLEWRAP = "bubblewrap"
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/nix/store",
    *(
        f"/etc/{name}"
        for name in (
            "alternatives",
            "ca-certificates",
            "group",
            "hosts",
            "ld.so.cache",
            "ld.so.conf",
            "ld.so.conf.d",
            "localtime",
            "mime.types",
            "nsswitch.conf",
            "passwd",
            "pki",
            "resolv.conf",
            "ssl",
        )
    ),
)
_TEMPORARY_BYTES = 2**30
_MOST_PROCESSES = 1024
_PROBE_SECONDS = 20.0
_SHOWN = "; its sandbox shows system folders, Python and rl.environment.allow"
_LANDLOCK_WITH_PORTS = 4
"""Linux 6.7."""
_COMPLETE_LANDLOCK = 6
"""Linux 6.12: files, ports and signals."""
FIRST_FOLDER = "/"
"""Folder in which programs are started; they run in `Limits.folder`."""


class JailedStart(NamedTuple):
    """The start of a program in a sandbox."""

    words: list[str]
    descriptors: list[int]
    """Descriptors that the process inherits."""
    channel: socket.socket | None
    """Socket that receives the listening socket of the program's own network; None if it uses the network of the
    host."""


class Limits(TypedDict):
    """Limits that `first_program.py` applies to itself."""

    folder: str
    """Folder of the program. `first_program.py` is started elsewhere: if LD_LIBRARY_PATH has an empty element, the
    dynamic linker searches the current folder, and would load libraries from there without limits."""
    remedy: str
    """Text after the reason why a program cannot be executed."""
    parent: int
    """Process whose end kills the program, more precisely the end of the thread that started it; 0: bubblewrap does
    this."""
    most: list[tuple[int, int]]
    """Limits of `resource`: kind and value."""
    filter: str
    """Filter of system calls, in hexadecimal."""
    ruleset: int
    """Descriptor of the Landlock ruleset, or -1."""
    port: int
    """Port of the socket to create and send through the channel, or 0."""
    channel: int
    """Descriptor of the channel."""


@contextmanager
def jailed(
    jail: str,
    words: Sequence[str],
    folder: str,
    access: Access,
    most: Sequence[tuple[int, int]] = (),
    filter_: bytes | None = None,
) -> Iterator[JailedStart]:
    """Prepare the start of a program in a sandbox; the context is needed until the program is started.

    Args:
        jail: `NO_JAIL`, `LANDLOCK` or `BUBBLEWRAP`.
        folder: folder in which the program runs, and which it may write.
        access: what it may read and connect to in addition.
        most: limits of `resource`.
        filter_: filter of system calls; None: the filter that the sandbox needs, for programs that start others.
    """
    limits: Limits = {
        "folder": folder,
        "remedy": "" if jail == NO_JAIL else _SHOWN,
        "parent": os.getpid(),
        "most": [*most],
        "filter": "",
        "ruleset": -1,
        "port": 0,
        "channel": -1,
    }
    descriptors: list[int] = []
    channel = None
    with ExitStack() as stack:
        if jail == LANDLOCK:
            limits["ruleset"] = ruleset_of(folder, access._replace(readable=(*_SYSTEM, *access.readable)))
            stack.callback(os.close, limits["ruleset"])
            descriptors.append(limits["ruleset"])
        elif jail == BUBBLEWRAP:
            limits["parent"] = 0
            if filter_ is None:
                limits["most"].append((resource.RLIMIT_NPROC, _MOST_PROCESSES))
                if access.port is not None and not access.has_network:
                    channel, program_end = socket.socketpair()
                    stack.enter_context(channel)
                    stack.enter_context(program_end)
                    limits["port"] = access.port
                    limits["channel"] = program_end.fileno()
                    descriptors.append(limits["channel"])
        if filter_ is None:
            filter_ = _filter_of_programs(jail, access)
        limits["filter"] = filter_.hex()
        command = [sys.executable, "-I", "-S", first_program.__file__, json.dumps(limits), *words]
        if jail == BUBBLEWRAP:
            access = access._replace(readable=(*access.readable, *places_of(command[:4])))
            command = [*_bubblewrap(folder, access), "--", *command]
        yield JailedStart(command, descriptors, channel)


def _filter_of_programs(jail: str, access: Access) -> bytes:
    """Return the filter of system calls for programs that start others: it refuses what the sandbox itself does not."""
    if jail == BUBBLEWRAP:
        return bubblewrap_filter()
    if jail == LANDLOCK:
        return landlock_filter(
            landlock_version(), has_network=access.has_network, may_change_modes=access.may_change_modes
        )
    return b""


def filter_of_code() -> bytes:
    """Return the filter of system calls for judged code, which is the same in each sandbox and without one."""
    return code_filter(landlock_version())


def _bubblewrap(folder: str, access: Access) -> list[str]:
    """Return the bubblewrap command that a program's own words follow."""
    places = {place: ["--ro-bind-try", place, place] for place in (*_SYSTEM, *access.readable)}
    places |= {"/proc": ["--proc", "/proc"], "/dev": ["--dev", "/dev"]}
    places |= {"/tmp": ["--size", str(_TEMPORARY_BYTES), "--tmpfs", "/tmp"]}
    shown = [word for place in sorted(places) for word in places[place]]  # a folder before its content
    network = ["--share-net"] if access.has_network else []
    return [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        *network,
        "--die-with-parent",
        "--cap-drop",
        "ALL",
        *shown,
        "--bind",
        folder,
        folder,
        "--chdir",
        folder,
    ]


def places_of(words: Sequence[str], variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return files and folders that a command needs: its program, Python, the folders of files among its words, and
    folders in variables with library paths. It never adds a folder that contains the user's home or the current
    folder."""
    program = shutil.which(words[0]) or words[0]
    paths = [Path(sys.prefix), Path(sys.base_prefix)]
    for path in (Path(program), real_path(program)):
        prefix = path.parent.parent
        is_installed = path.parent.name == "bin" and (prefix / "lib").is_dir()
        is_shim = path.parent.name == "shims" and not _is_private(prefix)  # pyenv's script calls a program next to it
        installed = [prefix / name for name in ("bin", "lib", "lib64", "libexec", "pyvenv.cfg")]
        paths += installed if is_installed else [prefix if is_shim else path]
    for word in words[1:]:
        if "/" in word and os.path.exists(word):
            path = Path(word).absolute()
            paths += [path, real_path(path)] if _is_private(path.parent) else [path.parent, real_path(path).parent]
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"):
        paths += [Path(place) for place in (variables or {}).get(name, "").split(":") if place]
    return tuple(dict.fromkeys(str(path.absolute()) for path in paths))


def _is_private(folder: Path) -> bool:
    """Return True if a folder contains the home, current or temporary folder, which a program must not read as a
    whole."""
    return any(place.is_relative_to(folder) for place in (Path.home(), Path.cwd(), Path(tempfile.gettempdir())))


@cache
def _starts(jail: str) -> bool:
    """Return True if Python starts in a sandbox on this machine, with the limits of programs and of code."""
    words = [sys.executable, "-I", "-S", "-c", "pass"]
    return _ends_well(jail, words, None) and _ends_well(jail, words, filter_of_code())


def _ends_well(jail: str, words: Sequence[str], filter_: bytes | None) -> bool:
    with (
        scratch_folder() as folder,
        jailed(jail, words, folder, Access(places_of(words)), filter_=filter_) as start,
        suppress(OSError, subprocess.TimeoutExpired),
    ):
        completed = subprocess.run(
            start.words,
            cwd=FIRST_FOLDER,
            pass_fds=start.descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
        )
        return completed.returncode == 0
    return False


def has_bubblewrap() -> bool:
    """Return True if bubblewrap works on this machine. Many containers have no user namespaces."""
    return _starts(BUBBLEWRAP)


def jail_of_code() -> str:
    """Return the sandbox for judged code, which starts no program and connects to nothing: bubblewrap where it works,
    else Landlock where the kernel has it.

    Raises:
        UserError: not even a filter of system calls can be installed.
    """
    if has_bubblewrap():
        return BUBBLEWRAP
    if landlock_version() and _starts(LANDLOCK):
        return LANDLOCK
    if not _starts(NO_JAIL):  # otherwise a fault of this machine would count as a fault of each program
        raise UserError("programs that nobody has read: this machine refuses their limits (seccomp); take another one")
    return NO_JAIL


def jail_of_programs() -> str:
    """Return the sandbox for programs that start others and connect to the policy: the same as for judged code."""
    return jail_of_code()


def require_jail(jail: str, key: str, sandbox: object) -> None:
    """Check that a required sandbox restricts files, connections and signals.

    Raises:
        UserError: a sandbox is required, and none works here, or only an old Landlock.
    """
    if sandbox != "required" or jail == BUBBLEWRAP:
        return
    if jail == NO_JAIL:
        fault = "neither bubblewrap starts here nor has the kernel Landlock"
    elif landlock_version() < _COMPLETE_LANDLOCK:
        fault = f"bubblewrap does not start here, and in this kernel {'; '.join(_gaps_of_landlock())}"
    else:
        return
    raise UserError(
        f'{key} = "required": {fault}; install bubblewrap and allow user namespaces, take Linux 6.12 or newer, or set '
        'it to "auto"'
    )


def describe_jail(jail: str, *, keeps_modes: bool = False) -> str:
    """Describe in one line what restricts the programs, and what does not.

    Args:
        keeps_modes: the filter of system calls refuses changes of modes, owners and times.
    """
    if jail == BUBBLEWRAP:
        return "bubblewrap: files, processes and network of their own"
    if jail == NO_JAIL:
        return "none: they read and write files, end processes and use the network as this user; install bubblewrap"
    gaps = _gaps_of_landlock()
    if not keeps_modes:
        gaps.append("they may change modes and times of files of this user")
    not_held = "".join(f"; {gap}" for gap in gaps)
    return f"Landlock {landlock_version()} and seccomp, without bubblewrap: files, TCP by port, processes{not_held}"


def _gaps_of_landlock() -> list[str]:
    """Return the restrictions that the Landlock version of this kernel is too old for."""
    gaps = []
    if landlock_version() < _LANDLOCK_WITH_PORTS:
        gaps.append("the network is open to programs that are not judged code")
    if landlock_version() < _COMPLETE_LANDLOCK:
        gaps.append("they may signal processes of this user")
    return gaps
