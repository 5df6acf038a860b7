"""Sandboxes for programs that nobody has read: bubblewrap or Landlock, what of them works on this machine, and how a
program is started in them.

bubblewrap gives files, processes and a network of their own, which holds nothing but a loopback interface. What the
program may reach there is a socket that `first_in_jail.py` makes inside and hands to the trainer, which accepts on it:
nothing is forwarded, and no other port of the host exists. Landlock has rules for the same files and for ports of TCP,
without a view of its own: names of files and the clock of processes stay visible, and what a program starts in another
session may outlive it.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from glm46.config.errors import UserError
from glm46.files.local_disk import real_path
from glm46.storage.prepare import first_in_jail
from glm46.storage.prepare.landlock import Access, filter_of_sockets, landlock_version, limited_start

NO_JAIL, LANDLOCK, BUBBLEWRAP = "none", "landlock", "bubblewrap"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", *(f"/etc/{name}" for name in (
    "alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "mime.types", "nsswitch.conf", "passwd", "pki", "resolv.conf", "ssl",
)))  # fmt: skip
_TEMPORARY_BYTES = 2**30
_PROBE_SECONDS = 20.0


class JailedStart(NamedTuple):
    """The start of a program in a sandbox."""

    words: list[str]
    before: Callable[[], None]
    """Called in the process before it becomes the program."""
    descriptors: tuple[int, ...]
    """That the process inherits."""
    channel: socket.socket | None
    """Gives the listening socket of the program's own network; None if it has the host's."""


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
    with ExitStack() as stack:
        if jail != BUBBLEWRAP:
            is_under = jail == LANDLOCK
            if filter_ is None:
                filter_ = filter_of_sockets() if is_under and not access.has_network else b""
            shown = access._replace(readable=(*_SYSTEM, *access.readable)) if is_under else None
            before = stack.enter_context(limited_start(most, filter_, folder, shown))
            yield JailedStart(list(words), before, (), None)
            return
        before = stack.enter_context(limited_start(most, b""))
        given, options = [], []
        if filter_:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(filter_)
            file.seek(0)
            given, options = [file.fileno()], ["--seccomp", str(file.fileno())]
        channel, inner = None, list(words)
        if filter_ is None:  # it may start processes
            port, descriptor = 0, -1
            if access.port is not None and not access.has_network:
                channel, theirs = (stack.enter_context(one) for one in socket.socketpair())
                port, descriptor = access.port, theirs.fileno()
                given.append(descriptor)
            inner = [sys.executable, "-I", "-S", first_in_jail.__file__, str(port), str(descriptor), *words]
            access = access._replace(readable=(*access.readable, *places_of(inner[:4])))
        outer = [*_bubblewrap(folder, access), *options, "--", *inner]
        yield JailedStart(outer, before, tuple(given), channel)


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
        found += (
            [prefix / name for name in ("bin", "lib", "lib64", "libexec", "pyvenv.cfg")] if is_installed else [path]
        )
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
def has_bubblewrap() -> bool:
    """True if it starts a Python here. Many containers have no user namespaces."""
    words = [sys.executable, "-I", "-S", "-c", "pass"]
    with (
        tempfile.TemporaryDirectory() as folder,
        jailed(BUBBLEWRAP, words, folder, Access()) as start,
        suppress(OSError, subprocess.TimeoutExpired),
    ):
        ended = subprocess.run(
            start.words, preexec_fn=start.before, pass_fds=start.descriptors, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_PROBE_SECONDS,
        )  # fmt: skip
        return ended.returncode == 0
    return False


def jail_of_programs() -> str:
    """The sandbox for programs that start others and connect to the policy: that with most of its own."""
    return BUBBLEWRAP if has_bubblewrap() else jail_of_code()


def jail_of_code() -> str:
    """The sandbox for programs that start none and connect to nothing: there Landlock, which costs nothing, holds as
    much as bubblewrap does."""
    return LANDLOCK if landlock_version() else BUBBLEWRAP if has_bubblewrap() else NO_JAIL


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
