"""The selection bias moves as its two sources say, and balances a router that starts lopsided."""

import math

import pytest
import torch

from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer
from glm46.config.moe import MoEConfig
from glm46.config.presets import PRESETS
from glm46.engine.observe.metrics import find_metric
from glm46.engine.training.balance import ExpertBalance, balance_metrics

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
