"""The policy that servers are checked with at the start: a server that lacks one of its changes must show.

Runs whose server generates with FP8 weights, and whose base of adapters is in FP8.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from glm46.cli import main
from glm46.compute.model.init import fill_parameter
from glm46.compute.model.transformer import Transformer
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.operate.estimate.requirement import INTEGERS_TORCH
from glm46.operate.launch.train_rank import train
from glm46.tasks.rl.engines import changed
from glm46.tasks.rl.rollout.served_policy import _TOLERANCES
from tests.builders import model_table
from tests.processes import free_port
from tests.step_tensors import tensor_hashes
from tests.unit.tasks.rl.rollout.policy_server import PolicyServer

PROBE = torch.randint(0, 1000, (4, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Transformer:
    table = model_table(flavor="debug", num_hidden_layers=2, num_nextn_predict_layers=0, vocab_size=1000)
    shape = resolve_shape(ModelConfig(**table))
    made = Transformer(shape).eval()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            places = [torch.arange(size) for size in tensor.shape]
            fill_parameter(tensor, places, tensor.shape, seed=0, name=name, std=0.1)
    return made


def network(model: Transformer, adapter: object = None) -> SimpleNamespace:
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    config = SimpleNamespace(adapter=adapter)
    plan = SimpleNamespace(shape=model.shape, config=config)
    return SimpleNamespace(plan=plan, weights=lambda: weights, parameters={"lm_head.weight": weights["lm_head.weight"]})


@torch.no_grad()
def logprobs(model: Transformer) -> torch.Tensor:
    return model(PROBE).float().log_softmax(-1)[:, :-1].gather(-1, PROBE[:, 1:, None])


def test_each_change_is_seen_and_all_are_undone(model):
    policy = network(model)
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    with changed(policy):
        names = [name for name, tensor in policy.weights().items() if not torch.equal(tensor, before[name])]
        found = logprobs(model)
        most, mean = _TOLERANCES["bfloat16"]
        for name in names:
            policy.weights()[name].neg_()
            gaps = (logprobs(model) - found).abs()
            assert gaps.max() > most and gaps.mean() > mean, name
            policy.weights()[name].neg_()
    for kind in (
        "self_attn",
        "0.mlp",
        "router",
        "gate_up",
        "experts.down",
        "shared_experts",
        "norm",
        "lm_head",
        "embed",
    ):
        assert any(kind in name for name in names), kind
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights().items())


def test_adapters_that_begin_at_zero_are_changed(model):
    policy = network(model, adapter=object())
    before = policy.parameters["lm_head.weight"].clone()
    with pytest.raises(OSError), changed(policy):
        assert (policy.parameters["lm_head.weight"] - before).abs().min() > 0.04
        raise OSError("the disk is full")
    assert torch.equal(policy.parameters["lm_head.weight"], before)


@pytest.mark.slow
def test_policy_learns_from_samples_of_its_fp8_weights(make_run):
    server = PolicyServer(port=free_port())
    rollout = {"kind": "vllm", "urls": [server.url], "weights_dtype": "fp8-channel"}
    config = make_run("fp8", 2, {"correction": {"level": "token"}}, rollout)
    assert train(config) == 0
    server.stop()
    lines = Path(config.job.dump_folder, "metrics.jsonl").read_text().splitlines()
    found = [row["mismatch_kl"] for row in map(json.loads, lines) if "loss" in row]
    assert len(found) == 2 and all(1e-8 < kl < 0.015 for kl in found), found  # 1e-13 without rounding


@pytest.mark.slow
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < INTEGERS_TORCH, reason="the launcher refuses a base in FP8 on this torch"
)
@pytest.mark.parametrize(("scheme", "base_dtype"), [("fp8-block", "float8"), ("int4", "int4"), ("bfloat16", "nf4")])
def test_policy_with_a_quantised_base_generates_and_trains_as_the_converted_one(make_run, tmp_path, scheme, base_dtype):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    tables = {"model": sizes, "moe": {"bias_update_rate": 0.0, "sequence_aux_loss_weight": 0.0}}
    assert train(make_run("first", 1, **tables)) == 0
    first, base = str(tmp_path / "first/checkpoint/step-000001"), tmp_path / "quantised"
    assert main(["convert", "to-hf", "--checkpoint", first, "--output", str(base), "--dtype", scheme]) == 0
    start = {"initial_load_path": str(base), "initial_load_in_hf": True, "interval": 2, "async_mode": "disabled"}
    weights, mismatch = {}, []
    for dtype in (None, base_dtype):
        adapter = {"name": "lora", "rank": 4, "base_dtype": dtype}
        config = make_run(str(dtype), 2, checkpoint=start, adapter=adapter, optimizer={"lr": 0.05}, **tables)
        assert train(config) == 0
        weights[dtype] = tensor_hashes(config.checkpoint_folder, 2)
        lines = Path(config.job.dump_folder, "metrics.jsonl").read_text().splitlines()
        mismatch += [row["mismatch_kl"] for row in map(json.loads, lines) if "loss" in row]
    # No folder holds NF4: there the base of the other run is the weights before they were quantised.
    assert (weights[base_dtype] == weights[None]) == (base_dtype != "nf4") and len(weights[None]) > 10
    assert len(mismatch) == 4 and all(abs(kl) < 1e-10 for kl in mismatch)
