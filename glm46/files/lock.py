"""A lock file that only one process at a time holds.

It uses record locks (`fcntl.lockf`) instead of `flock`, which the package filelock uses: child processes do not inherit
them, so a loader's worker cannot keep the lock of a killed rank, and NFS shares them between nodes. They do not exclude
threads of one process.
"""

import fcntl
import os
import socket
import struct
import time
from pathlib import Path

_POLL_SECONDS = 0.1
_FLOCK = "hhqqi"
"""struct flock of Linux on 64 bits: l_type, l_whence, l_start, l_len, l_pid. Source: fcntl(2)."""


class FileLock:
    """An exclusive lock on a file; the system releases it when the process ends."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, timeout_seconds: float | None) -> bool:
        """Take the lock. Returns whether this process holds it. Raises OSError if the file cannot be created, or its
        file system does not support locks.

        Args:
            timeout_seconds: how long to wait while another process holds it; None waits without limit.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            # Only for this user: a process that can read a file can hold a shared lock on it, which excludes this one.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            if _try_lock(descriptor):
                # The holder may have removed the file: a lock on a removed file excludes no other process.
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

    def is_held_elsewhere(self, timeout_seconds: float) -> bool:
        """Return True if another process holds the lock for all of this time. Takes and writes nothing. Raises OSError
        if the file cannot be read, or its file system does not support locks."""
        end = time.monotonic() + timeout_seconds
        while self.path.exists():
            with self.path.open("rb") as file:
                request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                kind = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, request))[0]
            if kind == fcntl.F_UNLCK:
                return False
            if time.monotonic() >= end:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def holder(self) -> str:
        """Describe the process that took the lock last."""
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
