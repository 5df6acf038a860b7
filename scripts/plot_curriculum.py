#!/usr/bin/env python
"""The picture of a curriculum from the TOML files of its phases: lengths, batches, mixtures and schedules over tokens.

    python scripts/plot_curriculum.py train_configs/glm46_phase?.toml --output curriculum.svg

Every stage of text is equally wide, because the last phases of a curriculum have few of its tokens and most of its
stages. Within a stage the axis is linear.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.config.options import require_picture
from glm46.engine.observe.console import short_number
from glm46.files.durable import replace_durably
from glm46.run.plan import Plan, resolve_plan
from glm46.run.schedule import batch_sequences, learning_rate_factor, schedule_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 40
"""Points of a line in each stage."""
_TITLES = ("Sequence length, tokens", "Tokens per step", "Schedules, relative to their largest value", "Mixture")
_SCHEDULES = (
    "learning rate", "expert bias rate", "prediction weight", "router temperature", "balance weight", "z-loss weight",
)  # fmt: skip


@dataclass(frozen=True)
class _Stage:
    """A stage of text, and the tokens of the curriculum at its two ends."""

    plan: Plan
    phase: int
    index: int
    start: int
    stop: int

    def clocks(self) -> list[int]:
        """Points of the axis inside the stage."""
        last = self.stop - self.plan.text_stages[self.index].seq_len  # the start of its last sample
        return [self.start + (last - self.start) * point // (_POINTS - 1) for point in range(_POINTS)]

    def mixture(self) -> dict[str, float]:
        """The share of each source that is read, in the order of the file."""
        weights = self.plan.text_stages[self.index].weights
        names = [source.name for source in self.plan.config.data.sources]
        return {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True) if weight}


def read_phases(files: Sequence[Path]) -> list[_Stage]:
    """The stages of the phases in these files, in the order of their start.

    Raises:
        UserError: a file has faults, or a phase does not begin where the one before ends.
    """
    plans = sorted(
        ((resolve_plan(load_config(file)), file) for file in files),
        key=lambda pair: pair[0].config.lr_scheduler.start_tokens,
    )
    for (before, earlier), (after, later) in zip(plans, plans[1:], strict=False):
        start = after.config.lr_scheduler.start_tokens
        if start != before.end_tokens:
            raise UserError(
                f"plot: {later}: lr_scheduler.start_tokens = {start}, but {earlier} ends at {before.end_tokens}; name "
                "all phases of one curriculum"
            )
    stages = []
    for phase, (plan, _) in enumerate(plans, start=1):
        clock = plan.config.lr_scheduler.start_tokens
        for index, tokens in enumerate(plan.stage_tokens):
            if tokens:
                stages.append(_Stage(plan, phase, index, clock, clock + tokens))
            clock += tokens
    return stages


def draw_curriculum(stages: Sequence[_Stage], output: Path) -> None:
    """Draw the panels, and write the picture, a PNG or an SVG, completely or not at all."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 11), dpi=100, layout="constrained")
    panels = figure.subplots(4, 1, sharex=True, height_ratios=(1, 1, 1, 2.2))
    for axes, title in zip(panels, _TITLES, strict=True):
        axes.set_title(title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        for edge, stage in enumerate(stages):
            axes.axvline(edge, color="0.2" if stage.index == 0 else "0.85", linewidth=0.8, zorder=0)
    _draw_lengths(panels[0], stages)
    _draw_batches(panels[1], stages)
    _draw_schedules(panels[2], stages)
    _draw_mixtures(panels[3], stages)
    edges = [stages[0].start, *(stage.stop for stage in stages)]
    panels[-1].set_xticks(range(len(edges)), [short_number(float(f"{edge:.4g}")) for edge in edges])
    panels[-1].set_xlim(0, len(stages))
    panels[-1].set_xlabel("tokens of the curriculum; every stage is equally wide")
    picture = BytesIO()
    # Text as text, and no date: the same files give the same small SVG.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "glm46"}):
        kind = output.suffix[1:]
        figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    replace_durably(output, [picture.getvalue()])


def _across(number: int) -> list[float]:
    return [number + point / (_POINTS - 1) for point in range(_POINTS)]


def _draw_lengths(axes: "Axes", stages: Sequence[_Stage]) -> None:
    for number, stage in enumerate(stages):
        text = stage.plan.text_stages[stage.index]
        window, scaling = text.shape.sliding_window, text.shape.rope_scaling
        axes.plot((number, number + 1), (text.seq_len,) * 2, color="C0", linewidth=3)
        notes = [f"{text.seq_len:,}"]
        if window is not None:
            axes.plot((number, number + 1), (window,) * 2, color="C0", linewidth=1.5, linestyle=":")
            notes.append(f"window {window:,}")
        if scaling is not None:
            notes.append(f"RoPE {scaling.rope_type} × {scaling.factor:g}")
        axes.text(number + 0.5, text.seq_len * 1.25, "\n".join(notes), ha="center", va="bottom", fontsize=8)
    longest = max(stage.plan.text_stages[stage.index].seq_len for stage in stages)
    axes.set_yscale("log", base=2)
    axes.set_ylim(top=longest * 12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_batches(axes: "Axes", stages: Sequence[_Stage]) -> None:
    for number, stage in enumerate(stages):
        plan, seq_len = stage.plan, stage.plan.text_stages[stage.index].seq_len
        batch = plan.config.training.global_batch_size
        sizes = [seq_len * batch_sequences(batch, clock, plan.rows_per_micro_batch) for clock in stage.clocks()]
        axes.plot(_across(number), sizes, color="C1", linewidth=2)
        text = (
            short_number(sizes[-1]) if sizes[0] == sizes[-1] else " to ".join(map(short_number, sizes[:: _POINTS - 1]))
        )
        axes.text(number + 0.5, max(sizes), text, ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, _: short_number(value))


def _draw_schedules(axes: "Axes", stages: Sequence[_Stage]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in _SCHEDULES}
    for number, stage in enumerate(stages):
        config, end = stage.plan.config, stage.plan.end_tokens
        for x, clock in zip(_across(number), stage.clocks(), strict=True):
            values = (
                learning_rate_factor(clock, config.lr_scheduler, end),
                schedule_value(config.moe.bias_update_rate, clock),
                schedule_value(config.mtp.loss_weight, clock) if stage.plan.shape.num_nextn_predict_layers else 0.0,
                schedule_value(config.moe.router_temperature, clock),
                schedule_value(config.moe.sequence_aux_loss_weight, clock),
                schedule_value(config.moe.z_loss_weight, clock),
            )
            for name, value in zip(_SCHEDULES, values, strict=True):
                lines[name].append((x, value))
    for colour, (name, points) in enumerate(lines.items()):
        largest = max(value for _, value in points)
        if largest and (colour == 0 or len({value for _, value in points}) > 1):
            xs, values = zip(*points, strict=True)
            label = name if colour == 0 else f"{name}, at most {largest:g}"
            axes.plot(xs, [value / largest for value in values], color=f"C{colour}", linewidth=2, label=label)
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.66))


def _draw_mixtures(axes: "Axes", stages: Sequence[_Stage]) -> None:
    names = list(dict.fromkeys(name for stage in stages for name in stage.mixture()))
    # Neighbours with one mixture are one bar.
    for _, group in groupby(enumerate(stages), key=lambda pair: (pair[1].phase, pair[1].mixture())):
        (first, stage), *others = group
        width, below = 1 + len(others), 0.0
        for name, share in stage.mixture().items():
            colour = f"C{names.index(name) % 10}"
            axes.bar(first + 0.01, share, width - 0.02, below, align="edge", color=colour, alpha=0.45)
            text = f"{name.replace('_', ' ')} {share:.0%}"
            axes.text(first + width / 2, below + share / 2, text, ha="center", va="center", fontsize=8)
            below += share
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the curriculum of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="+", type=Path, metavar="PHASE", help="TOML file of a phase")
    parser.add_argument("--output", type=Path, default=Path("curriculum.png"), help="PNG or SVG; default %(default)s")
    arguments = parser.parse_args(argv)
    try:
        require_picture("plot", "--output", arguments.output, [".png", ".svg"])
        draw_curriculum(read_phases(arguments.phases), arguments.output)
    except UserError as error:
        print(*(f"error: {fault}" for fault in error.faults), sep="\n", file=sys.stderr)
        return 2
    print(arguments.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
