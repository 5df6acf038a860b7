"""Progress of long work: a bar with rate and remaining time on a terminal, occasional lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

_SECONDS_BETWEEN_LINES = 15.0


def bytes_progress(title: str, total: int, report: Callable[[str], None]):
    """Show progress inside the context; it yields a function to call with the number of bytes just processed.

    Args:
        total: bytes of the whole work.
        report: prints a line of text; used if stderr is not a terminal.
    """
    return _progress((DownloadColumn(), TransferSpeedColumn()), _Lines(title, total, report, "MB", 1e6, ".1f"))


def tokens_progress(title: str, total: int, report: Callable[[str], None]):
    """As `bytes_progress`, for tokens."""
    done = TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens")
    return _progress((done, _TokensPerSecond()), _Lines(title, total, report, "tokens", 1, ",.0f"))


@contextmanager
def _progress(columns: tuple[ProgressColumn, ...], lines: "_Lines") -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lines.advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(lines.title, total=lines.total)
        yield lambda done: bar.advance(task, done)


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} tokens/s", style="progress.data.speed")


class _Lines:
    def __init__(self, title: str, total: int, report: Callable[[str], None], unit: str, size: float, rate_form: str):
        self.title, self.total, self._report = title, total, report
        self._unit, self._size, self._rate_form = unit, size, rate_form
        self._done, self._started = 0, time.monotonic()
        self._last = self._started

    def advance(self, done: int) -> None:
        self._done += done
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES and self._done:
            self._last = now
            rate = self._done / (now - self._started)
            left = max(0, self.total - self._done) / rate
            self._report(
                f"{self.title}: {self._done / self._size:,.0f} of {self.total / self._size:,.0f} {self._unit}, "
                f"{rate / self._size:{self._rate_form}} {self._unit}/s, {left:.0f} s left"
            )
