"""Temporary folders for untrusted programs. Their removal never raises, whatever a program put there."""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NamedTuple

_MAX_ROUNDS = 10
_MAX_LEVELS = 64
"""Maximum number of open folders while nested folders are emptied."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch_folder(seconds: float | None = None) -> Iterator[str]:
    """Make an empty temporary folder, and remove it at the end of the context.

    Args:
        seconds: the context waits for the removal until this long after its own start; the removal then continues in
            a thread. None: no limit.
    """
    end = None if seconds is None else time.monotonic() + seconds
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        removal = threading.Thread(target=remove_folder, args=(folder,), name="remove a folder")
        removal.start()
        removal.join(None if end is None else max(end - time.monotonic(), 0))


@asynccontextmanager
async def async_scratch_folder() -> AsyncIterator[str]:
    """Make a folder like `scratch_folder`, for a coroutine. A thread removes it, so that the event loop is not
    blocked."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        await asyncio.to_thread(remove_folder, folder)


def remove_folder(folder: str) -> None:
    """Remove a folder and its contents. Never raises: entries that cannot be removed stay.

    Symbolic links are removed, not followed. Nothing recurses, and at most 64 folders are open: folders below that
    depth are first moved to the top. A process that still runs may add files meanwhile, so up to 10 rounds are made.
    """
    with suppress(OSError):
        top = _opened(folder, None)
        try:
            for _ in range(_MAX_ROUNDS):
                _empty(top)
                if not os.listdir(top):
                    break
        finally:
            os.close(top)
    with suppress(OSError):
        os.rmdir(folder)


class _Level(NamedTuple):
    """A folder that is being emptied."""

    name: str
    descriptor: int
    folders: list[str]
    """Names of the folders in it that are not emptied yet."""


def _empty(top: int) -> None:
    """Remove the contents of a folder, given by its descriptor."""
    levels = [_Level("", top, _unlink_files(top))]
    while True:
        level = levels[-1]
        if level.folders:
            _enter(levels, level.folders.pop())
            continue
        if len(levels) == 1:
            return
        levels.pop()
        os.close(level.descriptor)
        with suppress(OSError):
            os.rmdir(level.name, dir_fd=levels[-1].descriptor)


def _enter(levels: list[_Level], name: str) -> None:
    """Open a folder of the last level as a new level. At the deepest level, move it to the first level instead."""
    top = levels[0]
    parent = levels[-1]
    with suppress(OSError):
        if len(levels) < _MAX_LEVELS:
            descriptor = _opened(name, parent.descriptor)
            levels.append(_Level(name, descriptor, _unlink_files(descriptor)))
        else:
            new_name = os.urandom(16).hex()
            _make_writable(name, parent.descriptor)
            os.rename(name, new_name, src_dir_fd=parent.descriptor, dst_dir_fd=top.descriptor)
            top.folders.append(new_name)


def _unlink_files(folder: int) -> list[str]:
    """Remove the files in a folder, and return the names of the folders in it."""
    folders = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                _unlink(entry.name, folder)
    return folders


def _unlink(name: str, folder: int) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _opened(name: str, folder: int | None) -> int:
    """Make a folder readable and writable for this user, and return a descriptor of it."""
    _make_writable(name, folder)
    return os.open(name, _FOLDER_FLAGS, dir_fd=folder)


def _make_writable(name: str, folder: int | None) -> None:
    """Give this user all rights on a folder. A symbolic link is not followed: it raises OSError."""
    # chmod would follow links. It takes a path through /proc because fchmod refuses descriptors with O_PATH.
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        with suppress(OSError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
