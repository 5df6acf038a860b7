"""Tables of the results of an evaluation."""

from collections.abc import Mapping
from typing import Any

import numpy as np

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
    total["length"] = result["columns"]["mtp_acceptance_length"]
    rows: Rows = [("source", *(f"depth {k + 1}" for k in range(len(total["drafts"]))), "tokens per step", "drafts")]
    for name, counts in (sources | {"all": total}).items():
        shares = np.divide(counts["accepted"], np.maximum(counts["drafts"], 1.0))
        length = f"{counts['length']:.3f}"
        rows.append((name, *(f"{share:.4f}" for share in shares), length, f"{sum(counts['drafts']):,.0f}"))
    return _lines("Share of MTP drafts that equal the model's own most likely token", rows)


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
    cells = grid(result)
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


def grid(result: Result) -> dict[int, dict[float, Result]]:
    """Group the cells of the needle by length and depth."""
    grid: dict[int, dict[float, Result]] = {}
    for cell in result["cells"]:
        grid.setdefault(cell["length"], {})[cell["depth"]] = cell
    return grid
