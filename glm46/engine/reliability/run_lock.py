"""Folders of a run: their locks, without which a second run would cut the metrics of the first and remove its
checkpoints, and what they must hold."""

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


def refuse_small_disk(plan: Plan, processes: int) -> None:
    """Raise UserError if a disk of this node cannot hold one checkpoint beside what is there, apart from what the next
    save removes before it writes: earlier checkpoints go after it.

    Args:
        processes: ranks of this node, whose shards checkpoint.node_local_folder takes.
    """
    config, size = plan.config.checkpoint, checkpoint_size(plan)
    if not config.enable:
        return
    places = {"checkpoint.folder": (plan.config.checkpoint_folder, 1.0, "one checkpoint")}
    if config.node_local_folder:
        share, what = (
            processes / plan.layout.world_size,
            f"the shards of {counted(processes, 'rank')} of one checkpoint",
        )
        places["checkpoint.node_local_folder"] = Path(config.node_local_folder), share, what
    faults = []
    for key, (folder, share, what) in places.items():
        with writing(folder, key=key):
            needed, free = share * size.total, shutil.disk_usage(_existing(folder)).free
        leftovers = (path for path in folder.glob("step-*") if LEFTOVER.fullmatch(path.name))
        files = (file for path in leftovers for file in path.rglob("*") if file.is_file())
        if needed > free and needed > free + sum(file.stat().st_size for file in files):
            of = f"(weights {_size(share * size.weights)}, optimizer states {_size(share * size.states)})"
            faults.append(
                f"{key} = {str(folder)!r}: {what} takes {_size(needed)} {of}, and {_size(free)} of its disk are free; "
                f"it must fit beside those that are there; free space, set another {key}, or "
                "set checkpoint.enable = false"
            )
    raise_if(faults)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))


def _size(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise UserError if nothing can be written where a folder is or would be made."""
    with writing(folder, key=key), tempfile.TemporaryFile(dir=_existing(folder)) as file:
        file.write(b"\0" * 4096)


@dataclass(frozen=True)
class _Taken:
    """A lock that this process holds."""

    lock: FileLock
    place: Path
    """The folder that it locks."""
    made: Sequence[Path]
    """Folders that were made for it, the innermost first."""


class RunLocks:
    """The locks of the folders of a run, held by this process until `close`; by other ranks than the first, none."""

    def __init__(self, taken: Sequence[_Taken] = ()):
        self._taken = taken

    def retake(self) -> str:
        """Take the locks again whose files were deleted during the run; returns a text that says who holds one now."""
        lost = [taken.lock for taken in self._taken if not taken.lock.retake()]
        return "".join(f"; {lock.holder()} trains in {lock.path.parent} too: stop one of both" for lock in lost)

    def close(self, *, is_refused: bool = False) -> None:
        """Release them. Idempotent.

        Args:
            is_refused: remove the locks of folders that hold nothing else, and of these the ones that were made.
        """
        for taken in self._taken:
            is_unused = is_refused and _is_unused(taken)
            taken.lock.release(remove=is_unused)
            if is_unused:
                with suppress(OSError):  # something else lies in it
                    for folder in taken.made:
                        folder.rmdir()


def _is_unused(taken: _Taken) -> bool:
    """True if the folder holds nothing but the lock, once the watchdogs of other ranks have removed their files."""
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
        apart: folders outside of it, by their keys.

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
    # Beside the folder of event files: a new run renames the folder itself.
    return FileLock(place.with_name(f"{place.name}.{_FILE}") if key == _EVENTS_KEY else place / _FILE)


def _held(key: str, place: Path, lock: FileLock) -> str:
    return (
        f"{key} = {str(place)!r}: {lock.holder()} is training in this folder; "
        "wait for it, stop it, or set another folder"
    )


def outer_run(folder: Path, dump_folder: Path) -> Path | None:
    """The output folder of another run that a folder lies in, if any."""
    own = dump_folder.absolute()
    return next(
        (path for path in folder.absolute().parents if (path / _FILE).exists() and not own.is_relative_to(path)), None
    )
