"""Opens only regular files: a named pipe in an untrusted folder would block its reader forever."""

import errno
import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularFileError(OSError):
    """The path is not a regular file; `strerror` tells its kind."""


def open_descriptor(path: Path) -> int:
    """Open a regular file for reading and return the descriptor. Links are followed. Raises NotRegularFileError for
    anything else, without waiting for a writer of a pipe; OSError if the file cannot be opened."""
    # O_NONBLOCK has no effect on regular files; a pipe without a writer is opened without waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise NotRegularFileError(None, f"it is {kind}, not a regular file", str(path))


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading bytes. Raises the errors of `open_descriptor`."""
    return os.fdopen(open_descriptor(path), "rb")


def read_regular(path: Path) -> bytes:
    """Read a regular file. Raises the errors of `open_descriptor`."""
    with open_regular(path) as file:
        return file.read()


def is_file_name(name: str) -> bool:
    """Return True if a file in a folder can have this name: without a path, without a zero byte, and with characters
    that file systems can store (JSON can hold unpaired surrogates)."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return Path(name).name == name and name not in ("", "..") and "\0" not in name
