"""Figures of the runs of an ablation, and their gaps to the baseline, from the rows of metrics.jsonl."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]

_FINAL_SHARE = 0.1
"""The final loss is the mean over this last part of the tokens: a single step has the noise of its batch."""

RESULTS = ("output", "input_gradient", "weight_gradient")
"""Results of a product, forward and backward."""

Errors = Mapping[str, Mapping[str, float]]
"""By name of a product, such as ``layers.1.self_attn.q_proj``, the relative error of each of `RESULTS`."""

MEMORY_COLUMNS = ("memory_peak_gib/max", "resident_memory_gib/max")
"""Memory of a GPU; of a run without one, main memory of a process."""


@dataclass(frozen=True)
class Outcome:
    """One run of an ablation, as far as it went."""

    variant: str
    seed: int
    folder: str
    status: str
    """finished, failed, stopped, or missing: not started yet."""
    error: str | None = None
    seconds: float = 0.0
    train: Sequence[Row] = field(default=(), repr=False)
    validation: Sequence[Row] = field(default=(), repr=False)
    fp8_errors: Errors = field(default_factory=dict, repr=False)
    """Of a run with [float8]; empty if they were not measured."""

    @property
    def is_finished(self) -> bool:
        """True if it trained to the end of its budget."""
        return self.status == "finished"


@dataclass(frozen=True)
class Statistic:
    """A figure over the seeds of a variant."""

    mean: float
    spread: float | None
    """Sample standard deviation; None of a single seed."""
    count: int


def statistic(values: Sequence[float]) -> Statistic | None:
    """Mean and spread of values; None without any."""
    if not values:
        return None
    return Statistic(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def probability_of_t(t: float, freedom: int) -> float:
    """The probability that Student's t is as far from 0 as ``t`` or farther, by the finite series for whole degrees of
    freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term = total = cosine if is_odd else 1.0
    for k in range(2 + is_odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if not is_odd:
        return 1 - sine * total
    return 1 - 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))


def paired_test(found: Statistic) -> tuple[float, float] | None:
    """Of gaps to runs of the same seeds: half of the 95 % interval of their mean, and the probability of such a mean
    if the true gap is 0 (paired t-test). None for a single seed, and if all gaps are equal."""
    if not found.spread:
        return None
    error, freedom = found.spread / math.sqrt(found.count), found.count - 1
    low, high = 0.0, 13.0  # with one degree of freedom 12.7
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if probability_of_t(middle, freedom) > 0.05 else (low, middle)
    return high * error, probability_of_t(found.mean / error, freedom)


def run_figures(outcome: Outcome, baseline: Outcome | None) -> dict[str, float]:
    """The figures of a finished run, and its gaps to the baseline's run of the same seed, if that is finished too.
    Figures that the rows do not have are absent.

    Gaps are in per cent of the baseline's value. The gap of the gradient norm is the mean over the rows of its absolute
    value.
    """
    figures = {name: value for name, make in _FIGURES.items() if (value := make(outcome)) is not None}
    if outcome.fp8_errors:
        figures |= {f"fp8_{name}_error": 100.0 * value for name, value in mean_errors(outcome.fp8_errors).items()}
    if baseline is None or not baseline.is_finished or baseline is outcome:
        return figures
    for name in ("final_loss", "validation_loss", "tokens_per_second", "memory_gib"):
        reference = _FIGURES[name](baseline)
        if name in figures and reference:
            figures[f"{name}_gap"] = _gap(figures[name], reference)
    norms = [abs(row["grad_norm_gap"]) for row in gap_rows(outcome, baseline) if "grad_norm_gap" in row]
    if norms:
        figures["grad_norm_gap"] = statistics.fmean(norms)
    return figures


def gap_rows(outcome: Outcome, baseline: Outcome) -> list[dict[str, float]]:
    """Training rows with two more columns, loss_gap and grad_norm_gap, in per cent of the baseline's row at the same
    tokens; a row without such a counterpart does not have them."""
    others = {row["tokens"]: row for row in baseline.train}
    rows = []
    for row in outcome.train:
        other = others.get(row["tokens"], {})
        pairs = {
            "loss_gap": (_loss(row), _loss(other)),
            "grad_norm_gap": (row.get("grad_norm"), other.get("grad_norm")),
        }
        gaps = {name: _gap(ours, theirs) for name, (ours, theirs) in pairs.items() if ours is not None and theirs}
        rows.append({**row, **gaps})
    return rows


def mean_rows(runs: Sequence[Sequence[Row]]) -> list[dict[str, float]]:
    """The rows that all runs have at the same tokens, with the mean of each column that is a number in all of them."""
    if not runs:
        return []
    by_tokens = [{row["tokens"]: row for row in rows} for rows in runs]
    means = []
    for tokens in sorted(set.intersection(*map(set, by_tokens))):
        rows = [rows[tokens] for rows in by_tokens]
        columns = [name for name in rows[0] if all(isinstance(row.get(name), int | float) for row in rows)]
        means.append({name: statistics.fmean(row[name] for row in rows) for name in columns})
    return means


def mean_errors(errors: Errors) -> dict[str, float]:
    """The mean over the products of each of `RESULTS`."""
    return {result: statistics.fmean(error[result] for error in errors.values()) for result in RESULTS}


def errors_by(part: Callable[[str], str], errors: Errors) -> dict[str, Errors]:
    """The errors of products grouped by a part of their names, in the order of the model."""
    groups: dict[str, dict[str, Mapping[str, float]]] = {}
    for name, error in errors.items():
        groups.setdefault(part(name), {})[name] = error
    return dict(groups)


def layer_of(name: str) -> str:
    """``layers.1`` of ``layers.1.self_attn.q_proj``."""
    return ".".join(name.split(".")[:2])


def kind_of(name: str) -> str:
    """``self_attn.q_proj`` of ``layers.1.self_attn.q_proj``."""
    return ".".join(name.split(".")[2:]).removeprefix("block.")


def _gap(value: float, reference: float) -> float:
    return 100.0 * (value / reference - 1.0)


def _loss(row: Row) -> float | None:
    """The mean loss since the previous row; rows of older releases have that of their step only."""
    return row.get("loss_mean", row.get("loss"))


def _final_loss(outcome: Outcome) -> float | None:
    if not outcome.train:
        return None
    last = outcome.train[-1]["tokens"]
    losses = [_loss(row) for row in outcome.train if row["tokens"] >= (1 - _FINAL_SHARE) * last]
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else None


def _tokens_per_second(outcome: Outcome) -> float | None:
    """The median: the first row of each start has its warm-up and compilation."""
    speeds = [row["tokens_per_second"] for row in outcome.train if row.get("tokens_per_second")]
    return statistics.median(speeds) if speeds else None


def _memory_gib(outcome: Outcome) -> float | None:
    for column in MEMORY_COLUMNS:
        if peaks := [row[column] for row in outcome.train if row.get(column)]:
            return max(peaks)
    return None


_FIGURES: dict[str, Callable[[Outcome], float | None]] = {
    "final_loss": _final_loss,
    "validation_loss": lambda outcome: outcome.validation[-1].get("validation_loss") if outcome.validation else None,
    "tokens_per_second": _tokens_per_second,
    "memory_gib": _memory_gib,
    "skipped_steps": lambda outcome: outcome.train[-1].get("skipped_steps") if outcome.train else None,
}
