"""Runs that others published, replayed: their speed next to the planned one and its range.

The runs and their sources are in `published_runs.toml`; `scripts/measure/replay_published_runs.py` prints the table of
the document.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import tomli

from glm46.cli import main
from glm46.config.loader import dump_config
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.exchange_time import BESIDE_OTHERS
from glm46.operate.estimate.target_cluster import BLACKWELL, Efficiencies
from scripts.measure.published_runs import TABLE, machine_pairs, read_replays
from scripts.measure.replay_published_runs import SWEEP, error, ordered_layouts, ordered_machines, summary

ROOT = Path(__file__).resolve().parents[4]
REPLAYS = {replay.name: replay for replay in read_replays(TABLE)}
CHOSEN = [replay for replay in REPLAYS.values() if not replay.is_further]
FURTHER = [replay for replay in REPLAYS.values() if replay.is_further]
ACROSS_NODES = {
    "mb_q30_h100x16_ep16_fp8": (0.75, 0.95),
    "mb_q235_h100x256_bf16": (0.8, 1.1),
    "mg_q235_h100x256_bf16_vp4": (0.9, 1.2),
    "mb_dsv3_h100x1024_bf16": (0.9, 1.15),
    "mb_dsv3_h100x1024_fp8": (0.9, 1.25),
    "ds_dsv3_h800x2048": (0.9, 1.25),
    "am_dsv3_h100x1024_bf16": (0.6, 0.8),
}
"""Runs whose tokens travel over nodes, with bounds of planned over published time with DeepEP-class kernels."""


@pytest.mark.slow
def test_published_speeds_lie_inside_the_printed_range():
    assert len(CHOSEN) == 36
    assert sum(replay.is_inside() for replay in CHOSEN) >= 0.85 * len(CHOSEN)
    assert median(error(replay.ratio()) for replay in CHOSEN) <= 1.2
    assert error(REPLAYS["mb_q235_gb200x256_bf16"].ratio()) <= 1.3


@pytest.mark.slow
def test_runs_on_which_no_share_was_chosen_lie_inside_too():
    assert len(FURTHER) == 7
    assert sum(replay.is_inside() for replay in FURTHER) >= 0.85 * len(FURTHER)
    assert median(error(replay.ratio()) for replay in FURTHER) <= 1.2


@pytest.mark.slow
def test_every_published_pair_of_machines_is_in_order():
    pairs = machine_pairs([*REPLAYS.values()])
    names = {(slow.name, fast.name) for slow, fast in pairs}
    assert ("mb_dsv3_gb200x256_mxfp8", "mb_dsv3_gb300x256_mxfp8") in names
    assert ("mb_q235_b300x256_mxfp8", "mb_q235_gb200x256_mxfp8") in names
    assert len(pairs) == 30
    wrong = [(slow.name, fast.name) for slow, fast in pairs if slow.planned_speed() >= fast.planned_speed()]
    assert wrong == []


@pytest.mark.slow
def test_equal_racks_lose_less_than_a_hundredth_of_their_speed_together():
    """Megatron-Bridge measured 44,511 tokens per second and GPU on 8 GB300, and 45,053 on 256."""
    one_node = REPLAYS["mb_q30_gb300x8_mxfp8"].planned_speed()
    assert 0.99 <= REPLAYS["mb_q30_gb300x256_mxfp8"].planned_speed() / one_node <= 1.0


def test_every_run_has_a_source_with_its_address_and_a_date():
    table = tomli.loads(TABLE.read_text())
    assert {run["source"] for run in table["runs"]} == table["sources"].keys()
    for text in table["sources"].values():
        assert re.search(r"20\d\d-\d\d-\d\d.*: https://", text), text


@pytest.mark.slow
def test_the_pages_quote_the_figures_of_the_replay():
    """README, the planner's page and the results say what the runs of the repository give now."""
    inside = f"{sum(replay.is_inside() for replay in CHOSEN)} of {len(CHOSEN)}"
    middle = f"{median(error(replay.ratio()) for replay in CHOSEN):.2f}"
    further = f"{sum(replay.is_inside() for replay in FURTHER)} of {len(FURTHER)}"
    pairs = machine_pairs([*REPLAYS.values()])
    machines = f"{ordered_machines(pairs)} of {len(pairs)} pairs of machines"
    for name in ("README.md", "docs/planner.md", "docs/results/published_runs.md"):
        text = " ".join((ROOT / name).read_text().split())
        assert inside in text, name
        if name != "README.md":
            assert middle in text and further in text and machines in text, name


def test_shares_of_blackwell_follow_the_rated_power():
    """B200, GB200, B300 and GB300 have 1,000, 1,200, 1,100 and 1,400 W for 2.25, 2.5, 2.25 and 2.5 PFLOP/s."""
    powers = {"GB200": 1.0, "GB300": 1400 / 1200, "B200": 1000 / 1080, "B300": 1100 / 1080}
    for name, power in powers.items():
        shares = Efficiencies.assumed(accelerator_of(name))
        assert shares.products == pytest.approx(BLACKWELL.products * power)
        assert shares.experts == pytest.approx(BLACKWELL.experts * power)
        assert shares.memory == BLACKWELL.memory
    numbers = "bf16=2500,memory=2000,bandwidth=8000,link=900,capability=10.3"
    assert Efficiencies.assumed(accelerator_of(f"GB300x:{numbers}")) == Efficiencies.assumed(accelerator_of("GB300"))
    assert Efficiencies.assumed(accelerator_of(f"Other:{numbers}")) == BLACKWELL
    assert Efficiencies.assumed(accelerator_of("H200")) == Efficiencies()


@pytest.mark.slow
def test_the_script_reads_any_folder_of_runs(tmp_path):
    names = ("tt_l8_h100x8", "am_q30_h100x8_ep8_bf16")
    runs = []
    for name in names:
        replay = REPLAYS[name]
        (tmp_path / f"{name}.toml").write_text(dump_config(replay.config))
        speed = {"tokens_per_second_per_gpu": replay.tokens_per_second, "tflops_per_gpu": None}
        runs.append({"name": name, "gpus": replay.gpus, "gpu": replay.gpu, **speed})
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    replays = read_replays(tmp_path)
    assert [replay.ratio() for replay in replays] == [REPLAYS[name].ratio() for name in names]
    command = [sys.executable, str(ROOT / "scripts/measure/replay_published_runs.py"), str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    printed = run.stdout
    assert printed.count("| yes |") == 2
    assert printed.endswith(summary(replays) + "\n")


@pytest.mark.slow
def test_experts_over_nodes_are_replayed_as_published_stacks_exchange_tokens():
    assert {replay.name for replay in CHOSEN if replay.crosses_nodes} == set(ACROSS_NODES)
    for name, (low, high) in ACROSS_NODES.items():
        assert low <= REPLAYS[name].ratio("deepep") <= high, name
    speeds = {way: median(1 / REPLAYS[name].ratio(way) for name in ACROSS_NODES) for way in ("own", "deepep")}
    assert speeds["deepep"] >= 0.9 and 0.8 <= speeds["own"] < speeds["deepep"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_layouts_of_a_published_sweep_are_mostly_in_their_measured_order():
    assert ordered_layouts({name: REPLAYS[name].cost().longest.largest.seconds for name in SWEEP}) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seen", [frozenset(), frozenset({"products", "experts", "attention"})])
def test_measured_efficiencies_narrow_the_range_by_their_own_terms_only(seen):
    cost = REPLAYS["am_q30_h100x8_ep8_bf16"].cost()
    cluster = replace(cost.cluster, efficiencies=replace(cost.cluster.efficiencies, measured=seen))
    low, high, widest = replace(cost, cluster=cluster).spread
    before = cost.spread
    assert (before[0] < low and high < before[1]) if seen else before == (low, high, widest)
    assert len(widest) == 3 and "waiting for ep" in widest


@pytest.mark.slow
def test_the_command_plans_the_exchange_of_published_stacks(tmp_path, capsys):
    name = "mb_q235_h100x256_bf16"
    file = tmp_path / "run.toml"
    file.write_text(dump_config(REPLAYS[name].config))
    gpu = "H100 large:bf16=989.4,memory=2000,bandwidth=3350,link=450,capability=9"
    command = ["plan", "--config", str(file), "--gpu", gpu, "--gpus", "256"]
    printed = {}
    for way in ("own", "deepep"):
        assert main([*command, "--exchange", way]) == 0
        printed[way] = capsys.readouterr().out
        rate = REPLAYS[name].cost(way).longest.largest.tokens_per_second
        assert f"{rate:,.0f} tokens/s" in printed[way]
        assert ("as in published training stacks" in printed[way]) == (way == "deepep")
    assert main([*command, "--exchange", "deepep", "--parallelism.expert_exchange=all_to_all"]) == 2
    assert "--exchange deepep: parallelism.expert_exchange" in capsys.readouterr().err
