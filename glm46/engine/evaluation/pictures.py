"""A picture of the results of an evaluation. Needs matplotlib, which is optional: the extra [plot]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glm46.engine.evaluation.report import Result, grid
from glm46.engine.observe.plots import save_picture


def draw(results: Mapping[str, Result], title: str, window: int | None, output: Path) -> None:
    """Draw loss by position and the needle's matches side by side, and write the PNG atomically.

    Args:
        window: longest sequence that the model was trained on; None if unknown.
    """
    tasks = [task for task in ("position", "needle") if task in results]
    figure = Figure(figsize=(6.2 * len(tasks), 4), dpi=100, layout="constrained")
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True):
        if task == "position":
            _draw_position(axes, results[task], window)
        else:
            _draw_needle(axes, results[task])
    figure.suptitle(title, fontsize="medium")
    save_picture(figure, output)


def _draw_position(axes: Axes, result: Result, window: int | None) -> None:
    buckets = result["buckets"]
    places = [(bucket["first"] + bucket["last"] + 1) / 2 for bucket in buckets]
    errors = [bucket["standard_error"] or 0.0 for bucket in buckets]
    axes.errorbar(places, [bucket["loss"] for bucket in buckets], yerr=errors, marker="o", capsize=3)
    if window is not None:
        axes.axvline(window, color="0.4", linestyle="--", label=f"trained on {window:,} tokens")
        axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the document", ylabel="nats per token", title="Loss by position")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)


def _draw_needle(axes: Axes, result: Result) -> None:
    cells = grid(result)
    depths = list(next(iter(cells.values())))
    # If no answer is exact, show the loss of the answers, which still differs between lengths and depths.
    is_exact = any(cell["exact"] for cell in result["cells"])
    figure, title = (
        ("exact", "share of exact answers") if is_exact else ("answer_loss", "no exact answer; nats per token")
    )
    values = [[row[depth][figure] for row in cells.values()] for depth in depths]
    colours: dict[str, Any] = {"cmap": "RdYlGn", "vmax": 1.0} if is_exact else {"cmap": "cividis_r", "alpha": 0.6}
    axes.imshow(values, aspect="auto", vmin=0.0 if is_exact else None, **colours)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center")
    axes.set_xticks(range(len(cells)), [f"{length:,}" for length in cells])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set(xlabel="length in tokens", ylabel="depth", title=f"Needle: {title}")
