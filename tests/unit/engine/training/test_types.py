"""Pairs of types, and odd sizes that the rules accept: each is what the run computes and keeps, and trains a step."""

import math
from unittest import mock

import pytest
import torch

from glm46.config.check import check_config
from glm46.engine.observe.observers import observing
from glm46.engine.training import build, loop
from glm46.tasks.pretrain.task import Pretraining
from glm46.tasks.weights.weight_folders import WeightFolders

FP32, BF16 = torch.float32, torch.bfloat16
VALIDATION = {"enable": True, "freq": 1, "steps": 1}


def trained(config) -> dict[str, set[torch.dtype]]:
    """The types of one step and one validation: of the products' operands, the weights, and the optimizer's states."""
    found: dict[str, set[torch.dtype]] = {"computed": set()}
    assert check_config(config, world_size=1) == []

    def note(module, inputs, output) -> None:
        found["computed"] |= {inputs[0].dtype, output.dtype, *(weight.dtype for weight in module.parameters())}

    def work(task, services, progress, weights) -> int:
        network = task.network
        for name, module in network.models[0].named_modules():
            if name.endswith(("_proj", "experts")):
                module.register_forward_hook(note)
        assert loop.train(task, services, progress, weights) == 0
        assert math.isfinite(progress.tokens) and not progress.skipped_steps
        found["kept"] = {weight.dtype for weight in network.parameters.values()}
        states = network.optimizer.state_tensors()
        found["states"] = {state.dtype for state in states.values() if state.ndim > 1}
        return 0

    with mock.patch.object(build, "train", work):
        assert build.run(config, Pretraining, WeightFolders(), observing) == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("param", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_pair_of_types_is_obeyed(make_config, dtype, param, reduce, state, optimizer):
    found = trained(make_config(
        training={"steps": 1, "dtype": dtype, "mixed_precision_param": param, "mixed_precision_reduce": reduce},
        optimizer={"name": optimizer, "state_dtype": state},
        validation=VALIDATION,
    ))  # fmt: skip
    assert found["computed"] == {getattr(torch, param)}
    assert found["kept"] == {getattr(torch, dtype)}
    assert found["states"] <= ({torch.uint8, FP32} if state == "8bit" else {getattr(torch, state)})


SIZES = {
    "hidden_size": 24, "intermediate_size": 3, "moe_intermediate_size": 8, "head_dim": 4, "num_attention_heads": 3,
    "n_routed_experts": 3, "num_experts_per_tok": 1, "n_shared_experts": 3, "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 2, "sliding_window": 1, "vocab_size": 8199,
}  # fmt: skip
"""Of each key a size at the edge of what the rules accept."""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize("param", ["float32", "bfloat16"])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_the_rules_accept_trains(make_config, key, param, optimizer):
    config = make_config(
        model={key: SIZES[key]},
        training={"steps": 1, "mixed_precision_param": param},
        optimizer={"name": optimizer},
        validation=VALIDATION,
    )
    assert trained(config)["computed"] == {getattr(torch, param)}


@pytest.mark.parametrize("param, width", [("float32", 6), ("bfloat16", 12)])
@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_experts_are_aligned_in_the_type_that_they_are_computed_in(make_config, dtype, param, width, key):
    types = {"dtype": dtype, "mixed_precision_param": param}
    faults = check_config(make_config(model={key: width}, training=types), world_size=1)
    assert [fault for fault in faults if f"model.shape.{key} = {width}: must be a multiple of" in fault]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_adapters_obey_every_pair_of_types(make_config, tmp_path, name):
    checkpoint = {"interval": 1, "async_mode": "disabled"}
    shape = {"num_nextn_predict_layers": 0}
    base = {"job": {"dump_folder": str(tmp_path / "base")}, "model": shape, "checkpoint": checkpoint}
    trained(make_config(**base, training={"steps": 1}))
    start = {"initial_load_path": str(tmp_path / "base/checkpoint/step-000001")}
    for dtype in ("float32", "bfloat16"):
        for param in ("float32", "bfloat16"):
            found = trained(make_config(
                job={"dump_folder": str(tmp_path / f"{dtype}-{param}")},
                model=shape,
                training={"steps": 1, "dtype": dtype, "mixed_precision_param": param},
                moe={"bias_update_rate": 0.0, "sequence_aux_loss_weight": 0.0},
                adapter={"name": name, "rank": 8},
                checkpoint=checkpoint | start,
                validation=VALIDATION,
            ))  # fmt: skip
            assert found["computed"] == {getattr(torch, param)} and found["kept"] == {getattr(torch, dtype)}
