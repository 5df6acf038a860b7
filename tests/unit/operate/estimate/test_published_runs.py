"""Runs that others published, replayed: their speed beside the planned one and its range.

`scripts/measure/replay_published_runs.py` prints the table of the document.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from glm46.cli import main
from glm46.operate.estimate.exchange_time import BESIDE_OTHERS
from scripts.measure.replay_published_runs import SWEEP, error, ordered_pairs, read_replays

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT.parent / "shared/cases/published_runs"
REPLAYS = {replay.name: replay for replay in read_replays(FOLDER)} if FOLDER.is_dir() else {}
ACROSS_NODES = {
    "mb_q30_h100x16_ep16_fp8": (0.75, 0.95), "mb_q235_h100x256_bf16": (0.8, 1.1),
    "mb_dsv3_h100x1024_bf16": (0.9, 1.15), "mb_dsv3_h100x1024_fp8": (0.9, 1.25), "ds_dsv3_h800x2048": (0.9, 1.25),
}  # fmt: skip
"""Runs whose tokens travel over nodes, with bounds of planned over published time with DeepEP-class kernels."""

pytestmark = pytest.mark.skipif(not REPLAYS, reason="the handed runs are not there")


def test_published_speeds_lie_inside_the_printed_range():
    assert sum(replay.is_inside() for replay in REPLAYS.values()) >= 0.85 * len(REPLAYS)
    assert median(error(replay.ratio()) for replay in REPLAYS.values()) <= 1.17
    assert error(REPLAYS["mb_q235_gb200x256_bf16"].ratio()) <= 1.3


def test_experts_over_nodes_are_replayed_as_published_stacks_exchange_tokens():
    assert {name for name, replay in REPLAYS.items() if replay.crosses_nodes} == set(ACROSS_NODES)
    for name, (low, high) in ACROSS_NODES.items():
        assert low <= REPLAYS[name].ratio("deepep") <= high, name
    speeds = {way: median(1 / REPLAYS[name].ratio(way) for name in ACROSS_NODES) for way in ("own", "deepep")}
    assert speeds["deepep"] >= 0.9 and 0.8 <= speeds["own"] < speeds["deepep"]


def test_a_published_exchange_hides_what_its_schedule_hides():
    """DualPipe hides all but what contention costs, Megatron's overlap a share, and a run without a pipeline none."""
    waits = {}
    for name in ("ds_dsv3_h800x2048", "mb_dsv3_h100x1024_bf16", "mb_q30_h100x16_ep16_fp8"):
        step = REPLAYS[name].cost("deepep").longest.largest
        waits[name] = step.parts["waiting for ep"] / step.seconds
    assert (
        waits["ds_dsv3_h800x2048"]
        < 0.04
        < 0.15
        < min(waits["mb_dsv3_h100x1024_bf16"], waits["mb_q30_h100x16_ep16_fp8"])
    )
    assert set(BESIDE_OTHERS) == {"Interleaved1F1B", "DualPipeV"}


def test_layouts_of_a_published_sweep_are_mostly_in_their_measured_order():
    assert ordered_pairs({name: REPLAYS[name].cost().longest.largest.seconds for name in SWEEP}) >= 5


@pytest.mark.parametrize("seen", [frozenset(), frozenset({"products", "experts", "attention"})])
def test_measured_efficiencies_narrow_the_range_by_their_own_terms_only(seen):
    cost = REPLAYS["am_q30_h100x8_ep8_bf16"].cost()
    cluster = replace(cost.cluster, efficiencies=replace(cost.cluster.efficiencies, measured=seen))
    low, high, widest = replace(cost, cluster=cluster).spread
    before = cost.spread
    assert (before[0] < low and high < before[1]) if seen else before == (low, high, widest)
    assert len(widest) == 3 and "waiting for ep" in widest


def test_the_command_plans_the_exchange_of_published_stacks(capsys):
    name = "mb_q235_h100x256_bf16"
    command = ["plan", "--config", str(FOLDER / f"{name}.toml"), "--gpu", REPLAYS[name].gpu, "--gpus", "256"]
    printed = {}
    for way in ("own", "deepep"):
        assert main([*command, "--exchange", way]) == 0
        printed[way] = capsys.readouterr().out
        rate = REPLAYS[name].cost(way).longest.largest.tokens_per_second
        assert f"{rate:,.0f} tokens/s" in printed[way]
        assert ("as in published training stacks" in printed[way]) == (way == "deepep")
    assert main([*command, "--exchange", "deepep", "--parallelism.expert_exchange=all_to_all"]) == 2
    assert "--exchange deepep: parallelism.expert_exchange" in capsys.readouterr().err
