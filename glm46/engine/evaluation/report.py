"""Tables and a picture of the results of an evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glm46.engine.observe.plots import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
"""Result of one measure, see `Measure.result`."""


Rows = list[tuple[str, ...]]
"""Header and rows of a table."""


def table(task: str, result: Result, window: int | None) -> list[str]:
    """Format the result of a task as lines; for ``window`` see `draw`."""
    if task == "position":
        return _position_table(result, window)
    tables = {"loss": _loss_table, "drafts": _drafts_table, "standard": _standard_table}
    return tables.get(task, _needle_table)(result)


def _lines(title: str, rows: Rows) -> list[str]:
    """Format a title and aligned rows: names to the left, numbers to the right."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return [
        title,
        *(
            f"  {first:<{widths[0]}}"
            + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            for first, *cells in rows
        ),
    ]


def _loss_table(result: Result) -> list[str]:
    rows: Rows = [("source", "nats per token", "perplexity", "bits per byte", "targets")]
    targets = {f"/{name}": sums["targets"] for name, sums in result["sources"].items()}
    for suffix, count in (targets | {"": sum(targets.values())}).items():
        loss, bits = (result["columns"][f"{column}{suffix}"] for column in ("loss", "bits_per_byte"))
        perplexity = f"{float(np.exp(loss)):,.2f}"
        rows.append((suffix[1:] or "all", f"{loss:.4f}", perplexity, f"{bits:.4f}", f"{count:,.0f}"))
    return _lines("Loss on held-out text", rows)


def _drafts_table(result: Result) -> list[str]:
    sources = result["sources"]
    total = {name: np.sum([counts[name] for counts in sources.values()], axis=0) for name in ("accepted", "drafts")}
    rows: Rows = [("source", *(f"depth {k + 1}" for k in range(len(total["drafts"]))), "drafts")]
    for name, counts in (sources | {"all": total}).items():
        shares = np.divide(counts["accepted"], np.maximum(counts["drafts"], 1.0))
        rows.append((name, *(f"{share:.4f}" for share in shares), f"{sum(counts['drafts']):,.0f}"))
    return _lines("Drafts of the prediction layers that are the model's most likely token", rows)


def _position_table(result: Result, window: int | None) -> list[str]:
    rows: Rows = [("positions", "nats per token", "standard error", "targets")]
    for bucket in result["buckets"]:
        error = "" if bucket["standard_error"] is None else f"{bucket['standard_error']:.4f}"
        place = f"{bucket['first']:,} to {bucket['last']:,}"
        rows.append((place, f"{bucket['loss']:.4f}", error, f"{bucket['tokens']:,}"))
    title = f"Loss by position in {result['documents']} documents of at least {result['length']:,} tokens"
    title, header, *lines = _lines(title, rows)
    is_longer = [window is not None and bucket["first"] >= window for bucket in result["buckets"]]
    return [
        title,
        header,
        *(line + "  longer than trained on" * longer for line, longer in zip(lines, is_longer, strict=True)),
    ]


def _needle_table(result: Result) -> list[str]:
    cells = _grid(result)
    rows: Rows = [("length", *(f"depth {depth:g}" for depth in next(iter(cells.values()))), "mean", "answer loss")]
    for length, row in cells.items():
        mean, loss = (result["columns"][f"{column}/{length}"] for column in ("needle", "needle_loss"))
        rows.append((f"{length:,}", *(f"{cell['exact']:.2f}" for cell in row.values()), f"{mean:.2f}", f"{loss:.4f}"))
    samples = result["cells"][0]["samples"]
    return _lines(f"Needle in a haystack: share of exact answers, {samples} for each length and depth", rows)


def _standard_table(result: Result) -> list[str]:
    rows: Rows = [("task", "metric", "examples", "documents", "value", "error")]
    for figure in result["figures"]:
        metric = figure["metric"] if figure["filter"] == "none" else f"{figure['metric']}, {figure['filter']}"
        examples, documents = ("" if figure[name] is None else str(figure[name]) for name in ("examples", "documents"))
        error = "" if figure["standard_error"] is None else f"{figure['standard_error']:.4f}"
        value = f"{figure['value']:.4f}" if abs(figure["value"]) < 1e4 else f"{figure['value']:.4g}"
        rows.append((figure["task"], metric, examples, documents, value, error))
    return _lines("Tasks of lm-eval", rows)


def _grid(result: Result) -> dict[int, dict[float, Result]]:
    """Group the cells of the needle by length and depth."""
    grid: dict[int, dict[float, Result]] = {}
    for cell in result["cells"]:
        grid.setdefault(cell["length"], {})[cell["depth"]] = cell
    return grid


def draw(results: Mapping[str, Result], title: str, window: int | None, output: Path) -> None:
    """Draw loss by position and the needle's matches side by side, and write the PNG atomically.

    Args:
        window: longest sequence that the model was trained on; None if unknown.
    """
    from matplotlib.figure import Figure

    tasks = [task for task in ("position", "needle") if task in results]
    figure = Figure(figsize=(6.2 * len(tasks), 4), dpi=100, layout="constrained")
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True):
        if task == "position":
            _draw_position(axes, results[task], window)
        else:
            _draw_needle(axes, results[task])
    figure.suptitle(title, fontsize="medium")
    save_picture(figure, output)


def _draw_position(axes: "Axes", result: Result, window: int | None) -> None:
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


def _draw_needle(axes: "Axes", result: Result) -> None:
    cells = _grid(result)
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
