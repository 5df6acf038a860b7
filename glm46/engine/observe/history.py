"""metrics.jsonl: one JSON object per row, complete lines only, each step once."""

import errno
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm46.files.durable import replace_durably

ROWS_FILE = "metrics.jsonl"
"""Name of the file of rows in the dump folder."""
_MOST_WAITING = 10_000


def is_deleted(descriptor: int) -> bool:
    """True if the open file or folder was removed. A missing name alone may mean a disk that is not mounted.

    Raises:
        OSError: the disk does not say.
    """
    return os.fstat(descriptor).st_nlink == 0


def _is_away(descriptor: int, path: Path, parent: os.stat_result) -> bool:
    """True if the open file or folder of a path was deleted, or renamed within the folder that was its parent."""
    if is_deleted(descriptor):
        return True
    try:
        return not path.exists() and os.path.samestat(path.parent.stat(), parent)
    except FileNotFoundError:  # with its parent
        return False


class WatchedFolder:
    """A folder of which it is known when it was deleted, or renamed within its parent. The descriptor stays open."""

    def __init__(self, path: Path):
        self._path, self._parent = path, path.parent.stat()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def is_away(self) -> bool:
        """True if it was deleted or renamed. A missing name alone may mean a disk that is not mounted.

        Raises:
            OSError: the disk does not say.
        """
        return _is_away(self._descriptor, self._path, self._parent)

    def is_another(self) -> bool:
        """True if the path now leads to another folder than the watched one."""
        return self._path.exists() and not os.path.samestat(self._path.stat(), os.fstat(self._descriptor))

    def make_again(self) -> None:
        """Make the folder, and watch this one."""
        self._path.mkdir(parents=True, exist_ok=True)
        again = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(again, self._descriptor, inheritable=False)
        os.close(again)
        self._parent = self._path.parent.stat()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


class LineFile:
    """File that appends complete lines, unbuffered. A line that a full disk takes only in part is truncated again.

    Lines that the disk refuses are kept, up to the newest `_MOST_WAITING` calls, and written by the next call that
    succeeds. After a failure the file is opened again, because a descriptor stays broken when its disk returns. A file
    that was deleted, or renamed within its folder, is created again; one that is missing for another reason is not,
    because the folder of a disk that is not mounted would take it.

    Every method raises OSError if the system call fails; later calls may succeed.
    """

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("ab", buffering=0)
        self.folder_is_new()
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def folder_is_new(self) -> None:
        """The folder that is there now is that of the file: a file that it lacks is created by the next write."""
        self._folder = self._path.parent.stat()

    def write(self, lines: str) -> bool:
        """Append text that consists of complete lines.

        Returns:
            Whether the file was created again.
        """
        is_doubtful = bool(self._waiting)
        self._waiting.append(lines)
        is_away = not is_doubtful and _is_away(self._file.fileno(), self._path, self._folder)
        if is_away:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.folder_is_new()
        if is_doubtful or is_away:
            again = os.open(self._path, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if is_away else 0), 0o644)
            os.dup2(again, self._file.fileno(), inheritable=False)
            os.close(again)
        self._append("".join(self._waiting).encode())
        self._waiting.clear()
        return is_away

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

    def folder_is_new(self) -> None:
        """See `LineFile.folder_is_new`."""
        self._file.folder_is_new()

    def write(self, row: Mapping[str, object]) -> bool:
        """Append a row; see `LineFile.write`. Other processes can read it immediately."""
        return self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        """Sync and close the file."""
        self._file.close()


def read_history(path: Path, last_bytes: int | None = None) -> list[dict]:
    """All valid rows, or those of the last bytes of the file. Lines that are truncated or corrupt are skipped."""
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


def rows_by_kind(rows: Sequence[dict]) -> tuple[list[dict], list[dict]]:
    """The training rows and the validation rows."""
    # Rows of older releases have no kind.
    kinds = [row.get("kind", "validation" if "validation_loss" in row else "train") for row in rows]
    train, validation = (
        [row for row, of in zip(rows, kinds, strict=True) if of == kind] for kind in ("train", "validation")
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
