"""The plan of a run with stages of text: one screen that says what a step of each stage is, and whether it fits."""

import re

import pytest

from glm46.config.parallelism import ParallelismConfig
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.estimate.memory import plan_memory, stage_memory, step_text
from glm46.operate.estimate.plan_sizes import batches_of, bubble, run_flops
from glm46.operate.estimate.report import plan_run, plan_text
from glm46.operate.estimate.requirement import describe_requirement, stage_table
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.run.flops import training_flops
from glm46.run.plan import Plan, resolve_plan
from tests.unit.operate.estimate.pipeline_orders import pipeline_order, simulate

B, T = 10**9, 10**12
LENGTHS = [32_768, 65_536, 131_072, 196_608]
ROPE = [
    None, {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    {"rope_type": "linear", "factor": 6.0},
]  # fmt: skip
STAGES = [
    {"start_tokens": 22 * T + index * 250 * B, "seq_len": length, "sliding_window": 65_536 if index == 3 else None}
    | ({} if rope is None else {"rope_scaling": rope})
    for index, (length, rope) in enumerate(zip(LENGTHS, ROPE, strict=True))
]
BATCHES = [[22 * T, 4096], [22 * T + 250 * B, 4096], [22 * T + 250 * B, 2048]]


def table(plan: Plan) -> list[str]:
    return stage_table(plan, stage_memory(plan))


def run(tokens=T, **tables) -> RunConfig:
    """GLM-4.6 on 8,192 GPUs with four stages of 250B tokens."""
    parallelism = {
        "tensor_parallel_degree": 8, "pipeline_parallel_degree": 16, "expert_parallel_degree": 32,
        "data_parallel_shard_degree": 64,
    }  # fmt: skip
    sections = {
        "model": {"flavor": "GLM-4.6"}, "data": {"stages": STAGES},
        "training": {"seq_len": LENGTHS[-1], "tokens": tokens, "local_batch_size": 1, "global_batch_size": BATCHES},
        "lr_scheduler": {"start_tokens": 22 * T}, "activation_checkpoint": {"mode": "full"}, "parallelism": parallelism,
    }  # fmt: skip
    return RunConfig.model_validate(sections | tables)


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_a_plan_of_four_stages_is_one_screen():
    text = plan_text(plan_run(resolve_plan(run()), TargetCluster(accelerator_of("H100"), 8192)))
    assert len(text.splitlines()) <= 65 and max(map(len, text.splitlines())) <= 140
    rows = text.split("stages of text\n")[1].splitlines()[1:5]
    assert [cells(row)[:6] for row in rows] == [
        ["1", "22T", "250B", "32,768", "none", "none"],
        ["2", "22.25T", "250B", "65,536", "none", "linear x 2"],
        ["3", "22.5T", "250B", "131,072", "none", "yarn x 4 of 32,768"],
        ["4", "22.75T", "250B", "196,608", "65,536", "linear x 6"],
    ]
    # Micro-batches of one sequence on 64 ranks; idle 15 of 64 + 15 and of 32 + 15 times.
    assert [cells(row)[6:9] for row in rows] == [["4,096", "64", "19%"]] + [["2,048", "32", "32%"]] * 3
    assert "at 196,608 tokens" in text


def test_each_stage_has_its_flops_and_memory():
    config = run()
    plan = resolve_plan(config)
    shape = PRESETS["GLM-4.6"].model_copy(update={"sliding_window": 65_536})
    assert plan.text_stages[3].shape.sliding_window == 65_536
    flops = [training_flops(shape if length == LENGTHS[3] else PRESETS["GLM-4.6"], length).total for length in LENGTHS]
    of_stages = zip(flops, plan.stage_tokens, strict=True)
    assert run_flops(plan) == pytest.approx(sum(each * tokens for each, tokens in of_stages))
    shown = [float(cells(line)[9].replace(",", "")) for line in table(plan)[1:]]
    assert shown == pytest.approx([each / 1e9 for each in flops], rel=1e-3)
    memory = stage_memory(plan)
    assert [each.total for each in memory] == sorted(each.total for each in memory)
    assert plan_memory(config, 8192) == memory[3]
    # Like runs of one stage each, but that a pipeline divides the layers once, for the longest sequence.
    alone = run(data={}, training=config.training.model_dump() | {"seq_len": 32_768}, parallelism={})
    staged = run(
        data={"stages": [{"start_tokens": 22 * T, "seq_len": 32_768}]},
        parallelism={},
        training=config.training.model_dump(),
    )
    assert plan_memory(staged, 64) == plan_memory(alone, 64)
    # 4,096 sequences of 32,768 tokens are fewer than 2,048 of 196,608.
    assert step_text(plan) == 2_048 / 64 * 196_608 * 8 * 6


def test_fits_is_said_of_each_stage():
    plan = resolve_plan(run())
    first, *_, last = (each.total for each in stage_memory(plan))
    lines = stage_table(plan, stage_memory(plan), (first + last) / 2)
    assert cells(lines[1])[-1] == "yes" and cells(lines[4])[-1] == "no"
    gpu = Machine(1, 2**50, 2**50, (Gpu("H100", 80 * 2**30),) * 8192)
    assert describe_requirement(run(), gpu)[0]
    assert cells(table(plan)[1])[-1] == "unknown"


def test_stages_after_the_end_of_a_run_are_named():
    lines = table(resolve_plan(run(tokens=300 * B)))
    assert len(lines) == 4 and lines[-1] == "stages 3 to 4 begin after the end of this run"
    assert cells(lines[2])[2] == "50B"


def test_the_batches_of_a_stage():
    """The smallest and the largest step, at the edges of the stage and at each point of a ramp inside it."""
    ramp = [[22 * T, 128], [22 * T + 100 * B, 1024], [22 * T + 100 * B, 64], [22 * T + 300 * B, 64]]
    config = run()
    plan = resolve_plan(run(training=config.training.model_dump() | {"global_batch_size": ramp}))
    assert batches_of(plan, 0) == (64, 1_024)
    assert [batches_of(plan, index) for index in (1, 2, 3)] == [(64, 64)] * 3
    assert cells(table(plan)[1])[6:9] == ["64 to 1,024", "1 to 16", "94% to 48%"]


COSTS = {"forward": 1, "backward": 2, "input gradient": 1, "weight gradient": 1}


@pytest.mark.parametrize("name, each", [
    ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_bubble_is_that_of_torchs_order(name, each, ranks):
    layout = ParallelismConfig(
        pipeline_parallel_degree=ranks, pipeline_parallel_schedule=name, pipeline_parallel_stages_per_rank=each
    )
    for micro_batches in (1, ranks // 2, ranks, ranks * 3 // 2, 2 * ranks, 4 * ranks, 8 * ranks):
        try:
            expected = simulate(pipeline_order(layout, micro_batches), lambda kind, stage: COSTS[kind]).bubble
        except ValueError:  # the schedule takes no such number
            assert name == "DualPipeV" and micro_batches < 2 * ranks
            continue
        found = bubble(layout, micro_batches)
        if name == "InterleavedZeroBubble" and micro_batches < ranks:
            assert expected - 1e-9 <= found <= expected + 0.1
        else:
            assert found == pytest.approx(expected, abs=1e-9), micro_batches


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_the_bubble_of_one_stage_per_rank(name):
    """(p - 1) / (m + p - 1): Narayanan et al., arXiv 2104.04473."""
    layout = ParallelismConfig(pipeline_parallel_degree=16, pipeline_parallel_schedule=name)
    assert bubble(layout, 16) == pytest.approx(15 / 31) and bubble(layout, 64) == pytest.approx(15 / 79)
    assert bubble(ParallelismConfig(), 4) == 0
