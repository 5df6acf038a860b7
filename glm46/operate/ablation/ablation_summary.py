"""The files of an ablation's report: JSON, Markdown and a picture, from the folders of its runs."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from glm46.engine.observe.metrics import SHOWN, Shown
from glm46.engine.observe.plots import Run, draw
from glm46.files.durable import replace_durably
from glm46.operate.ablation.ablation_runs import AblationPlan, AblationRun
from glm46.operate.ablation.figures import RESULTS, Outcome, errors_by, gap_rows, layer_of, mean_errors, mean_rows
from glm46.operate.ablation.report import build_report, markdown, table
from glm46.operate.estimate.machine import Machine
from glm46.operate.launch.environment import describe_version

_NAME = "ablation"
"""Of the files, without their endings."""

_GAPS = {
    "loss": Shown("loss_gap", title="Loss: gap to the baseline", unit="per cent"),
    "grad_norm": Shown("grad_norm_gap", title="Gradient norm: gap to the baseline", unit="per cent"),
}
_CHARTS = [
    chart
    for shown in SHOWN
    if shown.column in ("loss", "grad_norm", "tokens_per_second")
    for chart in (shown, _GAPS.get(shown.column))
    if chart is not None
]
_FP8_CHARTS = [
    Shown(result, title=f"FP8: error of the {result.replace('_', ' ')}", unit="per cent, mean of a layer's products")
    for result in RESULTS
]


def write_report(plan: AblationPlan, about: Mapping[str, str], machine: Machine) -> None:
    """Write the report of what has been trained so far, and print its table and the names of its files.

    Args:
        about: entries at the top of the report: config, command.
    """
    outcomes = [_outcome(run) for run in plan.runs]
    about = {
        **about,
        "machine": machine.describe(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": describe_version(),
    }
    about["processes"] = ", ".join(map(str, sorted({run.processes for run in plan.runs})))
    report = build_report(outcomes, plan.keys, about)
    pictures = []
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed; pip install matplotlib, or glm46 with its extra [plot]")
    else:
        pictures = [*_draw(plan, outcomes), *_draw_fp8(plan, outcomes)]
    page, data = plan.folder / f"{_NAME}.md", plan.folder / f"{_NAME}.json"
    replace_durably(page, [markdown(report, [file.name for file in pictures]).encode()])
    replace_durably(data, [json.dumps(report, indent=1).encode()])
    print("\n".join(["", *table(report), "", *map(str, (page, data, *pictures))]))


def _outcome(run: AblationRun) -> Outcome:
    result, (train, validation) = run.result(), run.rows()
    if run.config.float8.emulate:  # its speed says nothing about that of kernels
        train = [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in train]
    return Outcome(
        run.variant, run.seed, str(run.folder), result.get("status", "missing"), result.get("error"),
        result.get("seconds", 0.0), train, validation, run.fp8_errors(),
    )  # fmt: skip


def _draw(plan: AblationPlan, outcomes: Sequence[Outcome]) -> Iterator[Path]:
    """Draw the means over the seeds of each variant."""
    baselines = {outcome.seed: outcome for outcome in outcomes if outcome.variant == next(iter(plan.keys))}
    lines = []
    for name in plan.keys:
        begun = [outcome for outcome in outcomes if outcome.variant == name and outcome.train]
        own = [outcome for outcome in begun if outcome.is_finished] or begun
        train = mean_rows([gap_rows(outcome, baselines[outcome.seed]) for outcome in own])
        if train:
            title = name if own[0].is_finished else f"{name} (not finished)"
            lines.append(Run(title, train, mean_rows([outcome.validation for outcome in own])))
    if lines:
        draw(lines, plan.folder / f"{_NAME}.png", ("tokens", "tokens"), _CHARTS)
        yield plan.folder / f"{_NAME}.png"


def _draw_fp8(plan: AblationPlan, outcomes: Sequence[Outcome]) -> Iterator[Path]:
    """Draw the errors of FP8 products over the layers; the prediction layers follow the others."""
    lines = []
    for outcome in outcomes:
        if outcome.fp8_errors:
            layers = errors_by(layer_of, outcome.fp8_errors).values()
            rows = [
                {"layer": number, **{result: 100 * error for result, error in mean_errors(own).items()}}
                for number, own in enumerate(layers)
            ]
            lines.append(Run(outcome.variant, rows, []))
    if lines:
        draw(lines, plan.folder / f"{_NAME}_fp8.png", ("layer", "layer"), _FP8_CHARTS)
        yield plan.folder / f"{_NAME}_fp8.png"
