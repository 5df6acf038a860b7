"""One kind of lock: a file that one process at a time holds.

It is a record lock of `fcntl` and not `flock`, which the package filelock takes: child processes do not inherit it, so
a loader's worker cannot keep the lock of a killed rank, and NFS shares it between nodes. Threads of one process are not
kept apart.
"""

import fcntl
import os
import socket
import time
from pathlib import Path

_POLL_SECONDS = 0.1


class FileLock:
    """The lock of a file; released when the process ends in any way."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, timeout_seconds: float | None) -> bool:
        """Take the lock.

        Args:
            timeout_seconds: how long to wait for another holder; None waits without limit.

        Returns:
            Whether this process holds it now.

        Raises:
            OSError: the file cannot be made, or its file system has no locks.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if _try_lock(descriptor):
                # A holder may have removed the file: a lock on a removed file excludes nobody.
                if _is_still(self.path, descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                    self._descriptor = descriptor
                    return True
                os.close(descriptor)
                continue
            os.close(descriptor)
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(_POLL_SECONDS)

    def holder(self) -> str:
        """The process that took the lock last, in words."""
        try:
            return self.path.read_text(errors="replace")[:200].strip() or "another process"
        except OSError:
            return "another process"

    def release(self, *, remove: bool = False) -> None:
        """Release the lock; ``remove`` deletes the file first."""
        if self._descriptor is None:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
