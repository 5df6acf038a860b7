"""Console output of a run: one live line on a terminal, aligned plain lines elsewhere."""

from collections.abc import Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


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
    speed = row.get("budget_tokens_per_second", row.get("tokens_per_second"))
    if not speed:
        return "?"
    return duration((total_tokens - (row.get("tokens") or 0)) / speed)


def train_line(row: Mapping[str, float | None], total_tokens: int) -> str:
    """Format a training row as one line. Columns are aligned between rows."""
    done = 100.0 * (row.get("tokens") or 0) / total_tokens
    parts = [
        f"step {_whole(row.get('step')):>7}",
        f"{done:5.1f}%",
        f"loss {_number(row.get('loss'), '8.4f')}",
        f"grad {_number(row.get('grad_norm'), '7.3f')}",
        f"lr {_number(row.get('lr'), '.2e')}",
        f"{_whole(row.get('tokens_per_second')):>9} tokens/s",
    ]
    for name, label, form in (
        ("reward", "reward", "6.3f"),
        ("completion_tokens", "length", "6.1f"),
        ("entropy", "entropy", "6.3f"),
        ("mismatch_kl", "mismatch", "7.1e"),
        ("draft_acceptance_ratio", "drafts kept", "4.0%"),
        ("mfu", "mfu", "5.1%"),
        ("mtp_loss", "mtp", "7.4f"),
        ("expert_balance_cv", "balance", "5.2f"),
    ):
        if name in row:
            parts.append(f"{label} {_number(row[name], form)}")
    for name, label, form in (("memory_peak_gib", "GiB", "5.1f"), ("gpu_utilization_ratio", "GPU", "4.0%")):
        if f"{name}/min" in row:
            spread = "/".join(_number(row[f"{name}/{part}"], form) for part in ("min", "mean", "max"))
            parts.append(f"{label} {spread}")
    return "  ".join([*parts, f"{time_left(row, total_tokens)} left"])


def validation_line(row: Mapping[str, float | None]) -> str:
    """Format a validation row as one line: the loss over all sources, then the loss of each source."""
    parts = [f"step {_whole(row.get('step')):>7}"]
    if "validation_loss" in row:
        parts.append(f"validation loss {_number(row['validation_loss'], '.4f')}")
    if "validation_bits_per_byte" in row:
        parts.append(f"{_number(row['validation_bits_per_byte'], '.4f')} bits per byte")
    parts += [
        f"{column.partition('/')[2]} {_number(value, '.4f')}"
        for column, value in row.items()
        if column.startswith("validation_loss/")
    ]
    for prefix, label, form in (("validation_reward/", "reward", ".3f"), ("validation_pass/", "pass", ".1%")):
        parts += [
            f"{label} {column.removeprefix(prefix)} {_number(value, form)}"
            for column, value in row.items()
            if column.startswith(prefix)
        ]
    return "  ".join(parts)


def _whole(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _number(value: float | None, form: str) -> str:
    # `plain_row` replaces non-finite values by None.
    return "non-finite" if value is None else format(value, form)


class ConsoleView:
    """Console of one rank. On a terminal, rows update one live line and messages scroll above it."""

    def __init__(self, total_tokens: int, console: RichConsole | None = None):
        self._console = console or RichConsole(highlight=False, soft_wrap=True)
        self._total_tokens = total_tokens
        self._progress: Progress | None = None

    def train(self, row: Mapping[str, float | None]) -> None:
        """Show a training row."""
        if not self._console.is_terminal:
            self.line(train_line(row, self._total_tokens))
            return
        if self._progress is None:
            columns = (
                TextColumn("[bold]step {task.fields[step]}"),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TextColumn("{task.fields[metrics]}"),
            )
            self._progress = Progress(*columns, console=self._console)
            self._progress.add_task("", total=self._total_tokens, step="0", metrics="")
            self._progress.start()
        metrics = (
            f"loss {_number(row.get('loss'), '.4f')}  {_whole(row.get('tokens_per_second'))} tokens/s  "
            f"{time_left(row, self._total_tokens)} left"
        )
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=row.get("tokens") or 0, step=_whole(row.get("step")), metrics=metrics)

    def line(self, text: str) -> None:
        """Print a line, above the live line if there is one. Brackets are not markup."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Stop the live line and leave it on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
