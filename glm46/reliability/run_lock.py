"""The lock of a run's folder: a second run in it would cut the metrics of the first and set its checkpoints aside."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm46.config.errors import UserError
from glm46.files.lock import FileLock

_FILE = "run.lock"
_PATIENCE_SECONDS = 5.0
"""A killed run takes a moment to release its folder."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Report a failed write to a run's folder as a mistake of the user. For writes without which the run cannot start.

    Raises:
        UserError: a write inside the context failed.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"job.dump_folder = {str(folder)!r}: {error.filename or folder} cannot be written: {error.strerror}; free "
            "space, allow writing, or set another folder"
        ) from error


def lock_run(folder: Path) -> FileLock:
    """Lock a folder for this process.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written.
    """
    lock = FileLock(folder / _FILE)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        is_held = lock.acquire(_PATIENCE_SECONDS)
    if not is_held:
        raise UserError(
            f"job.dump_folder = {str(folder)!r}: {lock.holder()} is training in this folder; "
            "wait for it, stop it, or set another folder"
        )
    return lock
