"""The selection bias moves as its two sources say, and balances a router that starts lopsided.

Gradients: their sums over micro-batches, their norm, and their scaling.
"""

import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer
from glm46.config.moe import MoEConfig
from glm46.config.presets import PRESETS
from glm46.engine.observe.metrics import find_metric
from glm46.engine.observe.observers import observing
from glm46.engine.training import build, loop
from glm46.engine.training.balance import ExpertBalance, balance_metrics
from glm46.engine.training.gradients import global_grad_norm, scale_gradients
from glm46.engine.training.network import TrainedNetwork
from glm46.tasks.pretrain.task import Pretraining
from glm46.tasks.weights.weight_folders import WeightFolders

SHAPE = PRESETS["debug"].model_copy(
    update=dict(hidden_size=32, num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2, vocab_size=64)
)


def model_with(**config) -> tuple[Transformer, ExpertBalance]:
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model, ExpertBalance(SHAPE, [model], MoEConfig(**config), torch.device("cpu"))


def biases(model: Transformer) -> torch.Tensor:
    return torch.stack([router.e_score_correction_bias for router in model.routers().values()])


def test_sign_rule_moves_each_bias_by_the_rate_towards_the_mean():
    model, balance = model_with(balance="sign")
    counts = torch.tensor([[10, 0, 5, 5], [1, 2, 3, 4]])  # means 5 and 2.5
    balance.update(counts, 0.25)
    assert biases(model).tolist() == [[-0.25, 0.25, 0.0, 0.0], [0.25, 0.25, -0.25, -0.25]]
    balance.update(counts, 0.0)
    assert biases(model)[0].tolist() == [-0.25, 0.25, 0.0, 0.0]


def test_proportional_rule_follows_the_moving_average_and_is_clamped():
    model, balance = model_with(balance="proportional", bias_ema_decay=0.75, bias_clamp=0.05)
    average, bias = [0.0] * 4, [0.0] * 4
    for step in range(6):
        counts = [12.0 - step, 4.0, 3.0 + step, 1.0]
        average = [0.75 * a + 0.25 * c for a, c in zip(average, counts, strict=True)]
        mean = sum(average) / 4
        moved = [b - 0.01 * (a / (mean + 1e-6) - 1.0) for a, b in zip(average, bias, strict=True)]
        bias = [min(max(m, -0.05), 0.05) for m in moved]
        balance.update(torch.tensor([counts, counts]).long(), 0.01)
        # In each step, because the clamp hides the average at the end. FP32 against FP64: a few roundings below 1.
        assert torch.allclose(biases(model)[1], torch.tensor(bias), atol=1e-7)
        assert torch.allclose(balance.state_tensors()["average_counts"][1], torch.tensor(average), rtol=1e-6)
    assert biases(model).abs().max().item() <= 0.05 + 1e-9 and min(bias) == -0.05


def test_no_rule_leaves_the_biases_alone():
    model, balance = model_with(balance="none")
    balance.update(torch.tensor([[9, 0, 0, 0], [9, 0, 0, 0]]), 1.0)
    assert biases(model).abs().sum().item() == 0.0 and balance.state_tensors() == {}


def test_biases_even_out_a_lopsided_router():
    model, balance = model_with(balance="sign")
    router = next(iter(model.routers().values()))
    # Every token leans towards the first expert's row.
    noise = torch.randn(1, 512, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
    x = noise + 0.3 * router.weight[0].detach()
    first = router(x, None, RoutingOptions()).statistics.tokens_per_expert.float()
    for _ in range(200):
        counts = router(x, None, RoutingOptions()).statistics.tokens_per_expert
        balance.update(torch.stack([counts, counts]), 0.01)
    last = router(x, None, RoutingOptions()).statistics.tokens_per_expert.float()
    # The sign rule circles around balance within one step of its rate: far closer than it began, never exactly there.
    assert first.std() / first.mean() > 0.2
    assert last.std() / last.mean() < 0.05


def test_an_even_load_has_no_deviation():
    metrics = balance_metrics(torch.full((3, 8), 25), torch.zeros(3, dtype=torch.int64))
    assert metrics == {
        "expert_balance_cv": 0.0,
        "expert_balance_cv_max": 0.0,
        "expert_load_max_ratio": 1.0,
        "expert_load_min_ratio": 1.0,
        "expert_overflow_count": 0,
        "expert_overflow_ratio": 0.0,
        "dead_experts": 0.0,
    }
    for name in metrics:
        find_metric(name)


def test_an_uneven_load():
    tokens = torch.tensor([[10, 10, 10, 10], [0, 0, 20, 60]])
    metrics = balance_metrics(tokens, torch.tensor([0, 30]))
    # Second layer: mean 20, deviations -20, -20, 0, 40, variance (400 + 400 + 0 + 1600) / 4.
    cv = math.sqrt(600) / 20
    assert metrics["expert_balance_cv"] == pytest.approx(cv / 2, rel=1e-12)
    assert metrics["expert_balance_cv_max"] == pytest.approx(cv, rel=1e-12)
    assert metrics["expert_load_max_ratio"] == 3.0
    assert metrics["expert_load_min_ratio"] == 0.0
    assert metrics["dead_experts"] == 2.0
    assert metrics["expert_overflow_ratio"] == pytest.approx(30 / 150, rel=1e-12)
    assert metrics["expert_overflow_count"] == 30


def test_a_large_overflow_is_counted_exactly():
    odd = 2**60 + 1  # no FP64 number
    assert (
        balance_metrics(torch.ones(2, 4, dtype=torch.int64), torch.tensor([odd, 1]))["expert_overflow_count"] == odd + 1
    )


def test_layers_without_tokens_and_models_without_experts():
    idle = balance_metrics(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert all(math.isfinite(value) for value in idle.values())
    assert (idle["expert_balance_cv"], idle["expert_load_max_ratio"], idle["dead_experts"]) == (0.0, 1.0, 4.0)
    assert balance_metrics(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) == {}


MICRO_BATCHES = 6


def gradients_of(network: TrainedNetwork) -> dict[str, torch.Tensor]:
    """Copies of the gradients in FP64."""
    return {
        name: parameter.grad.full_tensor().double()
        if hasattr(parameter.grad, "full_tensor")
        else parameter.grad.double()
        for name, parameter in network.parameters.items()
        if parameter.grad is not None
    }


def errors_of_sums(config) -> dict[str, float]:
    """For each parameter, the error of the sum over micro-batches relative to the FP64 sum of each one alone."""
    errors: dict[str, float] = {}
    sum_gradients = TrainedNetwork.forward_backward

    def compared(network, batches, *arguments):
        assert len(batches) == MICRO_BATCHES
        expected: dict[str, torch.Tensor] = {}
        for batch in batches:
            network.optimizer.zero_grad()
            sum_gradients(network, [batch], *arguments)
            for name, gradient in gradients_of(network).items():
                expected[name] = expected.get(name, 0.0) + gradient
        network.optimizer.zero_grad()
        outputs = sum_gradients(network, batches, *arguments)
        for name, actual in gradients_of(network).items():
            errors[name] = ((actual - expected[name]).norm() / expected[name].norm()).item()
        return outputs

    def work(task, services, progress, weights) -> int:
        with mock.patch.object(TrainedNetwork, "forward_backward", compared):
            assert loop.train(task, services, progress, weights) == 0
        return 0

    with mock.patch.object(build, "train", work):
        assert build.run(config, Pretraining, WeightFolders(), observing) == 0
    return errors


# With equal types FSDP2 does not get the parameters of a single process, and autograd adds up the gradients.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "param"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_sums_over_micro_batches_are_those_of_fp32(make_config, dtype, param):
    errors = errors_of_sums(
        make_config(
            training={
                "steps": 1,
                "global_batch_size": MICRO_BATCHES,
                "local_batch_size": 1,
                "dtype": dtype,
                "mixed_precision_param": param,
            },
        )
    )
    assert len(errors) > 20
    assert max(errors.values()) < 1e-6, max(errors.items(), key=lambda item: item[1])


def parameters_of(dtype):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in ((300, 70), (7,), (0, 4), (50, 3))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return parameters


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    parameters = parameters_of(torch.bfloat16)
    exact = torch.cat([parameter.grad.double().flatten() for parameter in parameters]).norm()
    norm = global_grad_norm(parameters, torch.device("cpu"))
    # A CPU adds thousands of squares one after another in FP32, each sum rounded by 6e-8 of itself.
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(exact.item(), rel=1e-5)
    assert abs(exact.bfloat16().double() / exact - 1) > 1e-4  # the example tells the two apart


def test_the_norm_of_fp32_gradients_has_the_bits_of_torch():
    parameters = parameters_of(torch.float32)
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    assert torch.equal(global_grad_norm(parameters, torch.device("cpu")), expected.square().sqrt())


class Calls(TorchDispatchMode):
    """Names of the operators that are called and compute."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is not torch.ops.aten.detach.default:
            self.names.append(operator._schema.name)
        return operator(*args, **kwargs or {})


def test_gradients_of_one_dtype_are_scaled_by_one_operator_and_have_the_bits_of_a_product_for_each():
    parameters = [*parameters_of(torch.float32), *parameters_of(torch.bfloat16), nn.Parameter(torch.zeros(3))]
    factor = torch.tensor(0.37)
    expected = [parameter.grad * factor for parameter in parameters[:-1]]
    with Calls() as calls:
        scale_gradients(parameters, factor)
    assert calls.names == ["aten::_foreach_mul_"] * 2
    assert all(torch.equal(parameter.grad, of) for parameter, of in zip(parameters, expected, strict=False))
    assert [parameter.grad.dtype for parameter in parameters[:-1]] == [of.dtype for of in expected]
