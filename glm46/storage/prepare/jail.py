"""Sandboxes for programs that nobody has read: bubblewrap or Landlock, what of them works on this machine, and how a
program is started in them.

bubblewrap gives files, processes and a network of their own, which holds nothing but a loopback interface. What the
program may reach there is a socket that `first_program.py` makes inside and hands to the trainer, which accepts on it:
nothing is forwarded, and no other port of the host exists. Landlock has rules for the same files and for ports of TCP,
without a view of its own: names of files and the clock of processes stay visible, and what a program starts in another
session may outlive it.
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
from glm46.storage.prepare import first_program
from glm46.storage.prepare.landlock import (
    Access,
    filter_of_sockets,
    filter_without_processes,
    landlock_version,
    ruleset_of,
)

NO_JAIL, LANDLOCK, BUBBLEWRAP = "none", "landlock", "bubblewrap"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", *(f"/etc/{name}" for name in (
    "alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "mime.types", "nsswitch.conf", "passwd", "pki", "resolv.conf", "ssl",
)))  # fmt: skip
_TEMPORARY_BYTES, _MOST_PROCESSES = 2**30, 1024
_PROBE_SECONDS = 20.0
_SHOWN = "; its sandbox shows system folders, Python and rl.environment.allow"
FIRST_FOLDER = "/"
"""Where programs are started; `Limits.folder` is where they run."""


class JailedStart(NamedTuple):
    """The start of a program in a sandbox."""

    words: list[str]
    descriptors: list[int]
    """That the process inherits."""
    channel: socket.socket | None
    """Gives the listening socket of the program's own network; None if it has the host's."""


class Limits(TypedDict):
    """Limits that `first_program.py` takes on."""

    folder: str
    """Of the program. Its first program is started elsewhere: the loader of libraries looks into the current folder if
    LD_LIBRARY_PATH has an empty element, and there it would do so without limits."""
    remedy: str
    """Behind the reason why a program cannot be executed."""
    parent: int
    """The process that the program ends with, to be precise with the thread of it that started it; 0: bubblewrap."""
    most: list[tuple[int, int]]
    """Limits of `resource`."""
    filter: str
    """Of system calls, in hexadecimal."""
    ruleset: int
    """Descriptor of Landlock's rules, or -1."""
    port: int
    """Of the socket to make and to send through a channel, or 0."""
    channel: int
    """Descriptor."""


@contextmanager
def jailed(
    jail: str,
    words: Sequence[str],
    folder: str,
    access: Access,
    most: Sequence[tuple[int, int]] = (),
    filter_: bytes | None = None,
) -> Iterator[JailedStart]:
    """The start of a program in a sandbox; the context lasts while it is started.

    Args:
        jail: `NO_JAIL`, `LANDLOCK` or `BUBBLEWRAP`.
        folder: where it runs, and what it may write.
        access: what else it may read, and connect to.
        most: limits of `resource`.
        filter_: of system calls; None: what the sandbox needs, for programs that start others.
    """
    limits: Limits = {
        "folder": folder, "remedy": "" if jail == NO_JAIL else _SHOWN, "parent": os.getpid(), "most": [*most],
        "filter": "", "ruleset": -1, "port": 0, "channel": -1,
    }  # fmt: skip
    given, channel = [], None
    with ExitStack() as stack:
        if jail == LANDLOCK:
            limits["ruleset"] = ruleset_of(folder, access._replace(readable=(*_SYSTEM, *access.readable)))
            stack.callback(os.close, limits["ruleset"])
            given.append(limits["ruleset"])
            if filter_ is None and not access.has_network:
                filter_ = filter_of_sockets()
        elif jail == BUBBLEWRAP:
            limits["parent"] = 0
            if filter_ is None:
                limits["most"].append((resource.RLIMIT_NPROC, _MOST_PROCESSES))
                if access.port is not None and not access.has_network:
                    channel, theirs = (stack.enter_context(one) for one in socket.socketpair())
                    limits["port"], limits["channel"] = access.port, theirs.fileno()
                    given.append(limits["channel"])
        limits["filter"] = (filter_ or b"").hex()
        inner = [sys.executable, "-I", "-S", first_program.__file__, json.dumps(limits), *words]
        if jail == BUBBLEWRAP:
            access = access._replace(readable=(*access.readable, *places_of(inner[:4])))
            inner = [*_bubblewrap(folder, access), "--", *inner]
        yield JailedStart(inner, given, channel)


def _bubblewrap(folder: str, access: Access) -> list[str]:
    """The words that start a program in bubblewrap, without its own."""
    places = {place: ["--ro-bind-try", place, place] for place in (*_SYSTEM, *access.readable)}
    places |= {"/proc": ["--proc", "/proc"], "/dev": ["--dev", "/dev"]}
    places |= {"/tmp": ["--size", str(_TEMPORARY_BYTES), "--tmpfs", "/tmp"]}
    shown = [word for place in sorted(places) for word in places[place]]  # a folder before what is in it
    network = ["--share-net"] if access.has_network else []
    return [
        shutil.which("bwrap") or "bwrap", "--unshare-all", *network, "--die-with-parent", "--cap-drop", "ALL", *shown,
        "--bind", folder, folder, "--chdir", folder,
    ]  # fmt: skip


def places_of(words: Sequence[str], variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Files and folders that a command needs: its program, Python, the folders of the files among its words, and those
    of variables with paths of libraries. Never a folder that holds this user's home or the current one."""
    program = shutil.which(words[0]) or words[0]
    found = [Path(sys.prefix), Path(sys.base_prefix)]
    for path in (Path(program), real_path(program)):
        prefix = path.parent.parent
        is_installed = path.parent.name == "bin" and (prefix / "lib").is_dir()
        is_shim = path.parent.name == "shims" and not _is_private(prefix)  # pyenv's script asks a program beside it
        installed = [prefix / name for name in ("bin", "lib", "lib64", "libexec", "pyvenv.cfg")]
        found += installed if is_installed else [prefix if is_shim else path]
    for word in words[1:]:
        if "/" in word and os.path.exists(word):
            path = Path(word).absolute()
            found += [path, real_path(path)] if _is_private(path.parent) else [path.parent, real_path(path).parent]
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"):
        found += [Path(place) for place in (variables or {}).get(name, "").split(":") if place]
    return tuple(dict.fromkeys(str(path.absolute()) for path in found))


def _is_private(folder: Path) -> bool:
    """True if a folder holds more than a program of one would need."""
    return any(place.is_relative_to(folder) for place in (Path.home(), Path.cwd(), Path(tempfile.gettempdir())))


@cache
def _starts(jail: str) -> bool:
    """True if a Python starts here with the limits of programs and of code."""
    words = [sys.executable, "-I", "-S", "-c", "pass"]
    return _ends_well(jail, words, None) and _ends_well(jail, words, filter_without_processes())


def _ends_well(jail: str, words: Sequence[str], filter_: bytes | None) -> bool:
    with (
        tempfile.TemporaryDirectory() as folder,
        jailed(jail, words, folder, Access(places_of(words)), filter_=filter_) as start,
        suppress(OSError, subprocess.TimeoutExpired),
    ):
        ended = subprocess.run(
            start.words, cwd=FIRST_FOLDER, pass_fds=start.descriptors, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_PROBE_SECONDS,
        )  # fmt: skip
        return ended.returncode == 0
    return False


def has_bubblewrap() -> bool:
    """True if it works here. Many containers have no user namespaces."""
    return _starts(BUBBLEWRAP)


def jail_of_programs() -> str:
    """The sandbox for programs that start others and connect to the policy: that with most of its own."""
    return BUBBLEWRAP if has_bubblewrap() else jail_of_code()


def jail_of_code() -> str:
    """The sandbox for programs that start none and connect to nothing: there Landlock, which costs nothing, holds as
    much as bubblewrap does."""
    if landlock_version() and _starts(LANDLOCK):
        return LANDLOCK
    if has_bubblewrap():
        return BUBBLEWRAP
    if not _starts(NO_JAIL):  # a fault of this machine would count as one of each program
        raise UserError("programs that nobody has read: this machine refuses their limits (seccomp); take another one")
    return NO_JAIL


def require_jail(jail: str, key: str, sandbox: object) -> None:
    """
    Raises:
        UserError: a sandbox is required, and none works here.
    """
    if sandbox == "required" and jail == NO_JAIL:
        raise UserError(
            f'{key} = "required": neither bubblewrap starts here nor has the kernel Landlock (Linux 5.13); install '
            'bubblewrap, allow user namespaces, or set it to "auto"'
        )


def describe_jail(jail: str) -> str:
    """One line on what holds the programs."""
    version = landlock_version()
    ports = "TCP by port" if version >= 4 else "the network is open"
    signals = "" if version >= 6 else "; they may signal processes of this user"
    return {
        BUBBLEWRAP: "bubblewrap: files, processes and network of their own",
        LANDLOCK: f"Landlock {version} and seccomp: files, {ports}{signals}; without bubblewrap",
        NO_JAIL: "none: they read and write files and use the network as this user; install bubblewrap",
    }[jail]
