"""Plan the runs that others published and compare the planned speed with theirs; fit the shares of Hopper's peaks.

python scripts/measure/replay_published_runs.py FOLDER        # of the handed runs: the table of docs/planner.md
python scripts/measure/replay_published_runs.py FOLDER --fit  # and leave-one-out
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median

from glm46.config.loader import load_config
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.pipeline_order import pipeline_order
from glm46.operate.estimate.run_cost import RunCost, run_cost
from glm46.operate.estimate.target_cluster import Efficiencies, TargetCluster
from glm46.run.plan import resolve_plan

SWEEP = {"mb_q235_h100x256_bf16": 19.7, "zoo_q235_fsdp_tp2ep8": 17.6,
         "zoo_q235_tp2pp32ep8": 24.2, "zoo_q235_tp4pp8ep8": 29.0}  # fmt: skip
"""Seconds of a step of Qwen3-235B that NVIDIA measured on 256 H100."""
GRID = {
    "products": (0.64, 0.68, 0.72), "experts": (0.60, 0.65, 0.70), "experts_rows": (1024, 1536, 2048),
    "attention": (0.24, 0.28, 0.32), "memory": (0.75, 0.80, 0.85), "network": (0.90, 0.95), "fp8": (0.65, 0.70, 0.75),
}  # fmt: skip
"""Values that a fit tries: the free numbers of Hopper."""
EXCHANGES = "own", "deepep"
Shares = dict[str, float]


@dataclass(frozen=True)
class Replay:
    """A published run, planned with two ways of the exchange of tokens."""

    name: str
    gpus: int
    gpu: str
    published: dict
    """Tokens per second, or TFLOP/s, of a GPU."""
    file: Path

    @cached_property
    def cluster(self) -> TargetCluster:
        gpu = accelerator_of(self.gpu)
        return TargetCluster(gpu, self.gpus, gpu.host_gpus, efficiencies=Efficiencies.assumed(gpu))

    @cached_property
    def plan(self):
        config = load_config(self.file, [], world_size=self.gpus)
        return resolve_plan(config, self.gpus, host_ranks=self.cluster.host_ranks)

    @property
    def is_hopper(self) -> bool:
        return int(self.cluster.gpu.compute_capability) == 9

    @property
    def crosses_nodes(self) -> bool:
        """Tokens leave their node on the way to experts."""
        return self.plan.layout.ep > max(self.cluster.gpus_per_node, self.cluster.gpu.link_domain)

    @cached_property
    def _costs(self) -> dict[tuple, RunCost]:
        return {}

    def cost(self, exchange: str = "own", shares: Shares | None = None, *, simulates: bool = True) -> RunCost:
        """With other shares of the peaks for a GPU of Hopper's generation. Without simulation pipelines have the bubble
        of equal stages, in a fraction of the time."""
        key = exchange, simulates, *(shares or {}).items()
        if key not in self._costs:
            changed = replace(self.cluster.efficiencies, **(shares or {} if self.is_hopper else {}))
            cluster = replace(self.cluster, efficiencies=changed, exchange=exchange)
            self._costs[key] = run_cost(self.plan, cluster, pipeline_order if simulates else None)
        return self._costs[key]

    def speeds(self, cost: RunCost) -> tuple[float, float]:
        """Published and planned tokens per second of a GPU."""
        rate, flops = self.published["tokens_per_second_per_gpu"], self.published["tflops_per_gpu"]
        return rate or flops * 1e12 / (cost.flops / cost.tokens), cost.tokens_per_second / self.gpus

    def ratio(self, exchange: str = "own", shares: Shares | None = None, *, simulates: bool = True) -> float:
        """Planned time over published time."""
        published, planned = self.speeds(self.cost(exchange, shares, simulates=simulates))
        return published / planned

    def is_inside(self, shares: Shares | None = None) -> bool:
        """The published speed is in the range that the plan prints."""
        low, high, _ = self.cost("own", shares).spread
        return low <= 1 / self.ratio("own", shares) <= high

    @property
    def line(self) -> str:
        """A row of the table."""
        cost = self.cost()
        (published, planned), (low, high, _) = self.speeds(cost), cost.spread
        cells = f"{published:,.0f}", f"{planned:,.0f}", f"{planned / high:,.0f}-{planned / low:,.0f}"
        deepep = f"{self.ratio('deepep'):.2f}" if self.plan.layout.ep > 1 else "-"
        inside = "yes" if self.is_inside() else "no"
        return f"| `{self.name}` | {' | '.join(cells)} | {self.ratio():.2f} | {inside} | {deepep} |"


def read_replays(folder: Path) -> list[Replay]:
    """The runs of a folder with `runs.json` and a config for each."""
    runs = json.loads((folder / "runs.json").read_text())
    return [Replay(run["name"], run["gpus"], run["gpu"], run, folder / f"{run['name']}.toml") for run in runs]


def error(ratio: float) -> float:
    """A ratio, or its inverse if that is larger."""
    return max(ratio, 1 / ratio)


def ordered_pairs(seconds: dict[str, float]) -> int:
    """Pairs of `SWEEP` in the measured order."""
    return sum((seconds[a] < seconds[b]) == (SWEEP[a] < SWEEP[b]) for a, b in combinations(SWEEP, 2))


def fit(replays: Iterable[Replay], shares: Shares) -> Shares:
    """The shares with the least sum of logarithmic errors of both exchanges, by one value of `GRID` at a time."""
    hopper = [replay for replay in replays if replay.is_hopper]

    def loss(tried: Shares) -> float:
        ratios = (replay.ratio(way, tried, simulates=False) for replay in hopper for way in EXCHANGES)
        return sum(math.log(error(ratio)) for ratio in ratios)

    least, before = loss(shares), math.inf
    while least < before:
        before = least
        for key, values in GRID.items():
            tried = {value: loss({**shares, key: value}) for value in values}
            best = min(tried, key=tried.__getitem__)
            if tried[best] < least - 1e-9:
                shares, least = {**shares, key: best}, tried[best]
    return shares


def leave_one_out(replays: Sequence[Replay]) -> str:
    """Fit without each run in turn, and predict it."""
    start = {key: getattr(Efficiencies(), key) for key in GRID}
    lines, ratios, inside, seconds = [f"all: {fit(replays, start)}"], [], 0, {}
    print(lines[0], file=sys.stderr, flush=True)
    for held in replays:
        shares = fit([replay for replay in replays if replay is not held], start)
        ratios.append(held.ratio("own", shares))
        inside += held.is_inside(shares)
        if held.name in SWEEP:
            seconds[held.name] = held.cost("own", shares).longest.largest.seconds
        moved = {key: value for key, value in shares.items() if value != start[key]}
        lines.append(f"{held.name}: {ratios[-1]:.2f} {moved or 'as shipped'}")
        print(lines[-1], file=sys.stderr, flush=True)
    middle = median(map(error, ratios))
    lines.append(f"inside {inside} of {len(replays)}, median error {middle:.2f}, pairs {ordered_pairs(seconds)} of 6")
    return "\n".join(lines)


def summary(replays: Sequence[Replay]) -> str:
    """The sentences below the table."""
    cross = [replay for replay in replays if replay.crosses_nodes]
    speeds = {way: median(1 / replay.ratio(way) for replay in cross) for way in EXCHANGES}
    pairs = ordered_pairs({each.name: each.cost().longest.largest.seconds for each in replays if each.name in SWEEP})
    inside = sum(replay.is_inside() for replay in replays)
    middle = median(error(replay.ratio()) for replay in replays)
    return (
        f"inside {inside} of {len(replays)}, median error {middle:.2f}, pairs {pairs} of 6; experts over nodes "
        f"({len(cross)}): median of planned over published speed {speeds['own']:.2f}, deepep {speeds['deepep']:.2f}"
    )


def main() -> None:
    """Print the table, and with --fit the shares and what they predict of runs that were held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    replays = read_replays(arguments.folder)
    print(*(replay.line for replay in replays), summary(replays), sep="\n")
    if arguments.fit:
        print(leave_one_out(replays))


if __name__ == "__main__":
    main()
