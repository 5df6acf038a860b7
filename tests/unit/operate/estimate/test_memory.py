"""The memory formulas against what a small model allocates, and against sums that can be done by hand.

What a rank holds of weights, gradients, states and activations on layouts is in tests/ranks/test_planned_steps.py.
"""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from glm46.compute.distributed.sequence import SequenceShard
from glm46.compute.model.adapters import add_adapters
from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.sparse_attention import SparseState
from glm46.compute.model.transformer import Transformer
from glm46.compute.optim.compact_state import copy_states, state_parts
from glm46.compute.optim.optimizers import build_optimizers
from glm46.compute.parallelize import activation_checkpoint
from glm46.config.adapter import AdapterConfig
from glm46.config.loader import load_config
from glm46.config.parallelism import ActivationCheckpointConfig
from glm46.config.presets import PRESETS, resolve_shape
from glm46.config.run_config import RunConfig
from glm46.operate.estimate.activations import (
    Frozen,
    LayerBytes,
    attention_backward_bytes,
    travelling_key_bytes,
)
from glm46.operate.estimate.memory import OFFLOAD_ITEM_BYTES, plan_memory
from glm46.operate.estimate.rank_parts import StagePart
from glm46.operate.estimate.sparse_choices import kept_choices
from glm46.run.context_keys import attended_keys, gathered_key_bytes, kernel_runs, sparse_form
from glm46.run.layout import resolve_layout, smallest_world
from glm46.run.parameters import adapter_layer, count_parameters
from glm46.run.plan import resolve_plan
from glm46.run.sizes import OFFLOAD_SLOTS
from tests.builders import model_table

SMALL_VOCABULARY = {"vocab_size": 512}
"""Where layers are measured, a large head would only take time."""

NVME = {"state_offload": "nvme", "state_offload_folder": "/scratch"}


def _run(**sections) -> RunConfig:
    tables = {"model": {"flavor": "debug"}, "training": {"seq_len": 128}} | sections
    return RunConfig.model_validate(tables | {"model": model_table(**tables["model"])})


def test_a_reference_and_a_reward_model_are_as_large_as_the_policy():
    config = {"training": {"seq_len": 128, "global_batch_size": 8}}
    rl = {"prompts_per_rollout": 1, "kl": {"weight": 0.1}}
    plain = plan_memory(_run(**config | {"rl": rl}), 2)
    assert plain.networks == plain.weights and plain.host == 0
    judge = {"rewards": [{"name": "model", "options": {"load_path": "reward"}}]}
    assert plan_memory(_run(**config | {"rl": rl | judge}), 2).networks == 2 * plain.weights


def test_the_reference_of_a_preference_is_planned_as_frozen_weights():
    config = {"model": {"flavor": "debug", "num_nextn_predict_layers": 0}, "finetune": {"preference": {}}}
    plans = [plan_memory(_run(**config | {"finetune": table}), 2) for table in ({}, config["finetune"])]
    alone, with_reference = plans
    # FP32 masters, and once more in BF16; the selection biases are FP32 in both.
    shape = resolve_shape(_run(**config).model)
    biases = 4 * (shape.num_hidden_layers - shape.first_k_dense_replace) * shape.n_routed_experts
    assert with_reference.weights - alone.weights == pytest.approx((alone.weights - biases) / 2 + biases)
    adapter = {"adapter": {"rank": 8}, "moe": {"balance": "none", "sequence_aux_loss_weight": 0.0}}
    adapted = [plan_memory(_run(**config | adapter | {"finetune": table}), 2) for table in ({}, config["finetune"])]
    assert adapted[0] == adapted[1]
    for loss_type, wanted in (("ipo", with_reference), ("kto", with_reference), ("simpo", alone), ("orpo", alone)):
        table = {"finetune": {"preference": {"loss_type": loss_type}}}
        assert plan_memory(_run(**config | table), 2).weights == wanted.weights


def _kept_bytes(shape, dtype, *, mtp=False, checkpointing="none", adapter=None, **arguments):
    """Bytes that autograd keeps of one forward pass, each storage once, parameters left out; and the tokens."""
    torch.manual_seed(0)
    model = Transformer(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = model.to(dtype)
    for router in model.routers().values():
        router.e_score_correction_bias.data = router.e_score_correction_bias.float()
    if adapter is not None:
        add_adapters(model, adapter, dtype)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    if checkpointing != "none":
        activation_checkpoint.apply(model, checkpointing)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def keep_choice(layer, arguments):
        # `checkpoint` keeps a tuple of tensors itself, without the hooks.
        for state in arguments:
            if isinstance(state, SparseState) and state.keys is not None:
                keep(state.keys)

    if checkpointing != "none":
        for layer in model.layers.values():
            layer.register_forward_pre_hook(keep_choice)
    ids = torch.randint(0, shape.vocab_size, (4, 128))
    further = ids.unsqueeze(1).expand(-1, shape.num_nextn_predict_layers, -1) if mtp else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = model(ids, labels=ids, mtp_input_ids=further, mtp_labels=further, **arguments)
    del sums
    return sum(kept.values()), ids.numel()


@pytest.mark.slow
@pytest.mark.parametrize("dtype, width", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("flavor, use_qk_norm", [("debug", True), ("debug", False), ("debug-flash", False)])
def test_activations_per_layer_match_what_autograd_keeps(dtype, width, flavor, use_qk_norm):
    shape = PRESETS[flavor].model_copy(update=SMALL_VOCABULARY | {"use_qk_norm": use_qk_norm, "num_hidden_layers": 2})
    more_moe = shape.model_copy(update={"num_hidden_layers": 3})
    more_dense = shape.model_copy(update={"num_hidden_layers": 3, "first_k_dense_replace": 2})
    base, tokens = _kept_bytes(shape, dtype, mtp=False)
    measured_moe = (_kept_bytes(more_moe, dtype, mtp=False)[0] - base) / tokens
    measured_dense = (_kept_bytes(more_dense, dtype, mtp=False)[0] - base) / tokens
    # 3 %: tables and offsets that do not grow with the tokens, and small tensors of the router.
    assert LayerBytes(shape, width).layer("moe") == pytest.approx(measured_moe, rel=0.03)
    assert LayerBytes(shape, width).layer("dense") == pytest.approx(measured_dense, rel=0.03)
    # The loss's own tensors (gradients of head and hidden states) do not belong to the layer.
    head = shape.vocab_size * shape.hidden_size * width / tokens + shape.hidden_size * width
    measured_mtp = (_kept_bytes(shape, dtype, mtp=True)[0] - base) / tokens - head
    assert LayerBytes(shape, width).layer("mtp") == pytest.approx(measured_mtp, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("types", ["full full shared", "full shared full", "full full full"])
@pytest.mark.parametrize("top_k, form", [(100, "masked"), (16, "gathered")])
def test_sparse_layers_keep_what_their_form_and_their_choices_need(top_k, form, types, mode):
    """To the byte, compared with the same layers where all of 128 keys are chosen."""
    layers = {"num_hidden_layers": 3, "indexer_types": tuple(types.split()), "index_topk": 128}
    dense = PRESETS["debug-glm5"].model_copy(update=SMALL_VOCABULARY | layers)
    sparse = dense.model_copy(update={"index_topk": top_k})
    assert sparse_form(sparse, 128) == form
    kept, tokens = _kept_bytes(sparse, torch.bfloat16, checkpointing=mode)
    without, _ = _kept_bytes(dense, torch.bfloat16, checkpointing=mode)
    part = StagePart(0, ("dense", "moe", "moe"), True, True, 0)
    planned = kept_choices(part, sparse, ActivationCheckpointConfig(mode=mode)) * top_k * 4
    for block in part.blocks:
        planned += LayerBytes(sparse, 2, form=form).layer(block, None, mode) - LayerBytes(dense, 2).layer(
            block, None, mode
        )
    assert kept - without == tokens * planned


@pytest.mark.slow
@pytest.mark.parametrize("dtype, width", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize(
    "targets",
    [("attention",), ("experts",), ("dense", "shared_experts"), AdapterConfig.model_fields["targets"].default],
)
@pytest.mark.parametrize("flavor", ["debug", "debug-flash"])
def test_activations_of_a_frozen_layer_with_adapters_match_what_autograd_keeps(dtype, width, targets, flavor):
    adapter = AdapterConfig(rank=16, targets=targets)
    shape = PRESETS[flavor].model_copy(update=SMALL_VOCABULARY | {"num_nextn_predict_layers": 0})
    two, three = (shape.model_copy(update={"num_hidden_layers": count}) for count in (2, 3))
    base, tokens = _kept_bytes(two, dtype, adapter=adapter)
    more_dense = three.model_copy(update={"first_k_dense_replace": 2})
    for layer, (block, larger) in enumerate((("dense", more_dense), ("moe", three))):
        planned = LayerBytes(shape, width).layer(block, Frozen(tuple(adapter_layer(shape, adapter, layer))))
        if block == "dense" and targets == ("experts",):
            planned = 0.0  # nothing before the first adapter has a gradient
        measured = (_kept_bytes(larger, dtype, adapter=adapter)[0] - base) / tokens
        assert planned == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_documents_and_windows_keep_nothing_that_grows_with_pairs(mode):
    shape = PRESETS["debug"].model_copy(update=SMALL_VOCABULARY | {"num_hidden_layers": 2})
    plain, _ = _kept_bytes(shape, torch.bfloat16, checkpointing=mode, is_real=torch.ones(4, 128, dtype=torch.bool))
    documents = torch.arange(128).div(50, rounding_mode="floor").expand(4, -1)
    packed, _ = _kept_bytes(shape, torch.bfloat16, checkpointing=mode, document_ids=documents)
    window, _ = _kept_bytes(
        shape.model_copy(update={"sliding_window": 16}), torch.bfloat16, checkpointing=mode,
        is_real=torch.ones(4, 128, dtype=torch.bool),
    )  # fmt: skip
    # Besides: the layout. A mask of one layer would be 65,536 bytes as booleans.
    assert abs(packed - plain) < 512 and abs(window - plain) < 512


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("window", [None, 16, 300, 1000, 4096])
def test_attended_keys_are_those_of_the_layout(ranks, window):
    """Of the rank that has most, but for a few tokens that equal chunks leave. Two ranks need less: the chunks
    of the last one touch."""
    length = 4096
    places = SequenceShard(None, ranks, 0).places(None, (1, length), window)
    layouts = [attention_layout(None, (1, length), window, places, rank) for rank in range(ranks)]
    seen = max(len(layout.exchange.keys) for layout in layouts)
    received = max(sum(layout.exchange.receive) or length for layout in layouts)
    for found, planned in zip((seen, received), attended_keys(window, length, ranks), strict=True):
        assert found <= planned + 2 * ranks and planned <= 1.2 * found, (found, planned)


def test_tensor_parallelism_beyond_the_key_heads_keeps_one_head_on_each_rank():
    """Weights, gradients and states are split further, keys and values are not."""
    shape, run = PRESETS["GLM-4.6"], {"rows": 1, "length": 2**17, "cp": 4, "width": 2}  # eight key heads
    for count in (gathered_key_bytes, travelling_key_bytes):
        four, eight, sixteen = (count(shape, tp=tp, **run) for tp in (4, 8, 16))
        assert four == 2 * eight and eight == sixteen
    config = RunConfig.model_validate(
        {
            "model": {"flavor": "GLM-4.6"},
            "data": {"sources": [{"name": "a", "path": "a"}]},
            "training": {"steps": 1, "seq_len": 4096},
        }
    )

    def plan(tp: int):
        degrees = config.parallelism.model_copy(update={"tensor_parallel_degree": tp, "data_parallel_shard_degree": 1})
        return plan_memory(config.model_copy(update={"parallelism": degrees}), tp)

    eight, sixteen = plan(8), plan(16)
    assert sixteen.optimizer < 0.6 * eight.optimizer
    # Of each token and layer, eight more key heads: their norm in FP32 and BF16, keys and values.
    head = 128 * (4 + 2) + 4 + 2 * 128 * 2
    wider = [LayerBytes(PRESETS["GLM-4.6"], 2, tp).layer("moe") for tp in (8, 16)]
    gathered = 2 * 8 * PRESETS["GLM-4.6"].hidden_size * 2  # inputs of attention and shared experts, of the whole row
    assert wider[1] - wider[0] == pytest.approx(8 * head + gathered, rel=1e-6)
    assert sixteen.activations < 0.75 * eight.activations


def flash_tensors(queries: int, keys: int, runs: int, heads: int, key_heads: int) -> int:
    """Bytes of the tensors of `mha_varlen_bwd` in BF16 with heads of 128, one by one, and of its incoming gradient."""
    bf16, fp32 = torch.bfloat16, torch.float32
    sizes = [
        ((queries, heads, 128), bf16),  # gradient of the result
        ((queries, heads, 128), bf16), ((keys, key_heads, 128), bf16), ((keys, key_heads, 128), bf16),
        ((heads, queries + 128 * runs), fp32), ((queries + 128 * runs, heads, 128), fp32),
    ]  # fmt: skip
    sizes += [((keys, heads, 128), bf16)] * 2 if heads != key_heads else []
    return sum(torch.empty(size, dtype=dtype, device="meta").nbytes for size, dtype in sizes)


def test_the_backward_of_attention_takes_the_tensors_of_the_flash_kernel():
    air = PRESETS["GLM-4.5-Air"]  # 96 heads, 8 of keys, of 128
    found = attention_backward_bytes(air, 2, queries=4096, keys=4096, runs=3)
    assert found == flash_tensors(4096, 4096, 3, 96, 8) and 0.59 < found / 2**30 < 0.60
    shared = attention_backward_bytes(air, 2, queries=4096, keys=9000, runs=2, tp=8)
    assert shared == flash_tensors(4096, 9000, 2, 12, 1)
    alone = air.model_copy(update={"num_key_value_heads": 96})
    assert attention_backward_bytes(alone, 2, queries=64, keys=64, runs=1) == flash_tensors(64, 64, 1, 96, 96)
    narrow = attention_backward_bytes(air.model_copy(update={"head_dim": 80}), 2, queries=64, keys=64, runs=1)
    assert narrow == (64 + 128) * 96 * (96 + 1) * 4 + 2 * 64 * (96 + 96 + 8) * 80 * 2  # sums have heads of 96


def test_attention_is_planned_with_what_its_backward_takes_beyond_what_is_free_by_then():
    """On a GPU in BF16. The tensors of a layer's experts are free when the backward of its attention begins."""
    air, length, gib = PRESETS["GLM-4.5-Air"], 131072, 2**30

    def plan(device="gpu", width="bfloat16", mode="full", **sections):
        parallelism = {"data_parallel_shard_degree": 1} | sections.pop("parallelism", {})
        config = _run(
            model={"flavor": "GLM-4.5-Air"}, activation_checkpoint={"mode": mode}, parallelism=parallelism,
            training={"seq_len": sections.pop("length", length), "mixed_precision_param": width}, **sections,
        )  # fmt: skip
        return plan_memory(config, smallest_world(config.parallelism), device=device)

    # Alone the experts of Air keep more than attention takes: 176 KB per token and 152 KB.
    assert plan(length=4096).attention == plan(length=4096, mode="none").attention == 0
    across = {"context_parallel_degree": 8}
    tokens, keys = length // 8, int(length * (1 + 1 / 16))
    free = tokens * (LayerBytes(air, 2).layer("moe") - LayerBytes(air, 2).attention())
    found = plan(parallelism=across)
    assert found.attention == flash_tensors(tokens, keys, kernel_runs(2), 96, 8) - free and found.attention > 5 * gib
    assert found.total > sum((found.weights, found.gradients, found.activations, found.attention))
    assert plan("cpu", parallelism=across).attention == plan(width="float32", parallelism=across).attention == 0


def test_gathered_keys_of_micro_batches_in_flight_count():
    def plan(mode: str, **degrees: int) -> float:
        config = _run(
            training={"seq_len": 32768, "global_batch_size": 8}, activation_checkpoint={"mode": mode},
            parallelism=degrees | {"data_parallel_shard_degree": 1},
        )  # fmt: skip
        return plan_memory(config, math.prod(degrees.values())).gathered_keys

    heads = PRESETS["debug"].num_key_value_heads * PRESETS["debug"].head_dim * 2  # bytes of a token's keys
    whole = 32768 * heads
    assert plan("none") == 0
    # Keys and values of the whole row and a part of it twice, without the rank's own, which are among its activations.
    assert plan("full", context_parallel_degree=2) == (2 * 1.25 - 1) * whole + whole
    four_layers_and_mtp = 5 * (2 * 1.125 - 0.5) * whole
    assert plan("none", context_parallel_degree=4) == four_layers_and_mtp + whole
    # The first of two pipeline ranks has two micro-batches in flight, of three of the five layers at most.
    piped = plan("none", context_parallel_degree=2, pipeline_parallel_degree=2)
    assert piped in [2 * layers * (2 * 1.25 - 1) * whole + whole for layers in (2, 3)]


@pytest.mark.parametrize(
    ("dtype", "micro_batches", "entry_bytes"), [("float32", 2, 4), ("bfloat16", 1, 2), ("bfloat16", 2, 4)]
)
def test_sums_of_gradients_over_micro_batches_are_fp32(dtype, micro_batches, entry_bytes):
    training = {"seq_len": 128, "dtype": dtype, "local_batch_size": 1, "global_batch_size": micro_batches}
    config = _run(training=training)
    assert plan_memory(config, 1).gradients == entry_bytes * count_parameters(resolve_shape(config.model)).trained


def test_what_the_probe_of_bandwidth_sends_stays_on_the_device():
    without, probed = _run(), _run(comm={"bandwidth_interval": 500})
    for device, mib in (("gpu", 64), ("cpu", 1)):
        for ranks, extra in ((1, 0), (2, mib * 2**20)):  # one rank sends nothing
            pair = [plan_memory(config, ranks, device=device).total for config in (without, probed)]
            assert pair[1] - pair[0] == extra


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
def test_state_types(name, state_dtype):
    config = _run(optimizer={"name": name, "state_dtype": state_dtype})
    states = build_optimizers(list(Transformer(PRESETS["debug"]).named_parameters()), config.optimizer).state_tensors()
    assert plan_memory(config, 1).optimizer == sum(x.nbytes for key, x in states.items() if not key.endswith(".step"))


def test_states_in_host_memory_leave_some_slots_on_the_device():
    degrees = {"pipeline_parallel_degree": 4, "expert_parallel_degree": 32, "data_parallel_shard_degree": 32}
    large = {"model": {"flavor": "GLM-4.6"}, "parallelism": degrees}
    kept, offloaded = (plan_memory(_run(**large, optimizer={"state_offload": place}), 128) for place in ("none", "cpu"))
    assert kept.host == 0 and offloaded.host == kept.optimizer
    # An item of Muon is larger than the embedding's moments on one of 32 shards.
    assert offloaded.optimizer == OFFLOAD_SLOTS * OFFLOAD_ITEM_BYTES
    assert kept.total - offloaded.total == kept.optimizer - offloaded.optimizer
    # What is small is not larger for being moved, and on a CPU there is nowhere else to lie.
    small, plain = _run(optimizer={"state_offload": "cpu"}), _run()
    assert plan_memory(small, 1).optimizer == plan_memory(plain, 1).optimizer
    assert plan_memory(small, 1, device="cpu").optimizer == 2 * plan_memory(plain, 1, device="cpu").optimizer
    assert plan_memory(small, 1, device="cpu").host == 0


def test_states_in_a_file_leave_some_slots_on_the_host_and_on_the_device():
    degrees = {"pipeline_parallel_degree": 4, "expert_parallel_degree": 32, "data_parallel_shard_degree": 32}
    large = {"model": {"flavor": "GLM-4.6"}, "parallelism": degrees}
    kept, filed = (plan_memory(_run(**large, optimizer=keys), 128) for keys in ({}, NVME))
    assert filed.disk == kept.optimizer and filed.host == filed.optimizer == OFFLOAD_SLOTS * OFFLOAD_ITEM_BYTES
    assert kept.total - filed.total == kept.optimizer - filed.optimizer


def test_offloaded_weights_leave_the_whole_gradients_of_a_pipeline_on_the_device():
    large = {"model": {"flavor": "GLM-4.5-Air"}, "optimizer": {"state_offload": "cpu"}}
    degrees = {"pipeline_parallel_degree": 4, "expert_parallel_degree": 8, "data_parallel_shard_degree": 8}
    runs = (_run(**large, parallelism=degrees, training={"parameter_offload": moves}) for moves in (False, True))
    kept, offloaded = (plan_memory(run, 32) for run in runs)
    assert offloaded.gradients == kept.gradients > 3 * OFFLOAD_SLOTS * OFFLOAD_ITEM_BYTES
    # Gradients of the shards, in the type of the weights, each rounded up to a power of two.
    assert 2 * kept.weights < offloaded.host - kept.host < 4 * kept.weights


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_each_offloaded_weight_and_gradient_takes_a_power_of_two(dtype, width):
    """As torch's pinned allocator gives memory, through which FSDP2 offloads them."""
    states = {"optimizer": {"state_offload": "cpu"}}
    runs = (_run(**states, training={"dtype": dtype, "parameter_offload": moves}) for moves in (False, True))
    kept, offloaded = (plan_memory(run, 1).host for run in runs)
    model = Transformer(PRESETS["debug"])
    pinned = sum(2 ** math.ceil(math.log2(width * parameter.numel())) for parameter in model.parameters())
    assert offloaded - kept == 2 * pinned + sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.parametrize("optimizer", [{"state_offload": "cpu"}, NVME], ids=["cpu", "nvme"])
def test_offloaded_weights_and_gradients_leave_the_device(optimizer):
    degrees = {"expert_parallel_degree": 8, "data_parallel_shard_degree": 8}
    large = {"model": {"flavor": "GLM-4.5-Air"}, "parallelism": degrees, "optimizer": optimizer}
    kept_run, moved_run = (_run(**large, training={"parameter_offload": moves}) for moves in (False, True))
    kept, offloaded = plan_memory(kept_run, 8), plan_memory(moved_run, 8)
    assert offloaded.weights == 0 and offloaded.gradients == OFFLOAD_SLOTS * OFFLOAD_ITEM_BYTES
    assert kept.weights + kept.gradients < offloaded.host - kept.host < 2 * (kept.weights + kept.gradients)
    assert kept.total - offloaded.total == kept.weights + kept.gradients - offloaded.gradients
    # A CPU has one memory.
    assert plan_memory(kept_run, 8, device="cpu") == plan_memory(moved_run, 8, device="cpu")


def test_one_gpu_copies_offloaded_layers_and_no_others():
    """FSDP2 gets weights that lie in host memory, and no others on a single rank and in one type."""
    one_type = {"seq_len": 128, "mixed_precision_param": "float32"}
    runs = (one_type | {"parameter_offload": moves} for moves in (False, True))
    plain, offloaded = (plan_memory(_run(optimizer={"state_offload": "cpu"}, training=run), 1) for run in runs)
    two_types = plan_memory(_run(optimizer={"state_offload": "cpu"}, training={"seq_len": 128}), 1)
    assert 0 < plain.gathered < two_types.gathered < offloaded.gathered < plain.weights + plain.gradients


@pytest.mark.parametrize("keys", [{"ns_steps": 1}, {"name": "AdamW", "state_dtype": "8bit"}], ids=["Muon", "AdamW"])
def test_a_file_of_states_has_the_planned_size_and_a_step_moves_it_once_each_way(tmp_path, monkeypatch, keys):
    """Pages and alignment, up to 4 KiB for each tensor of the file, are not in the plan."""
    config = _run(optimizer=NVME | keys | {"state_offload_folder": str(tmp_path)})
    model = Transformer(PRESETS["debug"])
    optimizer = build_optimizers(list(model.named_parameters()), config.optimizer)
    states = {name: state for name, state in optimizer.state_tensors().items() if not name.endswith(".step")}
    planned = plan_memory(config, 1).disk
    assert sum(state.nbytes for state in states.values()) == planned
    filed = {state.untyped_storage().data_ptr() for state in states.values()}
    moved = Counter()

    def counted(targets, sources):
        for target, source in zip(targets, sources, strict=True):
            for to, of in zip(state_parts(target), state_parts(source), strict=True):
                ends = [x.untyped_storage().data_ptr() in filed for x in (to, of)]
                moved[{(True, False): "written", (False, True): "read"}[tuple(ends)]] += of.nbytes
        copy_states(targets, sources)

    monkeypatch.setattr("glm46.compute.optim.state_file.copy_states", counted)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        moved.clear()
        optimizer.step(1.0)
        assert moved == {"read": planned, "written": planned}


@pytest.mark.parametrize("keys", [{"mode": "full"}, {"mode": "selective"}, {"mode": "selective", "every_n_layers": 2}])
def test_host_memory_takes_most_of_what_checkpointed_layers_keep(keys):
    model = {"flavor": "GLM-4.5-Air", "shape": {"num_nextn_predict_layers": 0}}
    training = {"seq_len": 4096, "global_batch_size": 1}
    keep, move = (
        _run(model=model, training=training, activation_checkpoint=keys | {"cpu_checkpointing": moves})
        for moves in (False, True)
    )
    kept, moved = plan_memory(keep, 1), plan_memory(move, 1)
    shape, checkpointed = resolve_shape(keep.model), range(0, 46, keys.get("every_n_layers", 1))
    layer = 4096 * sum(LayerBytes(shape, 2).kept_tensors("moe", keys["mode"]))
    dense = 4096 * sum(LayerBytes(shape, 2).kept_tensors("dense", keys["mode"]))
    whole = dense + (len(checkpointed) - 1) * layer
    assert kept.activations - moved.activations == pytest.approx(whole - 2 * layer) and whole - 2 * layer > 0.9 * whole
    # A pinned tensor takes a power of two.
    assert whole <= moved.host_activations < 2 * whole and moved.total == kept.total - (whole - 2 * layer)
    alone = [plan_memory(run, 1, device="cpu") for run in (keep, move)]  # one memory for both
    assert alone[1].total - alone[0].total == pytest.approx(2 * layer) and alone[1].host_activations == 0


def test_the_seed_layout_of_the_355b_model():
    degrees = {
        "pipeline_parallel_degree": 16,
        "tensor_parallel_degree": 8,
        "expert_parallel_degree": 32,
        "data_parallel_shard_degree": 64,
    }
    config = _run(model={"flavor": "GLM-4.6"}, parallelism=degrees, training={"seq_len": 4096})
    assert smallest_world(config.parallelism) == 8192
    layout = resolve_layout(config.parallelism, 8192)
    assert (layout.dense_shards, layout.expert_shards, layout.dp_degree) == (64, 16, 64)
    # No rank can hold less than its even share, and stages differ by at most one layer of six.
    share = count_parameters(PRESETS["GLM-4.6"]).total * 4 / 8192
    assert share <= plan_memory(config, 8192).weights <= 1.35 * share
    with pytest.raises(AssertionError, match="64 processes, degrees of 8192"):
        resolve_layout(config.parallelism, 64)


def test_keys_travel_where_all_would_take_too_much():
    """GLM-4.6 at a million tokens: gathered with tensor parallelism, passed on without it."""

    def plan(length: int, **degrees: int):
        config = _run(
            model={"flavor": "GLM-4.6", "shape": {"max_position_embeddings": length}},
            training={"seq_len": length, "global_batch_size": 1}, activation_checkpoint={"mode": "full"},
            parallelism=degrees | {"data_parallel_shard_degree": 1, "context_parallel_degree": 8},
        )  # fmt: skip
        world = 8 * math.prod(degrees.values())
        return resolve_plan(config, world), plan_memory(config, world).gathered_keys

    keys = 8 * 128 * 2  # bytes of the keys of a token
    cases = ((2**20, {"tensor_parallel_degree": 8}, False), (2**18, {}, False), (2**20, {}, True))
    for length, degrees, travels in cases:
        resolved, held = plan(length, **degrees)
        assert resolved.keys_travel(resolved.shape, (1, length)) == travels
        share = length * keys / math.prod(degrees.values())
        assert held == (2 * share / 8 * (3 + 3 * 2) if travels else (2 * (1 + 1 / 16 - 1 / 8) + 1) * share)


RECIPE = Path("train_configs/rl_debug_labels.toml")


def memory_of(*overrides: str, ranks: int = 1):
    return plan_memory(load_config(RECIPE, overrides), ranks, device="cpu")


def test_networks_beside_the_policy_are_counted():
    alone = memory_of()
    trained = alone.weights + alone.gradients + alone.optimizer
    assert alone.networks == 0
    ppo = memory_of("--rl.algorithm", "ppo")
    assert ppo.networks == pytest.approx(trained)
    kl = memory_of("--rl.kl.weight", "0.1", "--rl.warm_up_rollouts", "0", "--checkpoint.initial_load_path", "base")
    assert kl.networks == pytest.approx(alone.weights)
    assert ppo.total == pytest.approx(alone.total + trained)


def test_ranks_with_parts_of_the_policy_hold_a_copy_to_draw_from():
    cache = 64 * 256 * 2 * 2 * 32 * 2 * 4
    assert memory_of().generation == cache
    assert memory_of(ranks=2).generation == pytest.approx(cache + 4 * 311_400, rel=1e-3)
    servers = ("--rollout.kind", "vllm", "--rollout.urls", '["http://localhost:8000"]')
    assert memory_of(*servers).generation == 0


def test_ranks_that_draw_together_hold_parts_and_gather_one_tensor():
    cache, copy = memory_of().generation, memory_of(ranks=4).generation - memory_of().generation
    gate_up, down = 4 * 8 * 96 * 96, 4 * 8 * 96 * 48  # of the one layer with experts

    def generation(axis: str, degree: int) -> float:
        return memory_of(f"--rollout.{axis}_parallel_degree", str(degree), ranks=4).generation - gate_up

    assert generation("expert", 4) == pytest.approx(cache + copy - 3 / 4 * (gate_up + down))
    # Norms and routers, less than a hundredth, are whole on both ranks; experts are, too.
    assert generation("tensor", 2) == pytest.approx(cache / 2 + (copy + gate_up + down) / 2, rel=1e-2)
