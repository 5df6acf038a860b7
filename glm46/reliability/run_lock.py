"""One run in one folder: a second one would cut the first one's metrics and set aside its checkpoints."""

import fcntl
import os
import socket
import time
from pathlib import Path

from glm46.config.errors import UserError

_FILE = "run.lock"
_PATIENCE_SECONDS = 5.0
"""A run that was killed, or that torchrun starts again, takes a moment to be gone."""


class RunLock:
    """Holds a folder for this process until it is let go, or the process ends in whatever way.

    It is a lock of `fcntl`, not of `flock`: worker processes do not inherit it, and network file systems that have
    locks at all share it between nodes.

    Raises:
        UserError: another process holds the folder.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o644)
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self._try():
            if time.monotonic() > end:
                holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(self._descriptor)
                raise UserError(
                    f"job.dump_folder = {str(folder)!r}: {holder} is training in this folder; "
                    "wait for it, stop it, or set another folder"
                )
            time.sleep(0.1)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self) -> None:
        """Let the folder go."""
        os.close(self._descriptor)
