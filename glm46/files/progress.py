"""Progress of long work: a bar with rate and remaining time on a terminal, occasional lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as BytesPerSecond
from rich.text import Text

_SECONDS_BETWEEN_LINES = 15.0
_Advances: TypeAlias = AbstractContextManager[Callable[[int], None]]


def bytes_progress(title: str, total: int, report: Callable[[str], None]) -> _Advances:
    """Show progress inside the context; it yields a function to call with the number of bytes just processed.

    Args:
        total: total number of bytes.
        report: prints a line of text; used if stderr is not a terminal.
    """
    unit, size = ("kB", 1e3) if total < 1e6 else ("MB", 1e6)
    return _progress(title, total, report, (DownloadColumn(), BytesPerSecond()), unit, size, ".1f")


def tokens_progress(title: str, total: int, report: Callable[[str], None]) -> _Advances:
    """Show progress like `bytes_progress`, for tokens."""
    done = TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens")
    return _progress(title, total, report, (done, _TokensPerSecond()), "tokens", 1, ",.0f")


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} tokens/s", style="progress.data.speed")


@contextmanager
def _progress(
    title: str,
    total: int,
    report: Callable[[str], None],
    columns: tuple[ProgressColumn, ...],
    unit: str,
    size: float,
    rate_form: str,
) -> Iterator[Callable[[int], None]]:
    if sys.stderr.isatty():  # FORCE_COLOR makes a file a terminal for rich
        console = Console(stderr=True, force_terminal=True)
        columns = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)
        return
    started = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES and done:
            last = now
            rate = done / (now - started)
            report(
                f"{title}: {done / size:,.0f} of {total / size:,.0f} {unit}, {rate / size:{rate_form}} {unit}/s, "
                f"{max(0, total - done) / rate:.0f} s left"
            )

    yield advance
