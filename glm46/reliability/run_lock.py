"""Locks of the folders of a run: a second run in one would cut the metrics of the first and remove its checkpoints."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

from glm46.config.errors import UserError
from glm46.files.lock import FileLock

_FILE = "run.lock"
_PATIENCE_SECONDS = 5.0
"""A killed run takes a moment to release its folder."""

_DUMP_KEY, _EVENTS_KEY = "job.dump_folder", "metrics.save_tb_folder"
_NONE: Mapping[str, Path] = MappingProxyType({})


@contextmanager
def writing(folder: Path, apart: Mapping[str, Path] = _NONE, key: str = _DUMP_KEY) -> Iterator[None]:
    """Report a failed write to a run's folders as a mistake of the user. For writes without which the run cannot start.

    Args:
        folder: the folder of `key`.
        apart: other folders, by their keys.

    Raises:
        UserError: a write inside the context failed.
    """
    try:
        yield
    except OSError as error:
        failed = Path(error.filename or folder)
        key, folder = next((of for of in apart.items() if failed.is_relative_to(of[1])), (key, folder))
        raise UserError(
            f"{key} = {str(folder)!r}: {failed} cannot be written: {error.strerror}; free "
            "space, allow writing, or set another folder"
        ) from error


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise UserError if nothing can be written where a folder is or would be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with writing(folder, key=key), tempfile.TemporaryFile(dir=there) as file:
        file.write(b"\0" * 4096)


class RunLocks:
    """The locks of the folders of a run, held by this process until `close`; by other ranks than the first, none."""

    def __init__(self, locks: Sequence[FileLock] = ()):
        self._locks = locks

    def retake(self) -> str:
        """Take the locks again whose files were deleted during the run; returns a text that says who holds one now."""
        lost = [lock for lock in self._locks if not lock.retake()]
        return "".join(f"; {lock.holder()} trains in {lock.path.parent} too: stop one of both" for lock in lost)

    def close(self) -> None:
        """Release them. Idempotent."""
        for lock in self._locks:
            lock.release()


def lock_run(folder: Path, apart: Mapping[str, Path] = _NONE) -> RunLocks:
    """Lock the folders of a run for this process.

    Args:
        folder: job.dump_folder.
        apart: folders outside of it, by their keys.

    Raises:
        UserError: another process holds a lock, or a folder cannot be written.
    """
    with ExitStack() as locks:
        taken = []
        for key, place in {_DUMP_KEY: folder, **apart}.items():
            # Beside the folder of event files: a new run renames the folder itself.
            file = place.with_name(f"{place.name}.{_FILE}") if key == _EVENTS_KEY else place / _FILE
            lock = FileLock(file)
            with writing(place, key=key):
                file.parent.mkdir(parents=True, exist_ok=True)
                is_held = lock.acquire(_PATIENCE_SECONDS)
            if not is_held:
                raise UserError(
                    f"{key} = {str(place)!r}: {lock.holder()} is training in this folder; "
                    "wait for it, stop it, or set another folder"
                )
            locks.callback(lock.release)
            taken.append(lock)
        locks.pop_all()
    return RunLocks(taken)


def outer_run(folder: Path, dump_folder: Path) -> Path | None:
    """The output folder of another run that a folder lies in, if any."""
    own = dump_folder.absolute()
    return next(
        (path for path in folder.absolute().parents if (path / _FILE).exists() and not own.is_relative_to(path)), None
    )
