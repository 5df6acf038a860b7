"""File metrics.jsonl: one JSON object per row, complete lines only, each step once."""

import errno
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from glm46.files.durable import replace_durably

ROWS_FILE = "metrics.jsonl"
"""Name of the file of rows in the dump folder."""
_MOST_WAITING = 10_000


def is_deleted(descriptor: int) -> bool:
    """True if the open file or folder was removed. A missing name alone may mean a disk that is not mounted.

    Raises:
        OSError: the disk does not answer.
    """
    return os.fstat(descriptor).st_nlink == 0


class WatchedFolder:
    """A folder whose deletion, or renaming within its parent, is detected. Keeps a descriptor open."""

    def __init__(self, path: Path):
        self._path = path
        self._parent = path.parent.stat()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def is_away(self) -> bool:
        """True if the folder was deleted or renamed. A missing name alone may mean a disk that is not mounted.

        Raises:
            OSError: the disk does not answer.
        """
        if is_deleted(self._descriptor):
            return True
        try:
            return not self._path.exists() and os.path.samestat(self._path.parent.stat(), self._parent)
        except FileNotFoundError:  # the parent is missing too
            return False

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


class LineFile:
    """File that appends complete lines, unbuffered. A line that a full disk stores only in part is removed.

    Lines that the disk rejects are kept, up to the newest `_MOST_WAITING` calls, and written by the next call that
    succeeds. After a failure the file is opened again, because a descriptor stays broken when its disk returns. A
    missing file is not created: it would be written into the mount point of a disk that is not mounted.

    Every method raises OSError if the system call fails; later calls may succeed.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, lines: str) -> None:
        """Append text that consists of complete lines. Raises FileNotFoundError if the file was deleted."""
        is_doubtful = bool(self._waiting)
        self._waiting.append(lines)
        if is_doubtful or is_deleted(self._file.fileno()):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, self._file.fileno(), inheritable=False)
            os.close(descriptor)
        self._append("".join(self._waiting).encode())
        self._waiting.clear()

    def _append(self, content: bytes) -> None:
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Sync and close the file. Idempotent."""
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()


class History:
    """The file of rows, continued at the step that the run resumes from."""

    def __init__(self, path: Path, resumed_step: int | None):
        """Open the file.

        Args:
            resumed_step: step of the checkpoint that the run resumes from. Rows after it are removed, because the run
                writes them again. None for a new run: an earlier file is renamed.
        """
        if resumed_step is None:
            keep_aside(path)
        elif path.exists():
            _cut(path, resumed_step)
        self._file = LineFile(path)

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row; see `LineFile.write`. Other processes can read it immediately."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        """Sync and close the file."""
        self._file.close()


def read_history(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Read all valid rows, or the rows in the last bytes of the file. Truncated and corrupt lines are skipped."""
    with path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, path.stat().st_size - last_bytes))
        content = file.read()
    rows = []
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # not JSON, or not UTF-8
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


class RunRows(NamedTuple):
    """Rows of one run."""

    name: str
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]


def rows_by_kind(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training rows and the validation rows."""
    # Rows of older releases have no kind.
    kinds = [row.get("kind", "validation" if "validation_loss" in row else "train") for row in rows]
    train, validation = (
        [row for row, row_kind in zip(rows, kinds, strict=True) if row_kind == kind] for kind in ("train", "validation")
    )
    return train, validation


def keep_aside(path: Path) -> None:
    """Rename an existing path to the first free name of ``stem.1.suffix``, ``stem.2.suffix``, ..."""
    number = 1
    while path.exists():
        earlier = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if not earlier.exists():
            path.rename(earlier)
        number += 1


def _cut(path: Path, last_step: int) -> None:
    kept = [row for row in read_history(path) if row["step"] <= last_step]
    replace_durably(path, [(json.dumps(row) + "\n").encode() for row in kept])
