"""The heartbeat of a run: a small file that the main rank rewrites at each step and change of phase.

Rows of metrics come every `metrics.log_freq` steps, too seldom to tell a slow run from a stalled one. Programs outside
of the ranks read the file (`exporter`), so they work while a rank hangs, and cost the ranks nothing.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from glm46.engine.observe.history import is_deleted
from glm46.engine.observe.writes import Writes

HEARTBEAT_FILE = "heartbeat.json"
"""Name of the file in the dump folder."""

Phase = Literal["start", "prepare", "train", "validate", "save", "stop"]


@dataclass
class Beat:
    """Content of the file. Counts begin at 0 with each process, so that a resume at an earlier step is not taken for
    thousands of new steps."""

    started: float
    """Start of the process, in seconds since 1970."""
    moved: float
    """Time of the last step or change of phase."""
    phase: Phase = "start"
    step: int | None = None
    """Steps since the start of the run, as `tokens`; None until training begins, because 0 would be a fall."""
    tokens: int | None = None
    steps_done: int = 0
    """Steps of this process, as the next four."""
    tokens_done: int = 0
    skipped: int = 0
    not_finite: int = 0
    """Of the skipped steps, those whose loss or gradient was not finite."""
    failed_saves: int = 0
    loss: float | None = None
    """Mean loss of the last step; NaN if it was not finite, None if only rows have it."""
    saved_step: int | None = None
    """Step of the newest checkpoint; 0 if there is none, None until training begins."""
    saved: float | None = None
    """Time of its publication; of a checkpoint that was loaded, of its loading."""
    tokens_budget: int | None = None
    save_interval: int | None = None
    """Steps between two checkpoints; None without checkpoints."""
    info: dict[str, str] = field(default_factory=dict)
    """What stays equal until the end of the process, by name."""


class Heartbeat:
    """Writes the file; only on the main rank, on others the methods do nothing.

    A write is one system call in a thread, unsynced. If the disk fails, training continues without it.
    """

    def __init__(self, folder: Path, *, is_main: bool):
        now = time.time()
        self._beat, self._file, self._size = Beat(started=now, moved=now), None, 0
        self._path = folder / HEARTBEAT_FILE
        if is_main:
            with contextlib.suppress(OSError):
                # Not truncated: a reader would find an empty file for a moment.
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
                self._size = self._found = os.fstat(self._file).st_size
                self._writes = Writes("heartbeat", most_waiting=1)
            self._write()

    def begins(self, *, step: int, tokens: int, budget: int, save_interval: int | None, info: dict[str, str]) -> None:
        """Training begins, or begins again after a rollback, at this step.

        Args:
            budget: tokens at which the run ends.
            save_interval: steps between two checkpoints; None without checkpoints.
        """
        beat = self._beat
        beat.step, beat.tokens, beat.tokens_budget, beat.info = step, tokens, budget, info
        beat.save_interval, beat.saved_step, beat.saved = save_interval, step, time.time() if step else None
        self._enter("train")

    def step(self, step: int, tokens: int, *, was_skipped: bool, is_finite: bool, loss: float | None) -> None:
        """A step is done.

        Args:
            tokens: since the start of the run.
            is_finite: whether loss and gradient are.
            loss: mean of the step; None to leave it to the rows.
        """
        beat = self._beat
        beat.tokens_done += tokens - (beat.tokens or 0)
        beat.steps_done += 1
        beat.skipped += was_skipped
        beat.not_finite += not is_finite
        beat.step, beat.tokens, beat.loss = step, tokens, loss
        self._enter(beat.phase)

    def saved(self, step: int) -> None:
        """The checkpoint of a step is complete."""
        self._beat.saved_step, self._beat.saved = step, time.time()
        self._write()

    def save_failed(self) -> None:
        """A checkpoint could not be saved."""
        self._beat.failed_saves += 1
        self._write()

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """The phase inside of this context. If it ends with an error, the phase stays."""
        before = self._beat.phase
        self._enter(phase)
        yield
        self._enter(before)

    def stops(self) -> None:
        """No further step follows."""
        self._enter("stop")

    def folder_is_new(self) -> None:
        """The folder was deleted or renamed, and made again: the next beats are written to the new one."""
        if (file := self._file) is not None:
            self._writes.make(lambda: self._open_again(file, os.O_CREAT))
            self._write()

    def close(self) -> None:
        """Close the file, which stays, unless this start made it and no training has begun. Idempotent."""
        if self._file is not None:
            if self._beat.step is None and not self._found:
                self._writes.make(self._remove)
            # Otherwise storage does not answer, for which closing would wait, too; the report says so.
            if self._writes.close():
                os.close(self._file)
            self._file = None

    def _enter(self, phase: Phase) -> None:
        self._beat.phase, self._beat.moved = phase, time.time()
        self._write()

    def _write(self) -> None:
        if (file := self._file) is not None:
            # Blanks cover the end of a longer text of before.
            text = json.dumps(vars(self._beat)).encode().ljust(self._size)
            self._size = len(text)
            self._writes.make(lambda: self._put(file, text))

    def _put(self, file: int, text: bytes) -> None:
        create = 0
        try:
            os.pwrite(file, text, 0)
            if not is_deleted(file):
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            create = os.O_CREAT
        except OSError:
            pass  # a descriptor stays broken when its disk returns
        self._open_again(file, create)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _open_again(self, file: int, create: int) -> None:
        with contextlib.suppress(OSError):
            again = os.open(self._path, os.O_WRONLY | create, 0o644)
            os.dup2(again, file, inheritable=False)
            os.close(again)


def read_heartbeat(folder: Path) -> Beat | None:
    """The last heartbeat of a run; None without one, or while it is being written."""
    try:
        return Beat(**json.loads((folder / HEARTBEAT_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
