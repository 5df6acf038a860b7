"""Predicted time of rollouts: steps of decoding beside published engines, queues of completions, engines that fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.generation import (
    DecodingEngine,
    EngineOptions,
    _generation_seconds,
    _lengths,
    plan_rollouts,
)
from glm46.operate.estimate.report import plan_run
from glm46.operate.estimate.target_cluster import Efficiencies, TargetCluster
from glm46.run.layout import Layout
from glm46.run.parameters import count_parameters
from glm46.run.plan import resolve_plan

ROOT = Path(__file__).resolve().parents[4]
DEEPSEEK_V3 = (
    "vocab_size=129280", "hidden_size=7168", "num_hidden_layers=61", "first_k_dense_replace=3",
    "intermediate_size=18432", "moe_intermediate_size=2048", "n_routed_experts=256", "num_experts_per_tok=8",
    "num_attention_heads=128", "num_key_value_heads=128", "q_lora_rank=1536", "kv_lora_rank=512", "head_dim=192",
    "qk_nope_head_dim=128", "qk_rope_head_dim=64", "v_head_dim=192",
)  # fmt: skip
"""Its shape; values of 192 in place of 128 are 2 % more weights."""
SERVED = ("--rollout.top_p=1.0", "--rollout.kind=vllm", '--rollout.urls=["http://a:1"]', "--rollout.max_num_seqs=")


def cluster_of(gpu: str, gpus: int) -> TargetCluster:
    known = accelerator_of(gpu)
    return TargetCluster(known, gpus, known.host_gpus, efficiencies=Efficiencies.assumed(known))


def flash_config(*overrides: str):
    return load_config(ROOT / "train_configs/glm47_flash_rl.toml", overrides)


def planned(recipe: str, world_size: int, *overrides: str, gpu_bytes: int = 0, **options):
    plan = resolve_plan(load_config(ROOT / f"train_configs/{recipe}.toml", overrides), world_size)
    run = plan_run(plan, cluster_of("H100", world_size), EngineOptions())
    assert run.cost is not None
    cost = run.cost
    if gpu_bytes:
        cost = replace(cost, cluster=replace(cost.cluster, gpu=replace(cost.cluster.gpu, memory_bytes=gpu_bytes)))
    return plan_rollouts(plan, cost, EngineOptions(**options))


@pytest.mark.parametrize(
    ("gpu", "published"),
    [
        # 22,300 tokens/s of eight H100 with experts over 72 GPUs and 2,000-token inputs
        # (lmsys.org/blog/2025-05-05-large-scale-ep).
        ("H100", 22_300 / 8),
        # vLLM's blog of 2025-12-17: 2,200 tokens/s of an H200.
        ("H200", 2_200),
    ],
)
def test_published_engines_of_deepseek_v3_decode_about_as_fast(gpu, published):
    """Neither page states the rows of a GPU: with 128 to 256 the prediction is within 30 %."""
    shape = [f"--model.shape.{each}" for each in DEEPSEEK_V3]
    config = flash_config(*shape, *SERVED, "--rollout.expert_parallel_degree=", "--rollout.weights_dtype=fp8-block",
                          "--parallelism.data_parallel_shard_degree=32")  # fmt: skip
    engine = DecodingEngine(resolve_plan(config, 64), cluster_of(gpu, 64), Layout(1, 1, 64, 1, 1, 64), is_server=True)
    for rows in (128, 256):
        assert rows / engine.step_seconds(64 * rows, 2000) == pytest.approx(published, rel=0.3)


def test_a_step_of_decoding_reads_what_its_rows_choose():
    plan = resolve_plan(flash_config(*SERVED, "--rollout.expert_parallel_degree="))
    engine = DecodingEngine(plan, cluster_of("H100", 1), Layout(1, 1, 1, 1, 1, 1), is_server=True)
    one, eight, many = (engine.step_seconds(rows, 0) for rows in (1, 8, 512))
    bandwidth = 3.35e12 * engine.cluster.efficiencies.memory
    assert one == pytest.approx(2 * 3.6e9 / bandwidth, rel=0.15)  # 3.6B active parameters in BF16
    assert one < eight < many and many >= 2 * 29e9 / bandwidth
    # 1,152 bytes of a token in each of 47 layers (docs/family.md).
    assert engine.step_seconds(512, 4096) - many == pytest.approx(512 * 4096 * 1152 * 47 / bandwidth, rel=1e-6)


def test_a_queue_of_completions_takes_as_long_as_its_parts():
    assert _generation_seconds([3, 3], 2, lambda rows: 1.0) == 3
    assert _generation_seconds([3, 3], 1, lambda rows: 1.0) == 6
    # Two at once; when the first one ends, the third begins: 2 steps of two, 2 of two, 1 of one.
    assert _generation_seconds([2, 4, 3], 2, lambda rows: 10.0**rows) == 100 * 4 + 10 * 1


@pytest.mark.parametrize(("mean", "longest"), [(100, 1000), (500, 1000), (900, 1000), (1000, 1000)])
def test_lengths_have_their_mean_and_their_bound(mean, longest):
    lengths = _lengths(5000, mean, longest)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.01)
    assert max(lengths) <= longest and min(lengths) >= 1


def test_engines_and_trainer_work_beside_each_other_with_staleness():
    recipe = "glm47_flash_rl", 8, *SERVED, "--rollout.expert_parallel_degree="
    turns, beside = planned(*recipe), planned(*recipe, "--rollout.max_staleness=1", "--rl.old_policy=rollout")
    # Sums of three FP64 numbers in another order differ in the last bit.
    assert turns.seconds == pytest.approx(turns.update + turns.generation + turns.training, rel=1e-15, abs=0)
    assert beside.seconds == pytest.approx(beside.update + max(beside.generation, beside.training), rel=1e-15, abs=0)
    assert turns.other_gpus == turns.engine.ranks and turns.gpu_hours == (8 + turns.other_gpus) * turns.days * 24
    assert planned(*recipe, gpus=32).generation < turns.generation / 2
    assert planned(*recipe, completion_tokens=2000).generation < turns.generation / 3
    assert planned(*recipe, "--rollout.weights=broadcast").update < turns.update
    assert planned(*recipe, "--rollout.weights_dtype=fp8-block").update == pytest.approx(turns.update / 2)


def test_each_server_gets_a_copy_of_the_weights_through_the_port_of_rank_0():
    """`WeightSender` sends every bucket to the group of each server."""
    recipe = ("glm47_flash_rl", 8, *SERVED, "--rollout.expert_parallel_degree=", "--rollout.weights=broadcast")
    one_server = planned(*recipe, gpus=2, engine_gpus=2)
    four_servers = planned(*recipe, gpus=8, engine_gpus=2)
    assert (one_server.engines, four_servers.engines) == (1, 4)
    assert four_servers.update == pytest.approx(4 * one_server.update)
    parameters = count_parameters(one_server.engine.plan.shape).total
    assert one_server.update == pytest.approx(2 * parameters / (400e9 / 8 * 0.95))


def test_the_ranks_that_train_generate_with_kernels_from_the_host():
    rollouts = planned("glm47_flash_rl", 8)
    assert rollouts.other_gpus == 0 and rollouts.at_once == 64 and rollouts.rollouts == 3000
    engine = rollouts.engine
    assert engine.step_seconds(8, 0) > replace(engine, is_server=True).step_seconds(8, 0) + 0.01


def test_engines_that_cannot_be_are_refused():
    recipe = "glm47_flash_rl", 8, *SERVED, "--rollout.expert_parallel_degree="
    with pytest.raises(UserError, match="--gpus-per-engine 1: it does not hold"):
        planned(*recipe, "--rollout.max_new_tokens=64", engine_gpus=1, gpu_bytes=60 << 30)
    with pytest.raises(UserError, match="--engines 1: one takes 8 GPUs; give more"):
        planned(*recipe, gpus=1, engine_gpus=8)


def test_the_command_prints_and_writes_rollouts(tmp_path, capsys):
    command = ["plan", "--config", str(ROOT / "train_configs/glm47_flash_rl.toml"), "--gpu", "H100", "--price", "2"]
    assert main([*command, "--json", str(tmp_path / "plan.json"), "--completion-tokens", "8000"]) == 0
    printed, numbers = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())["rollouts"]
    assert "rollouts, predicted for completions of 8,0" in printed and "the GPUs that train" in printed
    assert f"${numbers['dollars']:,.0f}" in printed
    assert numbers["dollars"] == pytest.approx(2 * 8 * 24 * numbers["days"])


def test_the_documented_rollouts_are_the_planned_ones(capsys):
    documented = (ROOT / "docs/planner.md").read_text().partition("\nrollouts, predicted for")[2].partition("```")[0]
    assert main(["plan", "--config", str(ROOT / "train_configs/glm46_rl_grpo.toml"), "--gpu", "H100"]) == 0
    printed = capsys.readouterr().out
    lines = documented.splitlines()
    assert len(lines) == 6 and all(line in printed for line in lines)
