"""Tables and a picture of the results of an evaluation."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glm46.files.durable import replace_durably

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
"""Of one measure, see `Measure.result`."""


def table(task: str, result: Result, window: int | None) -> list[str]:
    """Lines of the result of a task; ``window`` as for `draw`."""
    if task == "position":
        return _position_table(result, window)
    if task == "standard":
        return _standard_table(result)
    if task == "against":
        return _against_table(result)
    if task == "drafts":
        return _drafts_table(result)
    return _loss_table(result) if task == "loss" else _needle_table(result)


def _loss_table(result: Result) -> list[str]:
    lines = [
        "Loss on held-out text",
        f"  {'source':<24}{'nats per token':>16}{'perplexity':>14}{'bits per byte':>16}{'targets':>12}",
    ]
    targets = {f"/{name}": sums["targets"] for name, sums in result["sources"].items()}
    for suffix, count in (targets | {"": sum(targets.values())}).items():
        loss, bits = (result["columns"][f"{column}{suffix}"] for column in ("loss", "bits_per_byte"))
        lines.append(
            f"  {suffix[1:] or 'all':<24}{loss:>16.4f}{float(np.exp(loss)):>14,.2f}{bits:>16.4f}{count:>12,.0f}"
        )
    return lines


def _drafts_table(result: Result) -> list[str]:
    sources = result["sources"]
    total = {name: np.sum([own[name] for own in sources.values()], axis=0) for name in ("accepted", "drafts")}
    depths = [f"depth {k + 1}" for k in range(len(total["drafts"]))]
    lines = [
        "Drafts of the prediction layers that are the model's most likely token",
        f"  {'source':<24}" + "".join(f"{name:>12}" for name in depths) + f"{'drafts':>12}",
    ]
    for name, own in (sources | {"all": total}).items():
        shares = np.divide(own["accepted"], np.maximum(own["drafts"], 1.0))
        lines.append(f"  {name:<24}" + "".join(f"{share:>12.4f}" for share in shares) + f"{sum(own['drafts']):>12,.0f}")
    return lines


def _against_table(result: Result) -> list[str]:
    lines = [
        f"Against {result['other']}",
        f"  {'source':<24}{'nats per token':>16}{'difference':>13}{'KL divergence':>15}{'same top-1':>12}"
        f"{'calibration errors':>20}{'targets':>12}",
    ]
    names = ("loss", "loss_difference", "kl", "same_top1", "calibration_error", "other_calibration_error")
    for name, targets in (result["targets"] | {"": sum(result["targets"].values())}).items():
        loss, difference, kl, same, error, other_error = (
            result["columns"][f"{column}/{name}" if name else column] for column in names
        )
        lines.append(
            f"  {name or 'all':<24}{loss:>16.4f}{difference:>+13.5f}{kl:>15.6f}{same:>12.4f}"
            f"{f'{error:.4f} {other_error:.4f}':>20}{targets:>12,}"
        )
    return lines


def _position_table(result: Result, window: int | None) -> list[str]:
    lines = [
        f"Loss by position in {result['documents']} documents of at least {result['length']:,} tokens",
        f"  {'positions':<24}{'nats per token':>16}{'standard error':>16}{'targets':>12}",
    ]
    for bucket in result["buckets"]:
        place = f"{bucket['first']:,} to {bucket['last']:,}"
        error = "" if bucket["standard_error"] is None else f"{bucket['standard_error']:.4f}"
        note = "" if window is None or bucket["first"] < window else "  longer than trained on"
        lines.append(f"  {place:<24}{bucket['loss']:>16.4f}{error:>16}{bucket['tokens']:>12,}{note}")
    return lines


def _needle_table(result: Result) -> list[str]:
    cells = _grid(result)
    depths = list(next(iter(cells.values())))
    samples = result["cells"][0]["samples"]
    lines = [
        f"Needle in a haystack: share of exact answers, {samples} for each length and depth",
        f"  {'length':<8}"
        + "".join(f"{f'depth {depth:g}':>12}" for depth in depths)
        + f"{'mean':>8}{'answer loss':>13}",
    ]
    for length, row in cells.items():
        mean, loss = (result["columns"][f"{column}/{length}"] for column in ("needle", "needle_loss"))
        exact = "".join(f"{row[depth]['exact']:>12.2f}" for depth in depths)
        lines.append(f"  {length:<8,}{exact}{mean:>8.2f}{loss:>13.4f}")
    return lines


def _standard_table(result: Result) -> list[str]:
    lines = [
        "Tasks of lm-eval",
        f"  {'task':<32}{'metric':<28}{'examples':>9}{'documents':>11}{'value':>12}{'error':>9}",
    ]
    for one in result["figures"]:
        metric = one["metric"] if one["filter"] == "none" else f"{one['metric']}, {one['filter']}"
        examples, documents = (" " if one[name] is None else one[name] for name in ("examples", "documents"))
        error = "" if one["standard_error"] is None else f"{one['standard_error']:.4f}"
        value = f"{one['value']:.4f}" if abs(one["value"]) < 1e4 else f"{one['value']:.4g}"
        lines.append(f"  {one['task']:<32}{metric:<28}{examples:>9}{documents:>11}{value:>12}{error:>9}")
    return lines


def _grid(result: Result) -> dict[int, dict[float, Result]]:
    """Cells of the needle by length and depth."""
    grid: dict[int, dict[float, Result]] = {}
    for cell in result["cells"]:
        grid.setdefault(cell["length"], {})[cell["depth"]] = cell
    return grid


def draw(results: Mapping[str, Result], title: str, window: int | None, output: Path) -> None:
    """Draw loss by position and the needle's matches side by side, and write the PNG completely or not at all.

    Args:
        window: longest sequence that the model was trained on, None if unknown.
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
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_durably(output, [picture.getvalue()])


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
    # Where no answer is exact, how far the answers are from it still tells lengths and depths apart.
    is_exact = any(cell["exact"] for cell in result["cells"])
    figure, title = (
        ("exact", "share of exact answers") if is_exact else ("answer_loss", "no exact answer; nats per token")
    )
    values = [[row[depth][figure] for row in cells.values()] for depth in depths]
    bounds = {"vmin": 0.0, "vmax": 1.0, "cmap": "RdYlGn"} if is_exact else {"cmap": "cividis_r", "alpha": 0.6}
    axes.imshow(values, aspect="auto", **bounds)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center")
    axes.set_xticks(range(len(cells)), [f"{length:,}" for length in cells])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set(xlabel="length in tokens", ylabel="depth", title=f"Needle: {title}")
