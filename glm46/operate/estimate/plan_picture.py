"""The picture of a plan: memory of each pipeline rank by kind, and the timeline of a step."""

from pathlib import Path
from typing import TYPE_CHECKING

from glm46.engine.observe.plots import save_picture
from glm46.operate.estimate.memory import MemoryPlan, rank_memory
from glm46.operate.estimate.report import RunPlan
from glm46.operate.estimate.requirement import memory_parts, usable_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 2**30
_COLOURS = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "input gradient": "tab:orange",
    "weight gradient": "tab:green",
}


def draw_plan(run: RunPlan, output: Path) -> None:
    """Draw the stage of text that needs most memory, and the longest step of the stage that takes longest; write the
    picture completely or not at all.

    Args:
        output: ends with .png or .svg.
    """
    from matplotlib.figure import Figure

    timeline = run.cost.longest.largest.timeline
    figure = Figure(figsize=(12, 8.5 if timeline else 4.5), dpi=110, layout="constrained")
    rows = figure.subplots(2 if timeline else 1, 1, squeeze=False)[:, 0]
    config = run.plan.config
    figure.suptitle(f"{config.job.description} on {run.cluster.gpus:,} x {run.cluster.gpu.name}")
    largest = max(range(len(run.memory)), key=lambda index: run.memory[index].total)
    _draw_memory(rows[0], rank_memory(run.plan, largest), run)
    if timeline:
        _draw_timeline(rows[1], timeline)
    save_picture(figure, output)


def _draw_memory(axes: "Axes", ranks: list[MemoryPlan], run: RunPlan) -> None:
    bottom = [0.0] * len(ranks)
    parts = [memory_parts(memory) for memory in ranks]
    for name in dict.fromkeys(name for of_rank in parts for name in of_rank):
        sizes = [of_rank.get(name, 0.0) / _GIB for of_rank in parts]
        if max(sizes) > 0.001 * max(memory.total for memory in ranks) / _GIB:
            axes.bar(range(len(ranks)), sizes, bottom=bottom, width=0.8, label=name)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    usable = usable_bytes(run.cluster.gpu.memory_bytes) / _GIB
    axes.axhline(usable, color="0.3", linestyle="--", linewidth=1, label=f"can be filled: {usable:,.1f} GiB")
    axes.set(title="Memory of a GPU", xlabel="pipeline rank", ylabel="GiB")
    axes.set_xticks(range(len(ranks)))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_timeline(axes: "Axes", timeline) -> None:
    """A bar for each action: what is white, waits."""
    from matplotlib.patches import Patch

    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for block in timeline.blocks:
        width = (block.stop - block.start) / len(block.actions)
        for number, action in enumerate(block.actions):
            bars.setdefault((block.rank, _COLOURS[action.kind]), []).append((block.start + number * width, width))
    for (rank, colour), spans in bars.items():
        axes.broken_barh(spans, (rank - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.2)
    kinds = dict.fromkeys(action.kind for block in timeline.blocks for action in block.actions)
    names = ["gradients" if kind == "backward" else kind for kind in kinds]
    entries = [Patch(color=_COLOURS[kind], label=name) for kind, name in zip(kinds, names, strict=True)]
    axes.legend(handles=entries, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.set(
        title=f"Forward and backward of one step: ranks wait {timeline.bubble:.0%} of it",
        xlabel="seconds", ylabel="pipeline rank", xlim=(0, timeline.seconds),
    )  # fmt: skip
    axes.set_yticks(range(timeline.ranks))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
