"""The predicted time of a step: kernels against counts of the real model, links, pipelines, and the sums over a run."""

import json
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from glm46.config.errors import UserError
from glm46.config.finetune import FineTuneConfig, PreferenceConfig
from glm46.config.presets import PRESETS
from glm46.config.rl import RLConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.exchange_time import backward_steps, exposed_seconds, forward_steps, waits_for_tokens
from glm46.operate.estimate.kernels import MicroBatch, Work, part_work
from glm46.operate.estimate.memory import plan_memory
from glm46.operate.estimate.plan_sizes import batches_of, hugging_face_bytes
from glm46.operate.estimate.roofline import Roofline
from glm46.operate.estimate.run_cost import count_steps, run_cost
from glm46.operate.estimate.step_time import StepTime, _micro_batch, step_time
from glm46.operate.estimate.target_cluster import Efficiencies, TargetCluster
from glm46.operate.estimate.traffic import step_traffic
from glm46.run.checkpoint_size import checkpoint_size
from glm46.run.flops import attention_flops, training_flops
from glm46.run.layout import Layout
from glm46.run.parameters import layer_counts
from glm46.run.plan import resolve_plan
from glm46.run.schedule import batch_sequences
from scripts.measure.count_kernels import count_chained, count_eager
from tests.ranks.test_two_levels import ORDERS

TOKENS = 4096
ONE = Layout(1, 1, 1, 1, 1, 1)


def run(flavor="GLM-4.5-Air", parallelism=None, **training) -> RunConfig:
    sections = {"model": {"flavor": flavor}, "parallelism": parallelism or {}}
    compile_ = training.pop("compile", {})
    rest = {key: training.pop(key) for key in ("activation_checkpoint", "float8", "optimizer") if key in training}
    training = {"seq_len": 4096, "steps": 10} | training
    return RunConfig.model_validate(sections | rest | {"training": training, "compile": compile_})


def predicted(config: RunConfig, gpu="H100", world=None, network=400.0, **efficiencies) -> StepTime:
    plan = resolve_plan(config, world)
    cluster = TargetCluster(
        accelerator_of(gpu), plan.layout.world_size, 8, network, efficiencies=Efficiencies(**efficiencies)
    )
    return step_time(plan, 0, batches_of(plan, 0)[1], cluster)


def test_a_preference_adds_a_forward_of_its_reference():
    for parallelism in ({}, {"pipeline_parallel_degree": 4}):
        config = run(parallelism=parallelism)
        tasks = (FineTuneConfig(preference=preference) for preference in (None, PreferenceConfig()))
        sft, dpo = (predicted(config.model_copy(update={"finetune": task}), world=8) for task in tasks)
        added = dpo.parts.pop("passes without gradient")
        # The step adds up a few more numbers over all ranks.
        assert dpo.parts == pytest.approx(sft.parts, rel=1e-4) and dpo.model_flops == sft.model_flops
        computed = sum(sft.parts[name] for name in ("products", "experts", "attention", "memory"))
        if parallelism:  # stages are not equal, and the last one waits for the others
            assert 0 < added < sft.seconds
        else:
            # One forward, of which forward and backward are three, and its gathers, which no other work hides here.
            waited = sft.parts["waiting for weights and gradients"]
            assert 0.3 * computed + 0.1 * waited < added < 0.35 * (computed + waited)


def test_kto_adds_three_forwards_and_losses_without_a_reference_none():
    config = run(parallelism={})
    added = {
        loss_type: predicted(
            config.model_copy(update={"finetune": FineTuneConfig(preference=PreferenceConfig(loss_type=loss_type))}),
            world=8,
        ).parts.get("passes without gradient", 0.0)
        for loss_type in ("sigmoid", "ipo", "kto", "simpo", "orpo")
    }
    assert added["simpo"] == added["orpo"] == 0.0 and added["ipo"] == added["sigmoid"]
    # The gathers of both passes of the reference hide one another alike.
    assert added["kto"] == pytest.approx(3 * added["sigmoid"], rel=0.02)


def test_reinforcement_learning_adds_passes_without_gradient_and_the_update_of_a_critic():
    tasks = {name: RLConfig.model_validate({"prompts_per_rollout": 2} | keys) for name, keys in {
        "grpo": {"algorithm": "grpo"}, "ppo": {"algorithm": "ppo"},
        "all": {"algorithm": "ppo", "kl": {"weight": 0.1}}, "none": {"algorithm": "tv", "kl": {"weight": 0.0}},
        "one step": {"algorithm": "gspo", "prompts_per_rollout": 1},
    }.items()}  # fmt: skip
    config = run(global_batch_size=8)
    steps = {name: predicted(config.model_copy(update={"rl": task}), world=8).parts for name, task in tasks.items()}
    passes = {name: parts.pop("passes without gradient", 0.0) for name, parts in steps.items()}
    once = passes["grpo"]
    assert once > 0 and passes == pytest.approx(
        {"grpo": once, "ppo": 2 * once, "all": 3 * once, "none": 0.0, "one step": 0.0}
    )
    assert steps["grpo"] == steps["none"] == steps["one step"]
    critic = steps["ppo"].pop("critic")
    assert steps["ppo"] == steps["grpo"] and critic == pytest.approx(sum(steps["ppo"].values()))


def planned_work(part: str, shape, layout=ONE, **options) -> tuple[float, int]:
    """Planned bytes besides products and attention, and all kernels, of forward and backward."""
    batch = MicroBatch(shape, layout, TOKENS, TOKENS, None, **options)
    work = part_work(part, batch, "none")
    both = [*work.forward, *work.backward]
    return sum(each.nbytes for each in both if each.kind == "memory"), sum(each.kernels for each in both)


FORMS = [
    ("moe", "bfloat16", False, 1), ("dense", "bfloat16", False, 1), ("moe", "bfloat16", False, 4),
    ("moe", "float32", False, 1), ("dense", "float32", False, 1),
    *(pytest.param(part, dtype, True, 1, marks=pytest.mark.slow) for part in ("moe", "dense")
      for dtype in ("bfloat16", "float32")),
]  # fmt: skip


@pytest.mark.parametrize(("part", "dtype", "is_compiled", "ranks"), FORMS)
@pytest.mark.parametrize("flavor", ["GLM-4.6", "GLM-4.5-Air"])
def test_bytes_and_kernels_of_a_layer_are_those_of_the_model(part, dtype, is_compiled, ranks, flavor):
    """Without products and attention, which are counted by formula. 2 %: biases, tables and statistics."""
    shape = PRESETS[flavor]
    form = {"is_dense": part == "dense", "dtype": getattr(torch, dtype), "whole": True}
    count = count_chained(shape, TOKENS, **form) if is_compiled else count_eager(shape, TOKENS, ranks=ranks, **form)
    others = {"experts", "products", "attention", "exchange"}
    layout = ONE if ranks == 1 else Layout(1, 1, ranks, 1, 1, ranks)
    nbytes, kernels = planned_work(part, shape, layout, param_dtype=dtype, is_compiled=is_compiled)
    assert nbytes == pytest.approx(sum(size for kind, size in count.bytes.items() if kind not in others), rel=0.02)
    assert kernels == pytest.approx(count.kernels, abs=3)


def test_products_of_a_layer_are_its_flops():
    """Forward and backward of all parts together are the FLOPs that MFU counts; backward of attention has a product
    more."""
    shape = PRESETS["GLM-4.6"]
    batch = MicroBatch(shape, ONE, TOKENS, TOKENS, None, "bfloat16", False)
    flops = training_flops(shape, TOKENS)
    of = {part: part_work(part, batch, "none") for part in ("embedding", "dense", "moe", "mtp", "head")}
    dense, moe, mtp = layer_counts(shape)
    times = {"embedding": 1, "dense": dense, "moe": moe, "mtp": mtp, "head": 1 + mtp}
    by_kind = Counter()
    for part, count in times.items():
        for work in (*of[part].forward, *of[part].backward):
            by_kind[work.kind] += count * work.flops / TOKENS
    attention = sum(times[part] for part in ("dense", "moe", "mtp")) * attention_flops(shape, TOKENS)
    assert by_kind["attention"] == pytest.approx(attention * 3.5 / 3)
    assert by_kind["products"] + by_kind["experts"] + attention == pytest.approx(flops.total)


def test_ranks_beyond_the_key_heads_gather_them_and_each_attends_with_a_whole_one():
    """GLM-4.6 has eight. The gather goes between two neighbours, inside a node."""
    shape, tokens = PRESETS["GLM-4.6"], TOKENS / 16
    batch = MicroBatch(shape, Layout(1, 1, 1, 1, 16, 16), tokens, TOKENS, None, "bfloat16", False)
    [attention] = (work for work in part_work("moe", batch, "none").forward if work.kind == "attention")
    assert attention.nbytes == 2 * tokens * (shape.num_attention_heads + 16) * shape.head_dim * 2
    step = predicted(run("GLM-4.6", {"tensor_parallel_degree": 16}), world=16)
    assert 0 < step.parts["waiting for tp_head"] < 0.1 * step.parts["waiting for tp"]
    step = predicted(run("GLM-4.6", {"tensor_parallel_degree": 8}), world=8)
    assert "waiting for tp_head" not in step.parts


def test_a_split_layer_computes_a_share():
    """Tensor and expert parallelism divide the work of a layer over the ranks, and experts keep their number of
    rows."""
    shape = PRESETS["GLM-4.6"]
    whole = MicroBatch(shape, ONE, TOKENS, TOKENS, None, "bfloat16", False)
    split = replace(whole, layout=Layout(1, 1, 1, 1, 8, 8), tokens=TOKENS / 8)
    for part in ("dense", "moe", "mtp", "head"):
        one, share = part_work(part, whole, "full"), part_work(part, split, "full")
        assert sum(w.flops for w in share.forward) == pytest.approx(sum(w.flops for w in one.forward) / 8)
        if part != "moe":
            assert share.recomputed == (() if part == "head" else share.forward)
            continue
        # Backward reads nothing of the experts' second product, but in a prediction layer, where a norm follows it.
        [left_out] = [work for work in share.forward if work not in share.recomputed]
        assert left_out.flops == 2 * TOKENS * 8 / 8 * shape.moe_intermediate_size * shape.hidden_size
    weights = {work.nbytes for work in part_work("moe", split, "none").forward if work.kind == "experts"}
    rows = TOKENS / 8 * 8
    inner, D = shape.moe_intermediate_size, shape.hidden_size
    assert weights == {2 * (20 * n * m + rows * (n + m)) for n, m in ((2 * inner, D), (D, inner))}


def test_the_roofline_takes_the_longer_of_both():
    config = run(parallelism={}, local_batch_size=1)
    slow, fast = predicted(config), predicted(config, gpu="B200")
    assert fast.seconds < slow.seconds
    # Without any bandwidth limit the products take their FLOPs over the peak.
    free = predicted(
        config,
        "X:bf16=1000,memory=1000,bandwidth=1e9,link=1e9",
        products=1.0,
        experts=1.0,
        experts_rows=0.0,
        attention=1.0,
        launch_seconds=1e-12,
    )
    flops = training_flops(PRESETS["GLM-4.5-Air"], 4096)
    assert free.parts["products"] + free.parts["experts"] == pytest.approx(
        4096 * (flops.total - 47 * attention_flops(PRESETS["GLM-4.5-Air"], 4096)) / 1e15
    )
    assert free.parts["optimizer"] > 0 and free.mfu < 1
    # Tiny layers take the time of their launches.
    small = predicted(run("debug", local_batch_size=1, seq_len=64))
    assert small.parts["launches"] > small.seconds / 2


def test_what_makes_a_step_slower_and_faster():
    spread = {"expert_parallel_degree": 8, "data_parallel_shard_degree": 16}
    base = predicted(run(parallelism=spread))
    assert predicted(run(parallelism=spread), network=100.0).seconds > base.seconds
    assert predicted(run(parallelism=spread), gpu="H800").seconds > base.seconds
    full = predicted(run(parallelism=spread, activation_checkpoint={"mode": "full"}))
    selective = predicted(run(parallelism=spread, activation_checkpoint={"mode": "selective"}))
    assert base.parts.get("recomputation", 0) == 0 < selective.parts["recomputation"] < full.parts["recomputation"]
    assert full.parts["waiting for ep"] > base.parts["waiting for ep"]
    steps = [
        predicted(run(parallelism=spread, activation_checkpoint={"mode": "selective", "recompute": some})).parts
        for some in ((), ("core_attn",), ("core_attn", "experts"), ("core_attn", "experts", "exchange"))
    ]
    times = [parts["recomputation"] for parts in steps]
    assert times[0] < times[1] < times[2] == times[3]
    # Of the prediction layer `full` repeats the second product of the experts too.
    assert times[3] < full.parts["recomputation"] < 1.01 * times[3]
    waits = [parts["waiting for ep"] for parts in steps]
    assert waits[:3] == pytest.approx([selective.parts["waiting for ep"]] * 3) and waits[3] > 1.1 * waits[2]
    half = predicted(run(parallelism=spread, activation_checkpoint={"mode": "full", "every_n_layers": 2})).parts
    assert half["recomputation"] == pytest.approx(full.parts["recomputation"] / 2, rel=0.03)  # 24 of 47 layers
    assert half["waiting for ep"] < full.parts["waiting for ep"]
    fp8 = predicted(run(parallelism=spread, float8={"recipe_name": "rowwise", "experts_recipe_name": "rowwise"}))
    assert fp8.parts["products"] < base.parts["products"]
    assert fp8.parts["experts"] == pytest.approx(base.parts["experts"])  # as measured on an H100
    compiled = predicted(run(parallelism=spread, compile={"enable": True}))
    assert compiled.parts["memory"] < base.parts["memory"]
    tensor = predicted(run(parallelism={"tensor_parallel_degree": 8, "data_parallel_shard_degree": 2}))
    assert tensor.parts["waiting for tp"] > 0 and "waiting for tp" not in base.parts
    adamw = predicted(run(parallelism=spread, optimizer={"name": "AdamW"}))
    assert adamw.parts["optimizer"] != base.parts["optimizer"]


def test_links_inside_and_between_nodes():
    cluster = TargetCluster(accelerator_of("H100"), 64, 8, 400.0, efficiencies=Efficiencies(link=1.0, network=0.5))
    inside, port = 450e9, 25e9
    assert cluster.link(1, 8) == cluster.link(2, 4) and cluster.link(1, 8).bytes_per_second == inside
    # Eight members in each node share eight ports; one member has one.
    assert cluster.link(1, 16).bytes_per_second == 8 * port and cluster.link(8, 8).bytes_per_second == port
    # Half of what a rank exchanges with 15 others stays inside the node: 7 of 15.
    assert cluster.link(1, 16).exchange_bytes_per_second == pytest.approx(1 / (8 / 15 / port + 7 / 15 / inside))
    assert not cluster.link(1, 16).inside_node and cluster.link(1, 4).inside_node


def test_a_pipelined_step_has_the_bubble_of_its_schedule():
    """With equal stages it would be that of the formula; here the slowest rank waits for ranks that take less time."""
    layout = {"pipeline_parallel_degree": 4, "data_parallel_shard_degree": 8}
    few = run("GLM-4.6", layout, global_batch_size=64, seq_len=1024)
    many = run("GLM-4.6", layout, global_batch_size=512, seq_len=1024)
    shares = []
    for config in (few, many):
        step = predicted(config)
        shares.append(step.parts["pipeline bubble"] / step.seconds)
    assert 0.8 * 3 / 11 < shares[0] < 3 / 11
    assert 0.8 * 3 / 67 < shares[1] < 3 / 67


def test_the_cost_of_a_run_is_the_sum_of_its_steps():
    config = run(
        "debug", seq_len=128, global_batch_size=[[0, 8], [64_000, 64], [96_000, 64]], tokens=128 * 15_000, steps=None
    )
    plan = resolve_plan(config, 2)
    cluster = TargetCluster(accelerator_of("H100"), 2, price=2.5)
    cost = run_cost(plan, cluster)
    clock, steps, seconds = 0, 0, 0.0
    while clock < plan.budget_tokens:
        rows = batch_sequences(config.training.global_batch_size, clock, plan.rows_per_micro_batch)
        clock, steps = clock + rows * 128, steps + 1
        seconds += step_time(plan, 0, rows, cluster).seconds
    assert cost.steps == steps
    assert cost.days * 86_400 == pytest.approx(seconds, rel=0.01)  # the last step is cut off
    assert cost.gpu_hours == pytest.approx(2 * seconds / 3600, rel=0.01)
    assert cost.dollars == pytest.approx(2.5 * cost.gpu_hours)
    assert run_cost(plan, replace(cluster, price=None)).dollars is None


def test_steps_of_stages():
    sections = {"model": {"flavor": "debug"}, "training": {"seq_len": 128, "steps": 9, "global_batch_size": 4}}
    stages = ({"start_tokens": 0, "seq_len": 64}, {"start_tokens": 640})
    plan = resolve_plan(RunConfig.model_validate(sections | {"data": {"stages": stages}}), 1)
    assert count_steps(plan) == [3, 6]
    began = time.process_time()
    assert count_steps(resolve_plan(run("debug", seq_len=128, steps=10**9), 2)) == [10**9]
    assert time.process_time() - began < 60  # one by one takes minutes


def test_the_size_of_a_checkpoint():
    plan = resolve_plan(run("GLM-4.6", optimizer={"name": "AdamW"}))
    trained = 356_785_898_816 - 90 * 160  # without the selection biases
    size = checkpoint_size(plan)
    assert (size.weights, size.states, hugging_face_bytes(plan)) == (4 * trained, 8 * trained, 2 * trained)
    assert checkpoint_size(resolve_plan(run("GLM-4.6"))).states < 1.02 * 4 * trained
    # An export of GLM-4.7 repeats embedding and head, see docs/family.md.
    assert hugging_face_bytes(resolve_plan(run("GLM-4.7"))) == 2 * (358_337_791_296 - 90 * 160)


def test_a_checkpoint_is_written_by_all_nodes():
    cluster = TargetCluster(accelerator_of("H100"), 64, 8, storage_gbytes=4.0)
    assert cluster.writing_seconds(64e9) == 2.0
    assert TargetCluster(accelerator_of("H100"), 1, 8, storage_gbytes=4.0).writing_seconds(4e9) == 1.0


def test_offloaded_states_pass_the_host_link_beside_the_update():
    spread = {"expert_parallel_degree": 8, "data_parallel_shard_degree": 32}
    plain, offloaded = (run(parallelism=spread, optimizer={"state_offload": place}) for place in ("none", "cpu"))
    kept, moved = predicted(plain), predicted(offloaded)
    of_rank = plan_memory(offloaded, 32).host / 25e9
    assert "waiting for the host" not in kept.parts
    assert moved.seconds - kept.seconds == pytest.approx(moved.parts["waiting for the host"])
    others = moved.parts["optimizer"] + moved.parts["waiting for Muon's matrices"]
    assert moved.parts["waiting for the host"] == pytest.approx(of_rank - others)
    assert "waiting for the host" not in predicted(offloaded, host_bytes_per_second=1e15).parts


def test_states_in_a_file_pass_the_slower_of_disk_and_host_link():
    spread = {"expert_parallel_degree": 8, "data_parallel_shard_degree": 32}
    filed = {"state_offload": "nvme", "state_offload_folder": "/scratch"}
    plain, offloaded = (run(parallelism=spread, optimizer=keys) for keys in ({}, filed))
    kept, moved = predicted(plain), predicted(offloaded)
    of_rank = plan_memory(offloaded, 32).disk / 2e9
    others = moved.parts["optimizer"] + moved.parts["waiting for Muon's matrices"]
    assert moved.parts["waiting for the disk"] == pytest.approx(of_rank - others)
    assert moved.seconds - kept.seconds == pytest.approx(of_rank - others)
    assert predicted(offloaded, host_bytes_per_second=1e9).parts["waiting for the disk"] == pytest.approx(
        2 * of_rank - others
    )
    # The file of offloaded weights has the states only.
    assert predicted(run(parallelism=spread, optimizer=filed, parameter_offload=True)).parts == moved.parts


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_a_critic_moves_its_own_states_once(place):
    filed = {"state_offload_folder": "/scratch"} if place == "nvme" else {}
    config = run(global_batch_size=8, optimizer={"state_offload": place} | filed)
    grpo, ppo = (
        predicted(config.model_copy(update={"rl": RLConfig(algorithm=name, prompts_per_rollout=2)}), world=8).parts
        for name in ("grpo", "ppo")
    )
    waiting = "waiting for the disk" if place == "nvme" else "waiting for the host"
    assert ppo[waiting] == pytest.approx(grpo[waiting]) and grpo[waiting] > 0


def test_a_described_gpu_and_wrong_descriptions():
    gpu = accelerator_of("MI300X:bf16=1307, memory=191, bandwidth=5300, link=448")
    assert (gpu.name, gpu.bf16_flops, gpu.memory_bytes) == ("MI300X", 1307e12, 191 * 2**30)
    assert (gpu.memory_bandwidth, gpu.link_bandwidth, gpu.fp8_flops) == (5.3e12, 448e9, 1307e12)
    assert accelerator_of("X:bf16=1,memory=1,bandwidth=1,link=1,capability=9").fp8_flops == 2e12
    assert accelerator_of("h800").link_bandwidth == 200e9
    for text, words in {
        "H8000": "did you mean H800",
        "abacus": "Known: GB300",
        "X:bf16=1": "lacks bandwidth, link, memory",
        ":bf16=1,memory=1,bandwidth=1,link=1": "has no name",
        "X:speed=1": "KEY=NUMBER",
        "X:bf16=fast": "KEY=NUMBER",
        "X:bf16=-1": "greater than 0",
    }.items():
        with pytest.raises(ValueError, match=words):
            accelerator_of(text)


def test_a_described_gpu_has_the_hosts_and_the_links_of_its_name():
    numbers = "bf16=2500,memory=184,bandwidth=8000,link=900,capability=10"
    for name, (host, ranks) in {f"GB200x:{numbers}": (4, 32), "GB300": (4, 32), f"X:{numbers}": (8, 8)}.items():
        gpu = accelerator_of(name)
        cluster = TargetCluster(gpu, 256, gpu.host_gpus)
        assert cluster.host_ranks == host
        assert cluster.link(1, ranks).inside_node and not cluster.link(1, 128).inside_node


@pytest.mark.parametrize("kind", ["experts", "attention"])
def test_small_kernels_and_fp8_products_reach_less_of_the_peak(kind):
    """Half with as many rows of an expert, or queries of a document, as the key says."""
    shares = Efficiencies(experts_rows=600.0, attention_rows=600.0, fp8=0.7)
    cluster = TargetCluster(accelerator_of("H100"), 8, efficiencies=shares)
    plan = resolve_plan(run(parallelism={}, local_batch_size=1), 8)
    roofline, peak = Roofline(cluster, plan), cluster.gpu.bf16_flops
    seconds = [roofline.kernel(Work(kind, peak, 0.0, rows=rows)) for rows in (0.0, 600.0, 150.0)]
    assert [each / seconds[0] for each in seconds] == pytest.approx([1, 2, 5])
    fp8 = roofline.kernel(Work("products", peak, 0.0, in_fp8=True))
    assert roofline.kernel(Work("products", peak, 0.0)) / fp8 == pytest.approx(1.4)


@pytest.mark.parametrize(("parallelism", "documents", "queries"),
                         [({}, None, 4096), ({}, 300, 300), ({"context_parallel_degree": 2}, None, 1024)])  # fmt: skip
def test_attention_works_on_the_queries_of_a_document_or_of_a_part_of_a_row(parallelism, documents, queries):
    plan = resolve_plan(run(parallelism=parallelism), 8, documents)
    [attention] = [
        each for each in part_work("dense", _micro_batch(plan, 0), "none").forward if each.kind == "attention"
    ]
    assert attention.rows == queries


def test_measured_efficiencies(tmp_path):
    file = tmp_path / "efficiencies.json"
    file.write_text(json.dumps({"products": 0.6, "source": "H100, 2026-11-22"}))
    read = Efficiencies.read(file, Efficiencies())
    assert (read.products, read.experts, read.measured) == (0.6, Efficiencies().experts, {"products"})
    assert read.source.startswith("H100, 2026-11-22; assumed: experts, attention, memory, link")
    others = (
        '{"speed": 1}',
        '{"memory": 1.01}',
        '{"measured": 1}',
        '{"products": "fast"}',
        '{"products": true}',
        '{"products": -1}',
        '{"source": [1]}',
    )
    for text in (*others, '{"products": 1e999}', "{", "[]", "", "\udcff\udcfe", "\0" * 9, "[" * 99999):
        file.write_text(text, errors="surrogateescape")
        with pytest.raises(UserError, match="efficiencies.json: .*; give --measured a file") as caught:
            Efficiencies.read(file, Efficiencies())
        assert str(caught.value).count("\n") == 0
    (tmp_path / "loop").symlink_to("loop")
    for place, words in {"none": "no such file", "loop": "symbolic links", ".": "Is a directory"}.items():
        with pytest.raises(UserError, match=words):
            Efficiencies.read(tmp_path / place, Efficiencies())


@pytest.mark.parametrize(("ranks", "rows"), [(8, {"ep_host": 5.34}), (32, {"ep_hosts": 3.63, "ep_host": 7.36})])
def test_tokens_that_travel_in_two_levels_are_counted_by_level(ranks, rows):
    """d(p) of GLM-4.5-Air in nodes of eight: the table of docs/experts.md, here with a rank's own rows."""
    for chunks in (1, 2):
        parallelism = {"expert_parallel_degree": ranks, "expert_exchange_chunks": chunks}
        plan = resolve_plan(run(parallelism=parallelism), 32, host_ranks=8)
        sent = [each for each in step_traffic(plan)[0] if each.what == "tokens to experts"]
        row = 2 * plan.shape.hidden_size * TOKENS
        assert {each.axis: chunks * each.nbytes / each.calls / row for each in sent} == pytest.approx(rows, abs=0.01)


@pytest.mark.parametrize("hops", [1, 2])
def test_the_timeline_has_the_order_of_real_ranks(hops):
    """`ORDERS` is what ranks log: forward and backward, sends numbered through both."""
    forward, backward, words, sends = forward_steps(2, hops), backward_steps(2, hops), [], 0
    for steps in (forward, backward):
        numbers: dict[int, int] = {}
        for step in steps:
            if step.kind == "send":
                numbers[step.number], sends = sends, sends + 1
            if step.kind in ("gate_up", "down"):
                words += ["experts"] if words[-1] != "experts" else []
            elif step.kind in ("send", "wait"):
                words.append(f"{step.kind}{numbers[step.number]}")
    assert " ".join(words) == ORDERS[hops, "none"]


def test_a_timeline_hides_what_travels_beside_kernels():
    """By hand: chunks of 2 s of products, 1 s to send; the shared expert takes 0.5 s."""
    seconds = {"shared": 0.5, "gate_up": 1.5, "down": 0.5}
    hops = {(0, False): 1.0, (0, True): 1.0}
    # The first way there has half a second beside the shared expert; the last way back is exposed.
    assert exposed_seconds(forward_steps(2, 1), seconds, hops, 0.0) == pytest.approx(0.5 + 1.0)
    assert exposed_seconds(forward_steps(2, 1), seconds, hops, 0.1) == pytest.approx(1.5 + 0.1 * 2.5)
    # At once: both ways of 2 s, but for the shared expert.
    whole = {"shared": 0.5, "gate_up": 3.0, "down": 1.0}
    assert exposed_seconds(forward_steps(1, 1), whole, dict.fromkeys(hops, 2.0), 0.0) == pytest.approx(1.5 + 2.0)
    assert exposed_seconds(forward_steps(1, 1, returns=False), whole, dict.fromkeys(hops, 2.0), 0.0) == 1.5


LAYERS = [("GLM-4.5-Air", 8, 0.05), ("GLM-4.5-Air", 16, 0.4), ("GLM-4.5-Air", 32, 0.38), ("GLM-4.6", 16, 0.4)]


@pytest.mark.parametrize(("flavor", "ranks", "gain"), LAYERS)
def test_two_levels_in_chunks_make_a_layer_faster(flavor, ranks, gain):
    """Forward and backward of one compiled MoE layer of 4,096 tokens on H100 with 400 Gbit/s, as the run chooses it,
    against a row for each expert at once. Published overlaps reach about half of what such a timeline says."""
    seconds = []
    for exchange in ("all_to_all", "auto"):
        parallelism = {"expert_parallel_degree": ranks, "expert_exchange": exchange}
        plan = resolve_plan(run(flavor, parallelism, compile={"enable": True}), 32, host_ranks=8)
        shares = Efficiencies(
            products=0.72, experts=0.60, experts_rows=0.0, attention=0.50, attention_rows=0.0, memory=0.80, network=0.75
        )
        cluster = TargetCluster(accelerator_of("H100"), 32, 8, 400.0, efficiencies=shares)
        seconds.append(layer_seconds(plan, cluster))
    assert 1 - seconds[1] / seconds[0] >= gain, seconds


def layer_seconds(plan, cluster) -> float:
    """Forward and backward of one MoE layer."""
    roofline, batch = Roofline(cluster, plan), _micro_batch(plan, 0)
    work = part_work("moe", batch, "none")
    return sum(roofline.kernels(each).seconds for each in (work.forward, work.backward)) + sum(
        waits_for_tokens(plan, roofline, batch, 0.0)
    )


def test_copies_of_activations_take_what_kernels_do_not_hide():
    def plan(moves: bool, **rate: float) -> StepTime:
        options = {"mode": "full", "cpu_checkpointing": moves}
        return predicted(run(global_batch_size=8, activation_checkpoint=options), world=8, **rate)

    kept, (fast, slow, slower) = plan(False), (plan(True, host_bytes_per_second=rate) for rate in (25e9, 2e8, 1e8))
    assert fast.seconds == kept.seconds and "waiting for the host" not in fast.parts
    # Each layer's input, and of the prediction layer its embeddings; the two last layers do not come back.
    inputs = 4096 * PRESETS["GLM-4.5-Air"].hidden_size * 2
    layers = PRESETS["GLM-4.5-Air"].num_hidden_layers
    assert slower.seconds - slow.seconds == pytest.approx(inputs * (layers + 2 + layers - 1) / 2e8)
