#!/usr/bin/env python
"""The picture of the README, from real runs: loss, reward, and the last lines of a terminal.

./run_train.sh | tee run.log
for run in rl_debug_labels rl_debug; do CONFIG_FILE=train_configs/$run.toml NGPU=1 ./run_train.sh; done
python scripts/draw_first_page.py outputs/debug outputs/rl_debug run.log docs/images/first_page.svg
"""

import json
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

_LINES, _COLUMNS = 27, 128
"""Of the terminal."""


def series(folder: Path, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows of ``metrics.jsonl`` that have the key."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in rows], [row[key] for row in rows]


def main(run: Path, rl_run: Path, log: Path, output: Path) -> None:
    # A fixed salt gives the same runs the same file; text stays text.
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "glm46", "font.size": 9, "axes.spines.top": False}
    figure = plt.figure(figsize=(12, 4.6))
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 2.3), hspace=0.55, wspace=0.08)
    charts = ((run, "loss", "pre-training: loss"), (rl_run, "reward", "reinforcement: mean reward"))
    for place, (folder, key, title) in enumerate(charts):
        axes = figure.add_subplot(grid[place, 0])
        axes.plot(*series(folder, key), color="#2f7d4f")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("step", labelpad=1)
        axes.spines.right.set_visible(False)
    axes = figure.add_subplot(grid[:, 1])
    axes.set_facecolor("#1b1f23")
    axes.set(xticks=[], yticks=[])
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines = [part for line in lines for part in textwrap.wrap(line, _COLUMNS, replace_whitespace=False)][-_LINES:]
    # Browsers join ordinary blanks of SVG text, and indentation would be lost.
    axes.text(
        0.012, 0.98, "\n".join(lines).replace("$", r"\$").replace(" ", "\u00a0"), transform=axes.transAxes, va="top",
        family="monospace", fontsize=5.8, linespacing=1.45, color="#e6e6e6",
    )  # fmt: skip
    figure.savefig(output, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
