"""The search of layouts: what it returns fits, obeys the rules, is ranked, and can be typed as it says."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.config.check import check_config
from glm46.config.loader import load_config
from glm46.config.parallelism import ActivationCheckpointConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import Accelerator, accelerator_of
from glm46.operate.estimate import search as search_command
from glm46.operate.estimate.memory import largest_stage, stage_memory
from glm46.operate.estimate.rank_parts import parts_of_ranks
from glm46.operate.estimate.run_cost import run_cost
from glm46.operate.estimate.search import options_of, search_layouts, smallest_cluster
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.operate.estimate.traffic import _Step, step_traffic, traffic_of_rank
from glm46.run.parameters import Parameter
from glm46.run.plan import resolve_plan
from tests.builders import model_table
from tests.processes import HANG_SECONDS

DEBUG = Path(__file__).parents[4] / "train_configs" / "debug.toml"
GIB = 2**30
SECONDS = {"s": 1, "min": 60, "h": 3600, "days": 86_400}


def small_gpu(memory_gib: float) -> Accelerator:
    return accelerator_of(f"small:bf16=1,memory={memory_gib},bandwidth=100,link=10")


def run(**tables) -> RunConfig:
    sections = {
        "model": {"flavor": "debug"},
        "data": {"sources": [{"name": "text", "path": "text"}]},
        "training": {"seq_len": 2048, "steps": 10, "global_batch_size": 32},
    } | tables
    return RunConfig.model_validate(sections | {"model": model_table(**sections["model"])})


@pytest.mark.slow
def test_all_that_is_found_fits_and_is_ranked():
    config = run(parallelism={"tensor_parallel_degree": 2})
    cluster = TargetCluster(small_gpu(3), 8, 4)
    found = search_layouts(config, cluster)
    assert found.best and found.fitting >= len(found.best)
    # Four tensor-parallel ranks do not divide them.
    six_heads = run(model={"flavor": "debug", "shape": {"num_attention_heads": 6}})
    assert set(search_layouts(six_heads, cluster).refused) == {"parallelism.tensor_parallel_degree"}
    days = [each.cost.days for each in found.best]
    assert days == sorted(days)
    for each in found.best:
        assert check_config(each.plan.config, world_size=8) == [] and each.plan.layout.world_size == 8
        assert each.memory == largest_stage(stage_memory(each.plan)).total <= 0.92 * 3 * GIB
        assert each.cost.days == run_cost(each.plan, cluster).days
        assert each.plan.layout.tp <= 4  # a tensor-parallel group stays inside a node
    assert len({tuple(options_of(each.plan, config)) for each in found.best}) == len(found.best)
    # Layouts that a user would try first are not faster.
    for parallelism in ({}, {"expert_parallel_degree": 8}, {"tensor_parallel_degree": 4}):
        plan = resolve_plan(run(parallelism=parallelism), 8, host_ranks=cluster.host_ranks)
        if largest_stage(stage_memory(plan)).total <= 0.92 * 3 * GIB:
            assert run_cost(plan, cluster).days >= days[0] * (1 - 1e-9)


@pytest.mark.parametrize(("memory", "length"), [(8, 1024), (2.8, 2048)])
def test_the_options_give_the_layout(memory, length):
    overrides = (f"--training.seq_len={length}", "--parallelism.tensor_parallel_degree=2")
    overrides += ("--activation_checkpoint.mode=full", "--activation_checkpoint.every_n_layers=3")
    config = load_config(DEBUG, overrides)
    best = search_layouts(config, TargetCluster(small_gpu(memory), 4, 4)).best
    for plan in [each.plan for each in best] + [
        replace(best[0].plan, config=best[0].plan.config.model_copy(update={"activation_checkpoint": step}))
        for step in search_command._RECOMPUTATIONS
    ]:
        again = load_config(DEBUG, (*overrides, *options_of(plan, config)), world_size=4)
        assert resolve_plan(again, 4).layout == plan.layout
        assert again.activation_checkpoint == plan.config.activation_checkpoint


@pytest.mark.slow
def test_without_a_fit_the_smallest_cluster_is_named():
    config = run(model={"flavor": "GLM-4.5-Air"})
    cluster = TargetCluster(accelerator_of("H100"), 4)
    found = search_layouts(config, cluster)
    assert not found.best and found.too_large and found.least_memory > 0.92 * 79 * GIB
    smallest = smallest_cluster(config, cluster)
    gpus = smallest.layout.world_size
    assert gpus > 4 and largest_stage(stage_memory(smallest)).total <= 0.92 * 79 * GIB
    half = search_layouts(config, TargetCluster(accelerator_of("H100"), gpus // 2))
    assert not half.best
    assert smallest_cluster(config, TargetCluster(small_gpu(0.5), 4)) is None


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["80", "30"])
def test_the_command_prints_whole_numbers(columns, capsys, monkeypatch, tmp_path):
    """In 80 columns, and unchanged in a narrower window or without a terminal; all candidates are in the JSON file."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(search_command, "_SECONDS_BETWEEN_LINES", 0.0)
    file = tmp_path / "found.json"
    wanted = ["plan", "--config", str(DEBUG), "--gpus", "4", "--gpu", "small:bf16=1,memory=8,bandwidth=100,link=10"]
    assert main([*wanted, "--search", "--json", str(file), "--price=2"]) == 0
    printed, progress = capsys.readouterr()
    found = json.loads(file.read_text())
    assert progress.splitlines()[-1] == "{0:,} of {0:,} layouts".format(
        found["fitting"] + found["too_large"] + sum(found["refused"].values())
    )
    lines = printed.splitlines()
    table = lines[lines.index(next(line for line in lines if "bubble" in line)) :][: 1 + len(found["candidates"][:10])]
    assert "…" not in printed and max(map(len, table)) <= 80
    for line, each in zip(table[1:], found["candidates"], strict=False):
        layout, cells = each["layout"], line.split()
        assert [int(cells[place]) for place in (0, 1, 3, 4, 5)] == [
            layout[axis] for axis in ("tp", "pp", "cp", "ep", "dp_shard")
        ]
        assert cells[6] == each["recomputation"]
        assert float(cells[7]) == pytest.approx(each["days"] * 86_400 / SECONDS[table[0].split()[7]], rel=0.01)
        assert cells[8] == f"{each['mfu']:.1%}" and each["dollars"] == pytest.approx(each["days"] * 24 * 4 * 2)
        assert float(cells[9]) == pytest.approx(each["memory"] / GIB, rel=0.01)
    assert f"  {' '.join(found['candidates'][0]['options'])}" in lines
    for part in ("layouts fit", "options of the first one", "smallest cluster that fits", "without --search"):
        assert part in printed
    assert main([*wanted, "--search", "--model.flavor=GLM-4.6"]) == 1
    printed = capsys.readouterr().out
    assert "0 layouts fit" in printed and "GiB per GPU" in printed


def test_the_search_counts_documents():
    """Attention of short documents is less, so every layout takes less time."""
    searched = (search_layouts(run(), TargetCluster(small_gpu(8), 2), document_tokens=documents)
                for documents in (None, 100))  # fmt: skip
    rows, documents = (
        {tuple(options_of(each.plan, run())): each.cost.days for each in found.best} for found in searched
    )
    assert rows.keys() == documents.keys() and all(documents[options] < rows[options] for options in rows)


def test_a_stated_exchange_is_kept():
    config = run(parallelism={"expert_exchange": "all_to_all"})
    found = search_layouts(config, TargetCluster(small_gpu(3), 8, 4))
    stated = {(each.plan.layout.ep > 1, each.plan.config.parallelism.expert_exchange) for each in found.best}
    assert stated == {(True, "all_to_all"), (False, "auto")} and "parallelism.expert_exchange" not in found.refused


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble"])
def test_the_schedule_of_the_config_is_tried(schedule):
    config = run(parallelism={"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule})
    found = search_layouts(config, TargetCluster(small_gpu(40), 2))
    names = {each.plan.config.parallelism.pipeline_parallel_schedule for each in found.best if each.plan.layout.pp > 1}
    assert schedule in names


PIPELINES = [{"pipeline_parallel_degree": 4},
             {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "DualPipeV"},
             {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "Interleaved1F1B",
              "expert_parallel_degree": 2, "tensor_parallel_degree": 2}]  # fmt: skip


@pytest.mark.parametrize("parallelism", PIPELINES)
def test_ranks_that_are_counted_once_send_what_each_would(parallelism):
    """Equal pipeline ranks are counted once, on which a search relies."""
    for more in ({}, {"adapter": {"rank": 4, "name": "dora"}}, {"optimizer": {"name": "AdamW"}}):
        model = {"flavor": "debug", "shape": {"num_hidden_layers": 8, "num_nextn_predict_layers": 0}}
        config = run(model=model, parallelism=parallelism, **more)
        plan = resolve_plan(config, 16)
        step = _Step(plan, 0, None)
        alone = [traffic_of_rank(step, rank, parts) for rank, parts in enumerate(parts_of_ranks(plan))]
        assert step_traffic(plan) == alone


def test_a_search_finds_what_planning_each_layout_alone_finds():
    config, cluster = run(parallelism={"tensor_parallel_degree": 2}), TargetCluster(small_gpu(2.7), 4, 2)
    found, days = search_layouts(config, cluster), []
    for parallelism in search_command._layouts(config, cluster):
        for step in search_command._RECOMPUTATIONS:
            alone = config.model_copy(update={"parallelism": parallelism, "activation_checkpoint": step})
            plan = resolve_plan(alone, 4, host_ranks=2)
            fits = largest_stage(stage_memory(plan)).total <= 0.92 * 2.7 * GIB
            if fits and not check_config(alone, world_size=4):
                days.append(run_cost(plan, cluster).days)
                break
    assert found.fitting == len(days) > len(found.best) == search_command._MAX_KEPT
    assert [each.cost.days for each in found.best] == sorted(days)[: len(found.best)]


def test_an_interleaved_pipeline_is_tried_with_four_stages_too_where_there_are_layers():
    config, cluster = (
        run(model={"flavor": "debug", "shape": {"num_hidden_layers": 16}}),
        TargetCluster(small_gpu(40), 8),
    )
    tried = {
        (each.pipeline_parallel_degree, each.pipeline_parallel_schedule, each.pipeline_parallel_stages_per_rank)
        for each in search_command._layouts(config, cluster)
    }
    of = [(pp, stages) for pp, schedule, stages in tried if schedule == "Interleaved1F1B" and pp > 1]
    assert sorted(of, key=str) == sorted([(2, None), (4, None), (8, None), (2, 4), (4, 4)], key=str)
    assert {stages for _, schedule, stages in tried if schedule != "Interleaved1F1B"} == {None}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_search_of_94_layers_on_256_gpus_takes_less_than_minutes():
    """Half a minute of a core; `test_a_search_asks_for_each_size_once` counts what it computes."""
    config = run(
        model={"flavor": "GLM-4.6", "shape": {"num_hidden_layers": 94}},
        training={"global_batch_size": 2048, "steps": 10},
    )
    start = time.process_time()
    assert search_layouts(config, TargetCluster(accelerator_of("H100"), 256)).best
    assert time.process_time() - start <= HANG_SECONDS


def test_a_search_asks_for_each_size_once(monkeypatch):
    """Sizes of parameters are counted once for equal layers: a deep model takes no more of them than a flat one."""
    counts, sizes_of = [], Parameter.shape
    monkeypatch.setattr(Parameter, "shape", lambda row, shape: counts.append(1) or sizes_of(row, shape))
    asked = []
    for layers in (8, 64):
        counts.clear()
        config = run(
            model={"flavor": "debug", "shape": {"num_hidden_layers": layers, "vocab_size": 8192 + 64 * layers}},
            parallelism={"tensor_parallel_degree": 1},
            optimizer={"name": "AdamW"},  # Muon plans each matrix
        )
        plan = resolve_plan(config, 8)
        for mode in ("none", "selective", "full"):
            changed = config.model_copy(update={"activation_checkpoint": ActivationCheckpointConfig(mode=mode)})
            memory = largest_stage(stage_memory(replace(plan, config=changed)))
        run_cost(plan, TargetCluster(small_gpu(80), 8))
        asked.append(len(counts))
        assert memory.total > 0
    assert asked[1] <= 1.1 * asked[0]
