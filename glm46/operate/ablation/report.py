"""Writes the report of an ablation: a table of loss and speed by variant, with the gaps to the baseline."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from glm46.config.faults import show
from glm46.files.durable import replace_durably
from glm46.operate.ablation.ablation_runs import FINISHED, AblationPlan, AblationRun
from glm46.operate.estimate.machine import Machine
from glm46.operate.launch.environment import describe_version

FILE_NAME = "ablation.md"

Row = Mapping[str, Any]

_FINAL_SHARE = 0.1
"""The final loss is the mean over this last share of the tokens, because a single step has the noise of its batch."""

_COLUMNS = {
    "final_loss": ("final loss", ".4f", "+.3f"),
    "validation_loss": ("validation loss", ".4f", "+.3f"),
    "tokens_per_second": ("tokens/s", ",.0f", "+.1f"),
}
"""Figures of a run: header, format, and format of the gap in per cent."""

Figures = Mapping[str, float]


def run_figures(train: Sequence[Row], validation: Sequence[Row]) -> dict[str, float]:
    """Compute the figures of a finished run: the mean loss of the last tenth of the tokens, the loss of the last
    validation, and the median speed (the first row of each start includes warm-up). A figure is absent if its rows lack
    it."""
    figures = {}
    first_tokens = (1 - _FINAL_SHARE) * train[-1]["tokens"] if train else 0
    losses = [row.get("loss_mean", row.get("loss")) for row in train if row["tokens"] >= first_tokens]
    if losses and None not in losses:
        figures["final_loss"] = statistics.fmean(losses)
    if validation and validation[-1].get("validation_loss") is not None:
        figures["validation_loss"] = validation[-1]["validation_loss"]
    speeds = [row["tokens_per_second"] for row in train if row.get("tokens_per_second")]
    if speeds:
        figures["tokens_per_second"] = statistics.median(speeds)
    return figures


def table(by_variant: Mapping[str, Mapping[int, Figures]], seeds: int) -> list[str]:
    """Format the lines of the table.

    Args:
        by_variant: figures of the finished runs by seed; the first variant is the baseline.
        seeds: number of runs of each variant.
    """
    headers = ["variant"]
    for header, _, _ in _COLUMNS.values():
        headers += [header, "gap, %"]
    headers.append("runs")
    lines = [_line(headers), _line(["---"] * len(headers))]
    baseline = next(iter(by_variant.values()))
    for name, by_seed in by_variant.items():
        cells = [name]
        for figure, (_, form, gap_form) in _COLUMNS.items():
            values = [figures[figure] for figures in by_seed.values() if figure in figures]
            gaps = [] if by_seed is baseline else _gaps(by_seed, baseline, figure)
            cells += [_mean_and_spread(values, form), _mean_and_spread(gaps, gap_form)]
        lines.append(_line([*cells, f"{len(by_seed)} of {seeds}"]))
    return lines


def write_report(plan: AblationPlan, command: str, machine: Machine) -> None:
    """Write the report of all runs so far, and print its table and the name of its file."""
    seeds = list(dict.fromkeys(run.seed for run in plan.runs))
    by_variant: dict[str, dict[int, Figures]] = {name: {} for name in plan.keys}
    for run in plan.runs:
        if run.status() == FINISHED:
            by_variant[run.variant][run.seed] = _figures(run)
    lines = table(by_variant, len(seeds))
    spread = "mean ± standard deviation over the seeds" if len(seeds) > 1 else "one seed, so without a spread"
    processes = ", ".join(map(str, sorted({run.processes for run in plan.runs})))
    page = [
        "# Ablation",
        "",
        f"`{command}`",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M')}, {describe_version()}, {machine.describe()}, processes of a run: "
        f"{processes}. Seeds {', '.join(map(str, seeds))}: {spread}.",
        "",
        *lines,
        "",
        f"Gaps are in per cent of the run of {next(iter(plan.keys))} with the same seed. Final loss: mean over the "
        "last tenth of the tokens. Tokens/s: median of the rows; a run that emulates products has none.",
        "",
        "| variant | keys |",
        "|---|---|",
        *(f"| {name} | {_describe_keys(keys)} |" for name, keys in plan.keys.items()),
        "",
        "| run | state | folder |",
        "|---|---|---|",
        *(f"| {run.title} | {run.status()} | {run.folder} |" for run in plan.runs),
        "",
    ]
    file = plan.folder / FILE_NAME
    replace_durably(file, ["\n".join(page).encode()])
    print("\n".join(["", *lines, "", str(file)]))


def _figures(run: AblationRun) -> Figures:
    figures = run_figures(*run.rows())
    if run.config.float8.emulate:  # the speed of emulated products is not comparable with that of kernels
        figures.pop("tokens_per_second", None)
    return figures


def _gaps(by_seed: Mapping[int, Figures], baseline: Mapping[int, Figures], figure: str) -> list[float]:
    """Return the gaps to the baseline's runs with the same seeds, in per cent."""
    gaps = []
    for seed, figures in by_seed.items():
        reference = baseline.get(seed, {}).get(figure)
        if figure in figures and reference:
            gaps.append(100.0 * (figures[figure] / reference - 1.0))
    return gaps


def _mean_and_spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form.lstrip('+')}}"


def _describe_keys(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key} = {show(value)}`" for key, value in keys.items()) or "as the file"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
