"""Output of metrics and messages: console, metrics.jsonl, TensorBoard, log.txt. `Observers` calls it."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from glm46.config.printable import printable
from glm46.engine.observe.console import ConsoleView, train_line, validation_line
from glm46.engine.observe.exporter import Exporter
from glm46.engine.observe.history import ROWS_FILE, History, LineFile, WatchedFolder, keep_aside
from glm46.engine.observe.metrics import find_metric, plain_row
from glm46.engine.observe.tracker import Tracker
from glm46.engine.observe.writes import Writes

if TYPE_CHECKING:  # importing it takes a second
    from torch.utils.tensorboard import SummaryWriter

_MAX_WAITING_WRITES = 10_000
"""Maximum number of writes that wait for storage; see `Writes`."""

Kind = Literal["train", "validation"]
"""Kinds of rows. A step can have one of each."""


class Report:
    """Writer of metrics and messages of a run on the main rank. On other ranks all methods do nothing."""

    def __init__(
        self,
        dump_folder: Path,
        *,
        is_main: bool,
        tensorboard_folder: Path | None,
        total_tokens: int,
        resumed_step: int | None = None,
        console: ConsoleView | None = None,
        tracker: Tracker | None = None,
        exporter: Exporter | None = None,
    ):
        """Open the files under `dump_folder`.

        Args:
            tensorboard_folder: folder of event files; None for no such files.
            total_tokens: budget of the run, to compute the share done and the time left.
            resumed_step: step of the checkpoint that the run resumes from; later rows of earlier processes are removed.
                None for a new run: files of an earlier run are renamed.
            console: None for standard output.
            tracker: also receives the rows, and is closed with the report.
            exporter: also receives the rows.
        """
        self._is_main = is_main
        self._has_lost_folder = False
        self._total_tokens = total_tokens
        if not is_main:
            return
        self._folder = dump_folder
        self._paused: set[Path] = set()
        self._writes = Writes("report", _MAX_WAITING_WRITES)
        self._is_closed = False
        dump_folder.mkdir(parents=True, exist_ok=True)
        self._history = History(dump_folder / ROWS_FILE, resumed_step)
        self._log = LineFile(dump_folder / "log.txt")
        self._console = console or ConsoleView(total_tokens)
        self._tracker = tracker
        self._exporter = exporter
        self._watched = WatchedFolder(dump_folder)
        self._tensorboard = _TensorBoard(tensorboard_folder, resumed_step) if tensorboard_folder else None

    def train(self, row: Mapping[str, int | float]) -> None:
        """Write a row of training metrics; the columns are defined in `glm46.engine.observe.metrics`."""
        if self._is_main:
            plain = self._write("train", row)
            self._console.train(plain)
            self._write_log(train_line(plain, self._total_tokens))

    def step(self, row: Mapping[str, int | float]) -> None:
        """Move the bar on a terminal to a step, which needs no row in the files; see `ConsoleView.step`."""
        if self._is_main:
            self._console.step(plain_row(row))

    def close_bar(self) -> None:
        """Remove the bar from the terminal, before the last messages of a run."""
        if self._is_main:
            self._console.close()

    def validation(self, row: Mapping[str, int | float]) -> None:
        """Write a row of validation metrics."""
        if self._is_main:
            line = validation_line(self._write("validation", row))
            self._console.row(line)
            self._write_log(line)

    def config(self, text: str) -> None:
        """Write the resolved configuration to TensorBoard, at the first step that uses it."""
        if self._is_main and (board := self._tensorboard) is not None:
            self._keep(board.folder, lambda: board.write_config(text))

    def message(self, text: str) -> None:
        """Write a message to the console and log.txt."""
        if self._is_main:
            text = printable(text)
            self._console.line(text)
            self._write_log(text)

    def log(self, text: str) -> None:
        """Write a message to log.txt only."""
        if self._is_main:
            self._write_log(printable(text))

    def has_lost_folder(self) -> bool:
        """True if the dump folder was deleted or renamed. Then nothing is written any more."""
        if self._is_main:
            self._writes.make(self._look_for_folder)
        return self._has_lost_folder

    def finish_writes(self) -> None:
        """Wait until all rows and messages so far are in their files."""
        if self._is_main:
            self._writes.finish()

    def close(self) -> None:
        """Sync and close all files. Idempotent."""
        if self._is_main and not self._is_closed:
            self._is_closed = True
            has_written = self._writes.close()
            self._console.close()
            if not has_written:  # closing the files would also wait for storage
                self._console.line(f"{self._folder}: storage does not answer, so the last rows are not written there")
            if self._tracker is not None:
                self._tracker.close()
            self._watched.close()
            for file in (self._history, self._tensorboard, self._log) if has_written else ():
                with suppress(OSError):  # `_keep` has reported it
                    if file is not None:
                        file.close()

    def _write(self, kind: Kind, row: Mapping[str, int | float]) -> dict[str, int | float | None]:
        now = time.time()
        plain = plain_row(row)
        assert "step" in plain, "a row needs its step"
        self._keep(
            self._folder / ROWS_FILE,
            lambda: self._history.write({"kind": kind, "unix_seconds": round(now, 3), **plain}),
        )
        if (board := self._tensorboard) is not None:
            self._keep(board.folder, lambda: board.write(kind, plain, now))
        if self._tracker is not None:
            self._tracker.write(plain)
        if self._exporter is not None:
            self._exporter.row(plain)
        return plain

    def _write_log(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp}  {line}\n" for line in text.splitlines() or [""])
        self._keep(self._folder / "log.txt", lambda: self._log.write(lines))

    def _keep(self, path: Path, write: Callable[[], None]) -> None:
        """Write to a file that training can do without. If the disk fails, report it once and continue."""
        self._writes.make(lambda: self._try_to_write(path, write))

    def _try_to_write(self, path: Path, write: Callable[[], None]) -> None:
        self._look_for_folder()
        if self._has_lost_folder:  # a path of the same name may be another folder
            return
        try:
            write()
        except OSError as error:
            if path not in self._paused:
                self._paused.add(path)
                self._console.line(f"{path}: cannot be written ({error.strerror}); training continues without it")
        else:
            if path in self._paused:
                self._paused.remove(path)
                self._console.line(f"{path}: written again")

    def _look_for_folder(self) -> None:
        with suppress(OSError):  # storage does not answer, which says nothing about the folder
            self._has_lost_folder = self._has_lost_folder or self._watched.is_away()


class _TensorBoard:
    """A folder with training rows, and its folder ``validation`` with validation rows.

    TensorBoard shows equal names of two folders in one chart, so training and validation loss share a chart.
    """

    def __init__(self, folder: Path, resumed_step: int | None):
        # Imported here because it takes a second.
        from torch.utils.tensorboard import SummaryWriter, summary

        self._previous_hook = threading.excepthook
        threading.excepthook = self._on_thread_error
        self.folder = folder
        self._folders: dict[Kind, Path] = {"train": folder, "validation": folder / "validation"}
        self._writer_type = SummaryWriter
        self._summary = summary.Summary  # type: ignore[attr-defined]  # imported there without an export
        self._purge_step = None if resumed_step is None else resumed_step + 1
        self._writers: dict[Kind, SummaryWriter] = {}
        if resumed_step is None:
            keep_aside(folder)
        for kind, path in self._folders.items():
            if path.exists():  # opening it removes the steps after the restored one
                self._writer(kind)

    def _writer(self, kind: Kind) -> "SummaryWriter":
        if kind not in self._writers:
            self._writers[kind] = self._writer_type(str(self._folders[kind]), purge_step=self._purge_step)
        return self._writers[kind]

    def write(self, kind: Kind, row: Mapping[str, int | float | None], unix_seconds: float) -> None:
        """Write a row."""
        # One event for all values: `add_scalar` writes one for each, which takes six times as long, 3 ms per step.
        values = {_tag(column): value for column, value in row.items() if value is not None and column != "step"}
        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        file_writer = self._writer(kind).file_writer
        assert file_writer is not None, "only a closed writer has none"
        file_writer.add_summary(summary, row["step"], unix_seconds)

    def write_config(self, text: str) -> None:
        # TensorBoard renders Markdown; indented lines are shown verbatim.
        as_code = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer("train").add_text("config", as_code, self._purge_step or 0)

    def close(self) -> None:
        try:
            for writer in self._writers.values():
                writer.close()
        finally:
            threading.excepthook = self._previous_hook

    def _on_thread_error(self, arguments: threading.ExceptHookArgs) -> None:
        """Suppress the traceback when the disk fails in TensorBoard's thread: the next write raises the same error."""
        is_writer = type(arguments.thread).__module__.startswith("tensorboard.")
        if not (is_writer and issubclass(arguments.exc_type, OSError)):
            self._previous_hook(arguments)


def _tag(column: str) -> str:
    """Return TensorBoard's name of a column. A validation metric gets the name of its training metric."""
    metric = find_metric(column)
    if metric.training is not None and column == metric.name:
        metric = find_metric(metric.training)
        column = metric.name
    return f"{metric.group}/{column}"
