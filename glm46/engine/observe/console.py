"""Console output of a run: aligned lines, and on a terminal a bar below them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from glm46.engine.observe.metrics import OPTIMISED, SHOWN, split_column

SPEEDS = ("budget_tokens_per_second", "tokens_per_second")
"""Columns of the speed at which the budget is spent: the first one that a row has."""

_LEAST_BAR = 18
"""Columns of a terminal for "step", a bar of five columns and the per cent."""


def duration(seconds: float) -> str:
    """Format seconds in the two largest units: 42s, 3m 05s, 2h 07m, 4d 03h."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def short_number(value: float) -> str:
    """A number for an axis: 1.5M, 20B, 0.25, 3e-04."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.4g}"


def time_left(row: Mapping[str, float | None], total_tokens: int) -> str:
    """Time until the last token at the speed of this row; "?" if the speed is unknown."""
    speed = next((row[name] for name in SPEEDS if name in row), None)
    if not speed:
        return "?"
    return duration((total_tokens - (row.get("tokens") or 0)) / speed)


def train_line(row: Mapping[str, float | None], total_tokens: int) -> str:
    """Format a training row as one line, with what the row has. Columns are aligned between rows."""
    done = 100.0 * (row.get("tokens") or 0) / total_tokens
    parts = [f"step {row['step']:7,}", f"{done:5.1f}%", *_parts(row, [shown.column for shown in SHOWN])]
    for name, label, text in (("memory_peak_gib", "GiB", "{:5.1f}"), ("gpu_utilization_ratio", "GPU", "{:4.0%}")):
        if f"{name}/min" in row:
            spread = "/".join(_filled(text, row[f"{name}/{part}"]) for part in ("min", "mean", "max"))
            parts.append(f"{label} {spread}")
    return "  ".join([*parts, f"{time_left(row, total_tokens)} left"])


def validation_line(row: Mapping[str, float | None]) -> str:
    """Format a validation row as one line: each figure over all sources, then that of each source or set."""
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
    """Texts of those of these columns that a row has."""
    of = [shown for shown in SHOWN if shown.text and shown.column in columns and shown.column in row]
    return [_filled(shown.text, row[shown.column]) for shown in of]


def _filled(text: str, value: float | None) -> str:
    # `plain_row` replaces non-finite values by None.
    return re.sub(r"\{.*\}", "non-finite", text) if value is None else text.format(value)


class ConsoleView:
    """Console of one rank: a line for each row and message. On a terminal a bar below them shows how far the run is and
    what it optimises (`OPTIMISED`); it disappears when it is closed.

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
        """Move the bar to a step; without a terminal there is none.

        Args:
            row: ``step``, ``tokens`` and the columns that the step has.
        """
        if not self._console.is_terminal:
            return
        optimised = next((columns for columns in OPTIMISED if columns[0] in row), ())
        left = f"{time_left({**row, **self._speed}, self._total_tokens)} left"
        texts = [" ".join(text.split()) for text in (*_parts(row, optimised), *_parts(self._speed, SPEEDS), left)]
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
        """Print the line of a row; a narrow terminal shows it in several, without a number that is cut in two."""
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)

    def line(self, text: str) -> None:
        """Print a message, above the bar if there is one. Brackets are not markup."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Remove the bar; a later step shows it again. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
