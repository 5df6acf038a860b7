"""Folders of a run: their locks, without which a second run would truncate the metrics of the first and remove its
checkpoints, and checks that they are writable and large enough."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.engine.reliability.verdict import HANG_FOLDER
from glm46.files.lock import FileLock
from glm46.run.checkpoint_size import checkpoint_size
from glm46.run.plan import Plan
from glm46.storage.checkpoint.publish import LEFTOVER

_FILE = "run.lock"
_PATIENCE_SECONDS = 5.0
"""Time to wait for a lock: a killed run takes a moment to release its folder."""

_DUMP_KEY = "job.dump_folder"
_EVENTS_KEY = "metrics.save_tb_folder"
_NONE: Mapping[str, Path] = MappingProxyType({})


@contextmanager
def writing(folder: Path, apart: Mapping[str, Path] = _NONE, key: str = _DUMP_KEY) -> Iterator[None]:
    """Raise UserError for a failed write to the folders of a run. For writes without which the run cannot start.

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
        entries = [(name, place) for name, place in apart.items() if failed.is_relative_to(place)]
        key, folder = [*entries, (key, folder)][0]
        raise UserError(
            f"{key} = {str(folder)!r}: {failed} cannot be written: {error.strerror}; free "
            "space, allow writing, or set another folder"
        ) from error


def refuse_small_disk(plan: Plan, processes: int) -> None:
    """Raise UserError if a disk of this node has no space for one more checkpoint. Leftovers of failed saves count as
    free space, because the next save removes them first; earlier checkpoints do not, because they are removed after it.

    Args:
        processes: number of ranks of this node, whose shards checkpoint.node_local_folder stores.
    """
    config = plan.config.checkpoint
    size = checkpoint_size(plan)
    if not config.enable:
        return
    places = {"checkpoint.folder": (plan.config.checkpoint_folder, 1.0, "one checkpoint")}
    if config.node_local_folder:
        share = processes / plan.layout.world_size
        what = f"the shards of {counted(processes, 'rank')} of one checkpoint"
        places["checkpoint.node_local_folder"] = Path(config.node_local_folder), share, what
    faults = []
    for key, (folder, share, what) in places.items():
        with writing(folder, key=key):
            need = share * size.total
            free = shutil.disk_usage(_nearest_existing(folder)).free
        leftovers = (path for path in folder.glob("step-*") if LEFTOVER.fullmatch(path.name))
        files = (file for path in leftovers for file in path.rglob("*") if file.is_file())
        if need > free and need > free + sum(file.stat().st_size for file in files):
            sizes = f"(weights {_size(share * size.weights)}, optimizer states {_size(share * size.states)})"
            faults.append(
                f"{key} = {str(folder)!r}: {what} takes {_size(need)} {sizes}, and {_size(free)} of its disk are free; "
                f"it must fit beside those that are there; free space, set another {key}, or "
                "set checkpoint.enable = false"
            )
    raise_if(faults)


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))


def _size(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise UserError if nothing can be written at the location of a folder, which may not exist yet."""
    existing = _nearest_existing(folder)
    if existing.is_file():
        raise UserError(f"{key} = {str(folder)!r}: {existing} is a file, not a folder; set another folder")
    with writing(folder, key=key), tempfile.TemporaryFile(dir=existing) as file:
        file.write(b"\0" * 4096)


@dataclass(frozen=True)
class _Taken:
    """A lock that this process holds."""

    lock: FileLock
    place: Path
    """The locked folder."""
    made: Sequence[Path]
    """Folders that were created for the lock, the innermost first."""


class RunLocks:
    """Locks of the folders of a run, held by the first rank until `close`; other ranks hold no locks."""

    def __init__(self, taken: Sequence[_Taken] = ()):
        self._taken = taken

    def close(self, *, is_refused: bool = False) -> None:
        """Release the locks. Idempotent.

        Args:
            is_refused: remove the locks of folders that contain nothing else, and folders that were created for them.
        """
        for taken in self._taken:
            is_unused = is_refused and _is_unused(taken)
            taken.lock.release(remove=is_unused)
            if is_unused:
                with suppress(OSError):  # not empty
                    for folder in taken.made:
                        folder.rmdir()


def _is_unused(taken: _Taken) -> bool:
    """True if the folder contains only the lock, after the watchdogs of other ranks have removed their files."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while (others := {path.name for path in taken.place.glob("*")} - {taken.lock.path.name}) == {HANG_FOLDER}:
        if time.monotonic() >= end:
            break
        time.sleep(0.05)
    return not others


def lock_run(folder: Path, apart: Mapping[str, Path] = _NONE) -> RunLocks:
    """Lock the folders of a run for this process.

    Args:
        folder: job.dump_folder.
        apart: folders outside of job.dump_folder, by their keys.

    Raises:
        UserError: another process holds a lock, or a folder cannot be written.
    """
    with ExitStack() as locks:
        taken: list[_Taken] = []
        locks.callback(RunLocks(taken).close, is_refused=True)
        for key, place in {_DUMP_KEY: folder, **apart}.items():
            lock = _lock_of(key, place)
            inner = lock.path.parent
            made = [path for path in (inner, *inner.parents) if not path.exists()]
            with writing(place, key=key):
                inner.mkdir(parents=True, exist_ok=True)
                is_held = lock.acquire(_PATIENCE_SECONDS)
            if not is_held:
                raise UserError(_held(key, place, lock))
            taken.append(_Taken(lock, place, made))
        locks.pop_all()
    return RunLocks(taken)


def refuse_locked(folder: Path, apart: Mapping[str, Path] = _NONE) -> None:
    """Raise the UserError of `lock_run` if another process holds a lock of these folders. Takes and writes nothing."""
    for key, place in {_DUMP_KEY: folder, **apart}.items():
        lock = _lock_of(key, place)
        with writing(place, key=key):
            is_held = lock.is_held_elsewhere(_PATIENCE_SECONDS)
        if is_held:
            raise UserError(_held(key, place, lock))


def _lock_of(key: str, place: Path) -> FileLock:
    # Next to the folder of event files, not in it: a new run renames that folder.
    return FileLock(place.with_name(f"{place.name}.{_FILE}") if key == _EVENTS_KEY else place / _FILE)


def _held(key: str, place: Path, lock: FileLock) -> str:
    return (
        f"{key} = {str(place)!r}: {lock.holder()} is training in this folder; "
        "wait for it, stop it, or set another folder"
    )


def outer_run(folder: Path, dump_folder: Path) -> Path | None:
    """Return the output folder of another run that contains a folder, or None."""
    absolute = dump_folder.absolute()
    return next(
        (path for path in folder.absolute().parents if (path / _FILE).exists() and not absolute.is_relative_to(path)),
        None,
    )
