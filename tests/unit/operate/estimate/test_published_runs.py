"""Runs that others published, replayed: their speed beside the planned one and its range, as docs/planner.md states.

    PYTHONPATH=. python tests/unit/operate/estimate/test_published_runs.py

prints the table of the document.
"""

import json
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from glm46.compute.parallelize.pipeline_order import pipeline_order
from glm46.config.loader import load_config
from glm46.operate.estimate.run_cost import run_cost
from glm46.operate.estimate.target_cluster import Efficiencies, TargetCluster
from glm46.run.peaks import accelerator_of
from glm46.run.plan import resolve_plan

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT.parent / "shared/cases/published_runs"
RUNS = json.loads((FOLDER / "runs.json").read_text()) if FOLDER.is_dir() else []
SWEEP = {"mb_q235_h100x256_bf16": 19.7, "zoo_q235_fsdp_tp2ep8": 17.6,
         "zoo_q235_tp2pp32ep8": 24.2, "zoo_q235_tp4pp8ep8": 29.0}  # fmt: skip
"""Seconds of a step of Qwen3-235B that NVIDIA measured on 256 H100."""

pytestmark = pytest.mark.skipif(not RUNS, reason="the handed runs are not there")


@cache
def planned(name: str):
    run = next(each for each in RUNS if each["name"] == name)
    gpu, config = accelerator_of(run["gpu"]), load_config(FOLDER / f"{name}.toml", [], world_size=run["gpus"])
    cluster = TargetCluster(gpu, run["gpus"], gpu.host_gpus, efficiencies=Efficiencies.assumed(gpu))
    return run_cost(resolve_plan(config, run["gpus"], host_ranks=cluster.host_ranks), cluster, pipeline_order)


def compared(run: dict) -> tuple[float, float, float]:
    """Published tokens per second of a GPU, and planned time over published time: middle and half of the table."""
    cost = planned(run["name"])
    of_gpu = cost.tokens_per_second / run["gpus"]
    published = run["tokens_per_second_per_gpu"] or run["tflops_per_gpu"] * 1e12 / (cost.flops / cost.tokens)
    return published, of_gpu, published / of_gpu


def is_inside(run: dict) -> bool:
    low, high, _ = planned(run["name"]).spread
    return low <= 1 / compared(run)[2] <= high


def line(run: dict) -> str:
    (published, of_gpu, ratio), (low, high, _) = compared(run), planned(run["name"]).spread
    cells = f"{run['gpus']:,}", f"{published:,.0f}", f"{of_gpu:,.0f}", f"{of_gpu / high:,.0f} to {of_gpu / low:,.0f}"
    return f"| `{run['name']}` | {' | '.join(cells)} | {ratio:.2f} | {'yes' if is_inside(run) else 'no'} |"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_the_ratio_of_a_published_run_is_the_documented_one(run):
    assert line(run) in (ROOT / "docs/planner.md").read_text()


def test_published_speeds_lie_inside_the_printed_range():
    assert sum(map(is_inside, RUNS)) >= 0.85 * len(RUNS)
    gb200 = next(run for run in RUNS if "gb200" in run["name"])
    assert 1 / 1.3 <= compared(gb200)[2] <= 1.3


def ordered_pairs() -> int:
    seconds = {name: planned(name).longest.largest.seconds for name in SWEEP}
    return sum((seconds[a] < seconds[b]) == (SWEEP[a] < SWEEP[b]) for a, b in combinations(SWEEP, 2))


def test_layouts_of_a_published_sweep_are_mostly_in_their_measured_order():
    assert ordered_pairs() >= 4


@pytest.mark.parametrize("seen", [frozenset(), frozenset({"products", "experts", "attention"})])
def test_measured_efficiencies_narrow_the_range_by_their_own_terms_only(seen):
    cost = planned("am_q30_h100x8_ep8_bf16")
    cluster = replace(cost.cluster, efficiencies=replace(cost.cluster.efficiencies, measured=seen))
    low, high, widest = replace(cost, cluster=cluster).spread
    before = cost.spread
    assert (before[0] < low and high < before[1]) if seen else before == (low, high, widest)
    assert len(widest) == 3 and "waiting for ep" in widest


if __name__ == "__main__":
    print(*map(line, RUNS), f"inside {sum(map(is_inside, RUNS))}, pairs in order {ordered_pairs()}", sep="\n")
