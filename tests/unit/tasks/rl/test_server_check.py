"""The policy that servers are checked with at the start: a server that lacks one of its changes must show."""

from types import SimpleNamespace

import pytest
import torch

from glm46.compute.model.init import fill_parameter
from glm46.compute.model.transformer import Transformer
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.tasks.rl.engines import changed
from glm46.tasks.rl.rollout.served_policy import _TOLERANCES
from tests.builders import model_table

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
