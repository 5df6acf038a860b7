"""Where rows of metrics and messages go: console, metrics.jsonl, TensorBoard, log.txt."""

import time
from collections.abc import Mapping
from pathlib import Path

from glm46.observe.console import ConsoleView, train_line, validation_line
from glm46.observe.history import History, keep_aside
from glm46.observe.metrics import find_metric, plain_row


class Report:
    """Everything that a run tells, on the one rank that writes. On other ranks every method does nothing."""

    def __init__(
        self,
        dump_folder: Path,
        *,
        is_main: bool,
        enable_tensorboard: bool,
        total_tokens: int,
        resumed_step: int | None = None,
        console: ConsoleView | None = None,
    ):
        """Open the files under `dump_folder`.

        Args:
            total_tokens: budget of the run, for the share done and the time left.
            resumed_step: step of the checkpoint that the run goes on from; what earlier processes wrote after it is
                cut. None: a run from the start; files of an earlier run are kept under another name.
            console: where rows and messages are shown; absent: standard output.
        """
        self._is_main = is_main
        self._total_tokens = total_tokens
        if not is_main:
            return
        dump_folder.mkdir(parents=True, exist_ok=True)
        self._history = History(dump_folder / "metrics.jsonl", resumed_step)
        self._log = (dump_folder / "log.txt").open("a", encoding="utf-8")
        self._console = console or ConsoleView(total_tokens)
        self._tensorboard = None
        if enable_tensorboard:
            if resumed_step is None:
                keep_aside(dump_folder / "tb")
            # Its import takes a second, which runs without TensorBoard need not pay.
            from torch.utils.tensorboard import SummaryWriter

            purge_step = None if resumed_step is None else resumed_step + 1
            self._tensorboard = SummaryWriter(str(dump_folder / "tb"), purge_step=purge_step)

    def train(self, row: Mapping[str, int | float]) -> None:
        """Write a row of training figures; its columns are in `glm46.observe.metrics`."""
        if self._is_main:
            plain = self._write(row)
            self._console.train(plain)
            self._write_log(train_line(plain, self._total_tokens))

    def validation(self, row: Mapping[str, int | float]) -> None:
        """Write a row of validation figures."""
        if self._is_main:
            line = validation_line(self._write(row))
            self._console.line(line)
            self._write_log(line)

    def message(self, text: str) -> None:
        """Tell the user something, on the console and in log.txt."""
        if self._is_main:
            self._console.line(text)
            self._write_log(text)

    def log(self, text: str) -> None:
        """Keep something in log.txt that a person need not see while the run goes on."""
        if self._is_main:
            self._write_log(text)

    def close(self) -> None:
        """Bring everything to the disk. Calling it again does nothing."""
        if self._is_main and not self._log.closed:
            self._console.close()
            self._history.close()
            self._log.close()
            if self._tensorboard is not None:
                self._tensorboard.close()

    def _write(self, row: Mapping[str, int | float]) -> dict[str, int | float | None]:
        plain = plain_row(row)
        assert "step" in plain, "a row needs its step"
        self._history.write(plain)
        if self._tensorboard is not None:
            for column, value in plain.items():
                if value is not None and column != "step":
                    self._tensorboard.add_scalar(f"{find_metric(column).group}/{column}", value, plain["step"])
        return plain

    def _write_log(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.write("".join(f"{stamp}  {line}\n" for line in text.splitlines() or [""]))
        self._log.flush()
