"""`training.mixed_precision_reduce = "bfloat16"` against FP32 sums of gradients over ranks, over 200 steps."""

from functools import cache

import pytest
import torch
from torch import Tensor

from glm46.compute.optim.optimizers import build_optimizers
from glm46.config.optimizer import OptimizerConfig

STEPS = 200
TERMS = 64
"""Ranks, or under a pipeline micro-batches, whose gradients are added one after another."""

ROWS, COLUMNS = 32, 64

FULL_RATE, PRETRAINING_RATE = 5e-6, 2.5e-4
"""Those of docs/finetuning.md and of the recipes."""

SIGNAL = 0.1
"""The mean of a rank's gradient relative to its noise."""


@cache
def gradients_of(step: int) -> Tensor:
    """Gradients [terms, rows, columns] with a mean that all steps share, in BF16 as backward computes them."""
    mean = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1000))
    noise = torch.randn(TERMS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))
    return (SIGNAL * mean + noise).bfloat16()


@cache
def sum_in_ring(step: int, dtype: torch.dtype) -> Tensor:
    """The sum as a ring of ranks makes it: each rank adds its gradient and rounds, before it sends the sum on."""
    gradients = gradients_of(step)
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total = total + gradient.to(dtype)
    return total.float()


def train(name: str, lr: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """How far the weights went, and the largest error of a step's sum relative to the exact one."""
    start = 0.02 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2))
    weight = torch.nn.Parameter(start.clone())
    config = OptimizerConfig(name=name, lr=lr, weight_decay=0.1)
    group = build_optimizers([("layers.0.self_attn.o_proj.weight", weight)], config, ns_dtype=torch.float32)
    largest_error = 0.0
    for step in range(STEPS):
        weight.grad = sum_in_ring(step, dtype).clone()
        exact = gradients_of(step).double().sum(0)
        largest_error = max(largest_error, ((weight.grad - exact).norm() / exact.norm()).item())
        group.step(1.0)
    return weight.detach() - start, largest_error


@pytest.mark.parametrize("lr", [FULL_RATE, PRETRAINING_RATE])
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_bf16_sums_follow_fp32_sums(name, lr):
    expected, error_of_fp32 = train(name, lr, torch.float32)
    actual, error_of_bf16 = train(name, lr, torch.bfloat16)
    distance = (actual - expected).norm() / expected.norm()
    progress = (actual * expected).sum() / expected.square().sum()
    assert error_of_fp32 < 1e-6
    assert error_of_bf16 < 0.015
    assert distance < 0.005
    assert abs(progress - 1.0) < 0.001
