"""One run in one folder: a second one would cut the first one's metrics and set its checkpoints aside."""

from pathlib import Path

from glm46.config.errors import UserError
from glm46.files.lock import FileLock

_FILE = "run.lock"
_PATIENCE_SECONDS = 5.0
"""A killed run takes a moment to end before the next start can hold its folder."""


def lock_run(folder: Path) -> FileLock:
    """Hold a folder for this process.

    Raises:
        UserError: another process holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _FILE)
    if not lock.acquire(_PATIENCE_SECONDS):
        raise UserError(
            f"job.dump_folder = {str(folder)!r}: {lock.holder()} is training in this folder; "
            "wait for it, stop it, or set another folder"
        )
    return lock
