"""Plan the runs that others published and compare the planned speed with theirs; fit the shares of peaks.

python scripts/measure/replay_published_runs.py               # the runs of the repository: the table of docs/planner.md
python scripts/measure/replay_published_runs.py --fit         # and leave-one-out
python scripts/measure/replay_published_runs.py FOLDER        # other runs: runs.json and a TOML file for each run
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.operate.estimate.target_cluster import BLACKWELL, Efficiencies
from scripts.measure.published_runs import TABLE, Replay, Shares, machine_pairs, read_replays

SWEEP = {
    "mb_q235_h100x256_bf16": 19.7,
    "zoo_q235_fsdp_tp2ep8": 17.6,
    "zoo_q235_tp2pp32ep8": 24.2,
    "zoo_q235_tp4pp8ep8": 29.0,
}
"""Seconds of a step of Qwen3-235B that NVIDIA measured on 256 H100."""
EXCHANGES = ("own", "deepep")
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "Hopper": {
        "products": (0.64, 0.68, 0.72),
        "experts": (0.60, 0.65, 0.70),
        "experts_rows": (1024, 1536, 2048),
        "attention": (0.24, 0.28, 0.32),
        "memory": (0.75, 0.80, 0.85),
        "network": (0.90, 0.95),
        "fp8": (0.65, 0.70, 0.75),
    },
    "Blackwell": {
        "experts": (0.35, 0.40, 0.45),
        "experts_rows": (256, 512, 1024),
        "attention": (0.32, 0.36, 0.40),
        "memory": (0.65, 0.70, 0.75),
        "fp8": (0.85, 0.90, 0.95),
    },
}
"""Values that a fit tries: the free shares of a generation. On Blackwell `fp8_experts` equals `fp8`."""
SHIPPED = {"Hopper": Efficiencies(), "Blackwell": BLACKWELL}


def error(ratio: float) -> float:
    """A ratio, or its inverse if that is larger."""
    return max(ratio, 1 / ratio)


def ordered_layouts(seconds: Mapping[str, float]) -> int:
    """Pairs of `SWEEP` in the measured order."""
    return sum((seconds[a] < seconds[b]) == (SWEEP[a] < SWEEP[b]) for a, b in combinations(SWEEP, 2))


def ordered_machines(pairs: Sequence[tuple[Replay, Replay]]) -> int:
    """Pairs of `machine_pairs` in the measured order."""
    return sum(slow.planned_speed() < fast.planned_speed() for slow, fast in pairs)


def complete(generation: str, shares: Shares) -> Shares:
    """The shares that a plan takes for those of a grid."""
    return {**shares, "fp8_experts": shares["fp8"]} if generation == "Blackwell" else shares


def fit(replays: Sequence[Replay], generation: str) -> Shares:
    """The shares with the smallest sum of logarithmic errors of both exchanges, by one value of the grid at a time."""
    fitted = [replay for replay in replays if replay.generation == generation]

    def loss(shares: Shares) -> float:
        full = complete(generation, shares)
        ratios = (replay.ratio(way, full) for replay in fitted for way in EXCHANGES)
        return sum(math.log(error(ratio)) for ratio in ratios)

    grid = GRIDS[generation]
    shares = {key: getattr(SHIPPED[generation], key) for key in grid}
    smallest = loss(shares)
    before = math.inf
    while smallest < before:
        before = smallest
        for key, values in grid.items():
            losses = {value: loss({**shares, key: value}) for value in values}
            best = min(losses, key=losses.__getitem__)
            if losses[best] < smallest - 1e-9:
                shares = {**shares, key: best}
                smallest = losses[best]
    return shares


def leave_one_out(replays: Sequence[Replay]) -> str:
    """Fit without each run in turn, and predict it."""
    lines = [f"all, {generation}: {fit(replays, generation)}" for generation in GRIDS]
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    ratios = []
    inside = 0
    seconds = {}
    for held in replays:
        others = [replay for replay in replays if replay is not held]
        shipped = SHIPPED[held.generation]
        shares = fit(others, held.generation)
        full = complete(held.generation, shares)
        ratios.append(held.ratio("own", full))
        inside += held.is_inside(full)
        if held.name in SWEEP:
            seconds[held.name] = held.cost("own", full).longest.largest.seconds
        moved = {key: value for key, value in shares.items() if value != getattr(shipped, key)}
        lines.append(f"{held.name}: {ratios[-1]:.2f} {moved or 'as shipped'}")
        print(lines[-1], file=sys.stderr, flush=True)
    middle = median(map(error, ratios))
    lines.append(f"held out: inside {inside} of {len(replays)}, median error {middle:.2f}")
    if seconds.keys() == SWEEP.keys():
        lines.append(f"held out: layouts in order {ordered_layouts(seconds)} of 6")
    return "\n".join(lines)


def row(replay: Replay) -> str:
    """A row of the table."""
    low, high, _ = replay.cost().spread
    planned = replay.planned_speed()
    speeds = f"{replay.published_speed():,.0f} | {planned:,.0f} | {planned / high:,.0f}-{planned / low:,.0f}"
    deepep = f"{replay.ratio('deepep'):.2f}" if replay.plan.layout.ep > 1 else "-"
    inside = "yes" if replay.is_inside() else "no"
    return f"| `{replay.name}` | {speeds} | {replay.ratio():.2f} | {inside} | {deepep} |"


def counts(replays: Sequence[Replay]) -> str:
    """How many runs lie inside their range, and the median error."""
    inside = sum(replay.is_inside() for replay in replays)
    middle = median(error(replay.ratio()) for replay in replays)
    return f"inside {inside} of {len(replays)}, median error {middle:.2f}"


def summary(replays: Sequence[Replay]) -> str:
    """The sentences below the table."""
    chosen = [replay for replay in replays if not replay.is_further]
    lines = [counts(chosen)]
    if len(chosen) < len(replays):
        lines.append(f"further runs: {counts([replay for replay in replays if replay.is_further])}")
    pairs = machine_pairs(replays)
    lines.append(f"pairs of machines in order: {ordered_machines(pairs)} of {len(pairs)}")
    seconds = {each.name: each.cost().longest.largest.seconds for each in replays if each.name in SWEEP}
    if seconds.keys() == SWEEP.keys():
        lines.append(f"layouts in order: {ordered_layouts(seconds)} of 6")
    crossing = [replay for replay in chosen if replay.crosses_nodes]
    if crossing:
        speeds = [f"{way} {median(1 / replay.ratio(way) for replay in crossing):.2f}" for way in EXCHANGES]
        lines.append(f"experts over nodes ({len(crossing)}): planned over published speed, median: {', '.join(speeds)}")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and with --fit the shares and what they predict of runs that were held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, default=TABLE, help="folder or table of runs")
    parser.add_argument("--fit", action="store_true", help="fit the shares, and predict each run without itself")
    arguments = parser.parse_args()
    replays = read_replays(arguments.path)
    print(*(row(replay) for replay in replays), summary(replays), sep="\n")
    if arguments.fit:
        print(leave_one_out([replay for replay in replays if not replay.is_further]))


if __name__ == "__main__":
    main()
