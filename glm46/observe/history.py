"""metrics.jsonl: one JSON object per row, whole lines only, no step twice."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from glm46.files.durable import replace_durably


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
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row; a reader beside the run sees it at once."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file with its rows on the disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def read_history(path: Path) -> list[dict]:
    """All whole rows; a line that a crash cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
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
