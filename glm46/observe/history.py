"""metrics.jsonl: one JSON object per row, whole lines only, no step twice."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

from glm46.files.durable import replace_durably


class LineFile:
    """A file that lines are appended to, seen at once and whole: what a full disk took in part is cut off again.

    Every method raises OSError where the system refuses; the next call starts anew.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, lines: str) -> None:
        """Append lines, their ends included."""
        content, end = lines.encode(), os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Close the file with its lines on the disk. Calling it again does nothing."""
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()


class History:
    """The file of rows, opened so that it goes on where the run goes on."""

    def __init__(self, path: Path, resumed_step: int | None):
        """Open the file.

        Args:
            resumed_step: last step of the checkpoint that the run goes on from; rows after it are cut, because they
                will be written again. None: a run from the start; an earlier file is kept under another name.
        """
        if resumed_step is None:
            keep_aside(path)
        elif path.exists():
            _cut(path, resumed_step)
        self._file = LineFile(path)

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row; a reader beside the run sees it at once."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file with its rows on the disk."""
        self._file.close()


def read_history(path: Path) -> list[dict]:
    """All whole rows; a line that a crash cut short, or a disk has damaged, is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # no JSON, or no UTF-8
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def keep_aside(path: Path) -> None:
    """Rename what an earlier run left at this path to the first free name ``stem.1.suffix``, ``stem.2.suffix``, ..."""
    number = 1
    while path.exists():
        earlier = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if not earlier.exists():
            path.rename(earlier)
        number += 1


def _cut(path: Path, last_step: int) -> None:
    kept = [row for row in read_history(path) if row["step"] <= last_step]
    replace_durably(path, [(json.dumps(row) + "\n").encode() for row in kept])
