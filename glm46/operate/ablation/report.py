"""The report of an ablation: figures by variant over its seeds, as JSON, as Markdown and as a picture."""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from glm46.config.faults import counted, show
from glm46.engine.observe.console import duration
from glm46.engine.observe.metrics import SHOWN, Shown
from glm46.engine.observe.plots import Run, draw
from glm46.files.durable import replace_durably
from glm46.operate.ablation.ablation_runs import AblationPlan, AblationRun
from glm46.operate.ablation.figures import (
    RESULTS,
    Outcome,
    Statistic,
    errors_by,
    gap_rows,
    kind_of,
    layer_of,
    mean_errors,
    mean_rows,
    paired_test,
    run_figures,
    statistic,
)
from glm46.operate.estimate.machine import Machine
from glm46.operate.launch.environment import describe_version

_COLUMNS = (
    ("final loss", "final_loss", ".4f"),
    ("gap, %", "final_loss_gap", "+.3f"),
    ("validation loss", "validation_loss", ".4f"),
    ("gap, %", "validation_loss_gap", "+.3f"),
    ("gradient norm: gap, %", "grad_norm_gap", ".2f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("gap, %", "tokens_per_second_gap", "+.1f"),
    ("memory, GiB", "memory_gib", ".2f"),
    *((f"FP8 error: {result.replace('_', ' ')}, %", f"fp8_{result}_error", ".2f") for result in RESULTS),
)
"""Header, figure and format of the columns of the table."""


def build_report(
    outcomes: Sequence[Outcome], keys: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The report as plain values for JSON.

    Args:
        outcomes: of all variants and seeds.
        keys: by variant, dotted keys with the values of the variant. The first variant is the baseline.
        about: further entries at the top, such as the command.
    """
    baseline = next(iter(keys))
    references = {outcome.seed: outcome for outcome in outcomes if outcome.variant == baseline}
    variants = []
    for name, own in keys.items():
        runs = []
        for outcome in outcomes:
            if outcome.variant == name:
                described = asdict(replace(outcome, train=(), validation=()))
                figures = run_figures(outcome, references.get(outcome.seed)) if outcome.is_finished else {}
                runs.append({key: value for key, value in described.items() if value != ()} | {"figures": figures})
        names = dict.fromkeys(figure for run in runs for figure in run["figures"])
        means = {figure: statistic([run["figures"][figure] for run in runs if figure in run["figures"]])
                 for figure in names}  # fmt: skip
        variants.append({"name": name, "keys": dict(own), "runs": runs,
                         "figures": {figure: asdict(value) for figure, value in means.items() if value}})  # fmt: skip
    return {**about, "baseline": baseline, "seeds": sorted(references), "variants": variants}


def markdown(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The report as a page.

    Args:
        pictures: file names.
    """
    seeds, variants = report["seeds"], report["variants"]
    spread = "mean ± standard deviation over the seeds" if len(seeds) > 1 else "one seed, so without a spread"
    return "\n".join([
        f"# Ablation of {report['config']}",
        "",
        f"`{report['command']}`",
        "",
        f"{report['date']}, {report['versions']}, {report['machine']}, processes of a run: {report['processes']}. "
        f"Baseline: {report['baseline']}. Seeds {', '.join(map(str, seeds))}: {spread}.",
        "",
        *table(report),
        "",
        "Gaps are in per cent of the baseline's run with the same seed, data and steps. Final loss: mean over the last "
        "tenth of the tokens. Gradient norm: mean over the rows of the absolute gap. Tokens/s: median of the rows; "
        "other load on the machine is in it; a run that emulates products has none. Memory: the largest peak of a GPU, "
        "without GPUs of a process.",
        *_test_lines(report),
        *(f"\n![{name.rpartition('.')[0]}]({name})" for name in pictures),
        "",
        "| variant | keys |",
        "|---|---|",
        *(f"| {variant['name']} | {_keys(variant['keys'])} |" for variant in variants),
        "",
        "| run | state | time | folder |",
        "|---|---|---|---|",
        *(
            f"| {run['variant']}, seed {run['seed']} | {_state(run)} | {duration(run['seconds'])} | {run['folder']} |"
            for variant in variants
            for run in variant["runs"]
        ),
        *_fp8_lines(variants),
        "",
    ])  # fmt: skip


def table(report: Mapping[str, Any]) -> list[str]:
    """The table of the variants; columns that no variant has are left out."""
    shown = [column for column in _COLUMNS if any(column[1] in variant["figures"] for variant in report["variants"])]
    lines = [_line(["variant", *(header for header, _, _ in shown), "runs"]), _line(["---"] * (len(shown) + 2))]
    for variant in report["variants"]:
        cells = [_cell(variant["figures"].get(figure), form) for _, figure, form in shown]
        finished = sum(run["status"] == "finished" for run in variant["runs"])
        lines.append(_line([variant["name"], *cells, f"{finished} of {len(variant['runs'])}"]))
    return lines


def _test_lines(report: Mapping[str, Any]) -> list[str]:
    """The intervals and tests of the gaps of losses; none for a single seed."""
    lines, noise = [], []
    for name in ("final_loss", "validation_loss"):
        for variant in report["variants"]:
            found = variant["figures"].get(name)
            if variant["name"] == report["baseline"] and found is not None and found["spread"] is not None:
                noise.append(f"{100 * found['spread'] / found['mean']:.3f} % in {name.replace('_', ' ')}")
            gap = variant["figures"].get(f"{name}_gap")
            if gap is not None and (tested := paired_test(Statistic(**gap))) is not None:
                low, high = gap["mean"] - tested[0], gap["mean"] + tested[0]
                span = f"{low:+.3f} to {high:+.3f}"
                lines.append(_line([variant["name"], name.replace("_", " "), span, f"{tested[1]:.3f}"]))
    if not lines:
        return []
    header = _line(["variant", "gap", "95 % interval of the mean, %", "p"])
    about = (
        f"\nThe baseline differs from seed to seed by {' and '.join(noise)} (standard deviation). p is the probability "
        "of such a mean gap if there were none: a paired t-test over the seeds.\n"
    )
    return [about, header, _line(["---"] * 4), *lines]


def _fp8_lines(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    """The errors of FP8 products by kind, over the layers."""
    lines = []
    for variant in variants:
        for errors in [run["fp8_errors"] for run in variant["runs"] if run["fp8_errors"]][:1]:
            for kind, own in errors_by(kind_of, errors).items():
                cells = []
                for result in RESULTS:
                    worst = max(own, key=lambda name: own[name][result])
                    mean = statistics.fmean(error[result] for error in own.values())
                    cells.append(f"{100 * mean:.2f} ({100 * own[worst][result]:.2f} at {layer_of(worst)})")
                lines.append(_line([variant["name"], kind, *cells]))
    header = ["variant", "product", *(result.replace("_", " ") for result in RESULTS)]
    about = (
        "\nRelative errors of FP8 products in per cent, mean and largest over the layers: the last checkpoint of the "
        "first seed, one micro-batch of held-out text, each product against FP32 on the same operands.\n"
    )
    return [about, _line(header), _line(["---"] * len(header)), *lines] if lines else []


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Mapping[str, Any] | None, form: str) -> str:
    if value is None:
        return ""
    found = Statistic(**value)
    return f"{found.mean:{form}}" + ("" if found.spread is None else f" ± {found.spread:{form.lstrip('+')}}")


def _keys(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key} = {show(value)}`" for key, value in keys.items()) or "as the file"


def _state(run: Mapping[str, Any]) -> str:
    text = run["status"] if run["error"] is None else f"{run['status']}: {run['error']}"
    skipped = run["figures"].get("skipped_steps")
    return text.replace("|", "\\|") + (f", {counted(int(skipped), 'step')} skipped" if skipped else "")


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
