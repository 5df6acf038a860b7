"""Charts of the metrics of runs."""

import itertools
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from glm46.engine.observe.console import short_number
from glm46.engine.observe.history import RunRows
from glm46.engine.observe.metrics import SHOWN, Shown, find_metric, split_column
from glm46.files.durable import replace_durably

_NAN = float("nan")


def draw(runs: Sequence[RunRows], output: Path, x_axis: tuple[str, str], charts: Sequence[Shown] = SHOWN) -> None:
    """Draw the charts for which some run has values, and write the PNG atomically.

    Args:
        x_axis: unit and column of the horizontal axis.
    """
    available = {split_column(column)[0] for run in runs for row in (*run.train, *run.validation) for column in row}
    panels = [
        chart
        for chart in charts
        if chart.title and available.intersection((chart.column, chart.mean, chart.validation))
    ]
    panel_rows = -(-len(panels) // 2)
    legend_rows = -(-len(runs) // 3)
    figure = Figure(figsize=(13, 4 * panel_rows + 0.3 * legend_rows), dpi=120, layout="constrained")
    grid = figure.subplots(panel_rows, 2, squeeze=False).flatten()
    colours = [f"C{number % 10}" for number in range(len(runs))]
    for axes, panel in zip(grid, panels, strict=False):
        for run, colour in zip(runs, colours, strict=True):
            _draw_run(axes, panel, run, colour, x_axis[1])
        _label(axes, panel, x_axis[0])
    for axes in grid[len(panels) :]:
        axes.remove()
    names = zip((run.name for run in runs), colours, strict=True)
    entries = [Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in names]
    if any(run.validation for run in runs):
        entries.append(Line2D([], [], color="0.3", linestyle="", marker="o", label="validation"))
    if "loss_mean" in available:
        entries.append(Line2D([], [], color="0.3", linewidth=1.8, label="mean loss since the previous row"))
        entries.append(Line2D([], [], color="0.3", linewidth=0.7, alpha=0.5, label="loss of one step"))
    figure.legend(handles=entries, loc="outside upper center", ncols=min(len(entries), 5), frameon=False)
    save_picture(figure, output)


def save_picture(figure: Figure, output: Path) -> None:
    """Write a picture atomically, in the format of its file extension."""
    picture = BytesIO()
    figure.savefig(picture, format=output.suffix[1:])
    replace_durably(output, [picture.getvalue()])


def _draw_run(axes: Axes, panel: Shown, run: RunRows, colour: str, x: str) -> None:
    steps = _values(run.train, (x,))
    columns = (panel.mean or panel.column, panel.column)
    if panel.mean is not None:
        axes.plot(steps, _values(run.train, columns[1:]), color=colour, linewidth=0.7, alpha=0.4)
    # A line of one point is invisible.
    marker = "." if len(steps) == 1 else None
    axes.plot(steps, _values(run.train, columns), color=colour, linewidth=1.8, marker=marker)
    for column, shape in zip(_of_validation(panel, run), itertools.cycle("os^Dv")):
        xs = _values(run.validation, (x,))
        ys = _values(run.validation, (column,))
        axes.plot(xs, ys, shape, color=colour, markersize=6, markeredgecolor="white", zorder=3, clip_on=False)
        if part := split_column(column)[1]:
            axes.annotate(part, (xs[-1], ys[-1]), fontsize=7)


def _of_validation(panel: Shown, run: RunRows) -> list[str]:
    """Return the columns for the points of a chart: the value over all sources, or the values per set without it."""
    available = {column for row in run.validation for column in row}
    if panel.validation is not None and panel.validation in available:
        return [panel.validation]
    return sorted(column for column in available if split_column(column)[0] == panel.validation)


def _values(rows: Sequence[dict[str, Any]], columns: tuple[str, ...]) -> list[float]:
    """Return for each row the value of its first available column; NaN (a gap) if it is missing or not finite."""
    values = [next((row[column] for column in columns if column in row), None) for row in rows]
    return [value if isinstance(value, int | float) else _NAN for value in values]


def _label(axes: Axes, panel: Shown, x_axis: str) -> None:
    unit = find_metric(panel.column).unit if panel.unit is None else panel.unit
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_xlabel(x_axis)
    axes.set_ylabel("" if unit == "1" else unit)
    axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
    axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
    axes.set_xlim(left=0)
    if panel.starts_at_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
