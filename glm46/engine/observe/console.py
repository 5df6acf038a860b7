"""Console output of a run: aligned lines, and on a terminal a bar below them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from glm46.engine.observe.metrics import MOST_IMPORTANT, OPTIMISED, SHOWN, split_column

SPEEDS = ("budget_tokens_per_second", "tokens_per_second")
"""Columns with the speed at which the budget is spent, in order of preference."""

MAX_LINE_WIDTH = 120
"""Maximum characters of the line of a training row."""
_LEFT_WIDTH = len("59m 59s left")
_GAP = "  "

_LEAST_BAR = 18
"""Columns of a terminal for "step", a bar of five columns and the percentage."""


def duration(seconds: float) -> str:
    """Format seconds in the two largest units: 42s, 3m 05s, 2h 07m, 4d 03h."""
    rounded = max(round(seconds), 0)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m {rounded % 60:02d}s"
    if rounded < 86400:
        return f"{rounded // 3600}h {rounded % 3600 // 60:02d}m"
    return f"{rounded // 86400}d {rounded % 86400 // 3600:02d}h"


def short_number(value: float) -> str:
    """Format a number for an axis: 1.5M, 20B, 0.25, 3e-04."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.4g}"


def time_left(row: Mapping[str, float | None], total_tokens: int) -> str:
    """Format the time until the last token at the speed of this row; "?" if the speed is unknown."""
    speed = next((row[name] for name in SPEEDS if name in row), None)
    if not speed:
        return "?"
    return duration((total_tokens - (row.get("tokens") or 0)) / speed)


def train_line(row: Mapping[str, float | None], total_tokens: int) -> str:
    """Format a training row as one line of at most `MAX_LINE_WIDTH` characters, with the most important columns of the
    row. Columns are aligned between rows."""
    done = 100.0 * (row.get("tokens") or 0) / total_tokens
    begin = f"step {row['step']:7,}{_GAP}{done:5.1f}%"
    columns = _columns_with_room(row, MAX_LINE_WIDTH - len(begin) - len(_GAP) - _LEFT_WIDTH)
    return _GAP.join([begin, *_parts(row, columns), f"{time_left(row, total_tokens)} left"])


def _columns_with_room(row: Mapping[str, float | None], room: int) -> list[str]:
    """Return the most important columns of a row whose texts fit in this many characters. The loss of a policy is
    dropped: it is constant or noise, and the entropy is more informative."""
    texts = {shown.column: shown.text for shown in SHOWN}
    columns = []
    for column in MOST_IMPORTANT:
        if column not in row or (column == "loss" and "entropy" in row):
            continue
        width = len(_GAP) + len(
            texts[column].format(0.0)
        )  # width of a zero instead of the value: all rows of a run show equal columns
        if width <= room:
            columns.append(column)
            room -= width
    return columns


def validation_line(row: Mapping[str, float | None]) -> str:
    """Format a validation row as one line: each metric over all sources, then for each source or set."""
    parts = [f"step {row['step']:7,}"]
    for column, value in row.items():
        name, part = split_column(column)
        for shown in SHOWN:
            if shown.validation == name:
                label, *_, number = _filled(shown.text, value).split()
                parts.append(f"{label} {part} {number}" if part else f"validation {label} {number}")
    if "validation_bits_per_byte" in row:
        parts.append(f"{_filled('{:.4f}', row['validation_bits_per_byte'])} bits per byte")
    return "  ".join(parts)


def _parts(row: Mapping[str, float | None], columns: Sequence[str]) -> list[str]:
    """Return the texts of the columns that the row has."""
    available = [shown for shown in SHOWN if shown.text and shown.column in columns and shown.column in row]
    return [_filled(shown.text, row[shown.column]) for shown in available]


def _filled(text: str, value: float | None) -> str:
    # `plain_row` replaces non-finite values by None.
    return re.sub(r"\{.*\}", "non-finite", text) if value is None else text.format(value)


class ConsoleView:
    """Console of one rank: a line for each row and message. On a terminal a bar below them shows the progress and the
    optimised columns (`OPTIMISED`); it disappears when it is closed.

    Args:
        total_tokens: budget of the run.
        console: None for standard output.
    """

    def __init__(self, total_tokens: int, console: RichConsole | None = None):
        self._console = console or RichConsole(highlight=False, soft_wrap=True)
        self._total_tokens = total_tokens
        self._progress: Progress | None = None
        self._speed: dict[str, float | None] = {}

    def train(self, row: Mapping[str, float | None]) -> None:
        """Show a training row."""
        self._speed = {name: row[name] for name in SPEEDS if name in row}
        self.row(train_line(row, self._total_tokens))
        self.step(row)

    def step(self, row: Mapping[str, float | None]) -> None:
        """Move the bar to a step; without a terminal there is no bar.

        Args:
            row: ``step``, ``tokens`` and the columns of the step.
        """
        if not self._console.is_terminal:
            return
        optimised = next((columns for columns in OPTIMISED if columns[0] in row), ())
        remaining = f"{time_left({**row, **self._speed}, self._total_tokens)} left"
        texts = [" ".join(text.split()) for text in (*_parts(row, optimised), *_parts(self._speed, SPEEDS), remaining)]
        step = f"{row['step']:,}"
        room = self._console.width - len(step) - _LEAST_BAR
        while len(texts) > 1 and len("  ".join(texts)) > room:  # rich would cut the last number
            del texts[-2 if len(texts) > 2 else -1]
        fields: dict[str, Any] = {"step": step, "metrics": "  ".join(texts), "completed": row["tokens"]}
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], **fields)
            return
        columns = (TextColumn("[bold]step {task.fields[step]}"), BarColumn(bar_width=24), TaskProgressColumn())
        metrics = TextColumn("{task.fields[metrics]}", markup=False)
        self._progress = Progress(*columns, metrics, console=self._console, transient=True)
        self._progress.add_task("", total=self._total_tokens, **fields)
        self._progress.start()

    def row(self, text: str) -> None:
        """Print the line of a row; a narrow terminal wraps it between numbers."""
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)

    def line(self, text: str) -> None:
        """Print a message, above the bar if there is one. Brackets are not markup."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Remove the bar; a later step shows it again. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
