"""Progress of long work: a bar with rate and remaining time on a terminal, occasional lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def bytes_progress(title: str, total: int, report: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Show progress inside the context; it yields a function to call with the number of bytes just processed.

    Args:
        total: bytes of the whole work.
        report: prints a line of text; used if stderr is not a terminal.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.advance(task, done)
        return
    yield _Lines(title, total, report).advance


class _Lines:
    def __init__(self, title: str, total: int, report: Callable[[str], None]):
        self._title, self._total, self._report = title, total, report
        self._done, self._started = 0, time.monotonic()
        self._last = self._started

    def advance(self, done: int) -> None:
        self._done += done
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES and self._done:
            self._last = now
            rate = self._done / (now - self._started)
            left = max(0, self._total - self._done) / rate
            self._report(
                f"{self._title}: {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s, "
                f"{left:.0f} s left"
            )
