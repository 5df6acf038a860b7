"""Precision options of an optimizer and of the sum of its gradients against FP32, over 200 steps and more."""

import copy
import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

from glm46.compute.optim.compact_state import local_state, make_state
from glm46.compute.optim.optimizers import build_optimizers
from glm46.compute.optim.rounding import entry_numbers, store_bfloat16
from glm46.config.optimizer import OptimizerConfig
from tests.unit.compute.optim.test_muon import plain_newton_schulz

EXPERTS, ROWS, COLUMNS = 4, 16, 128
STEPS = 200

FULL_RATE, ADAPTER_RATE, PRETRAINING_RATE = 5e-6, 1e-4, 2.5e-4
"""Those of docs/finetuning.md and of the recipes: all weights, adapters, and from the first token."""


@cache
def step_gradients(step, outlier, idle_every=5):
    """Gradients of experts: columns of another size next to one column of 1, and an expert without tokens."""
    columns = torch.full((COLUMNS,), 1.0)
    columns[1:64] = outlier
    mean = torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(1000))
    noise = torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))
    gradient = (0.3 * mean + noise) * columns
    if step % idle_every == idle_every - 1:
        gradient[2] = 0.0
        gradient[:, 3] = 0.0
    return gradient


def train_adamw(state_dtype, outlier, *, dtype=torch.float32, lr=PRETRAINING_RATE, beta2=0.95, scale=lambda step: 1.0):
    """The weights after `STEPS` steps, and the largest step of a weight relative to the rate."""
    start = 0.02 * torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(2))
    weight = torch.nn.Parameter(start.to(dtype, copy=True))
    if state_dtype == "torch":
        optimizer = torch.optim.AdamW([weight], lr=lr, betas=(0.9, beta2), weight_decay=0.1)
    else:
        config = OptimizerConfig(name="AdamW", lr=lr, beta2=beta2, weight_decay=0.1, state_dtype=state_dtype)
        group = build_optimizers([("layers.0.mlp.experts.down", weight)], config)
    largest = 0.0
    for step in range(STEPS):
        weight.grad = (scale(step) * step_gradients(step, outlier)).to(dtype)
        before = weight.detach().clone()
        if state_dtype == "torch":
            optimizer.step()
        else:
            group.step(1.0)
        largest = max(largest, (weight.detach() - before).abs().max().item() / lr)
    return weight.detach().float() - start.to(dtype).float(), largest


def distance(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def progress(actual, expected):
    """How far the weights went in the direction of the expected ones, relative to these."""
    return ((actual * expected).sum() / expected.square().sum()).item()


# Distances in parts of FP32's way; the levels of a block are relative to its largest value.
@pytest.mark.parametrize(
    ("state_dtype", "outlier", "tolerance"),
    [
        ("float32", 1e-3, 1e-5), ("bfloat16", 1e-3, 0.02), ("8bit", 1.0, 0.03), ("8bit", 1e-2, 0.06),
        ("8bit", 1e-3, 0.1), ("8bit", 1e-4, 0.2), ("8bit", 1e-5, 0.4),
    ],
)  # fmt: skip
def test_states_of_adamw_follow_torch(state_dtype, outlier, tolerance):
    expected, largest = train_adamw("torch", outlier)
    actual, largest_rounded = train_adamw(state_dtype, outlier)
    assert distance(actual, expected) < tolerance
    assert largest_rounded < 2.5 * largest


@pytest.mark.parametrize("state_dtype", ["bfloat16", "8bit"])
@pytest.mark.parametrize("outlier", [1.0, 1e-2])
def test_second_moments_decay_as_in_fp32(state_dtype, outlier):
    """Gradients 20 times smaller after a warm-up: a decay of 0.001 is below half a unit of BF16, and of a code."""
    options = {"beta2": 0.999, "scale": lambda step: 1.0 if step < 20 else 0.05}
    expected, _ = train_adamw("torch", outlier, **options)
    actual, _ = train_adamw(state_dtype, outlier, **options)
    assert abs(progress(actual, expected) - 1.0) < 0.05
    assert distance(actual, expected) < 0.15


@pytest.mark.parametrize("gradient_size", [1e-4, 1e-1])
def test_idle_rows_of_an_embedding(gradient_size):
    def train(state_dtype):
        weight = torch.nn.Parameter(torch.zeros(256, COLUMNS))
        config = OptimizerConfig(name="AdamW", lr=PRETRAINING_RATE, weight_decay=0.0, state_dtype=state_dtype)
        group = build_optimizers([("embed_tokens.weight", weight)], config)
        largest = 0.0
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            is_present = torch.rand(256, 1, generator=generator) < 0.3
            weight.grad = gradient_size * torch.randn(256, COLUMNS, generator=generator) * is_present
            before = weight.detach().clone()
            group.step(1.0)
            largest = max(largest, (weight.detach() - before).abs().max().item())
        return weight.detach(), largest

    expected, largest = train("float32")
    actual, largest_rounded = train("8bit")
    assert largest_rounded < 1.5 * largest
    assert distance(actual, expected) < 0.05


def test_states_of_earlier_checkpoints_load_as_they_were():
    """Scales are positive there, and codes of second moments are of the levels themselves."""
    parameter = torch.zeros(64, 128)
    tensors = make_state("x", parameter, "8bit", signed=False)
    tensors[".codes"].copy_(torch.arange(64 * 128).remainder(256).view(64, 128))
    tensors[".scales"].fill_(0.5)
    from torchao.optim.quant_utils import create_dynamic_map

    levels = torch.tensor(sorted(create_dynamic_map(signed=False)))
    expected = 0.5 * levels.repeat(32).view(64, 128)
    state = local_state(tensors, signed=False)
    assert torch.equal(state.load(), expected)
    state.store(state.load(), entry_numbers("x", parameter).random_bits(0, "exp_avg_sq"))
    assert (tensors[".scales"] < 0).all()
    # The squares of the levels are as fine at the top, and finer below.
    positive = expected > 0.0
    assert ((state.load() - expected)[positive] / expected[positive]).abs().max() < 2.5
    assert ((state.load() - expected).abs() / 0.5).max() < 0.02


@pytest.mark.parametrize("lr", [FULL_RATE, ADAPTER_RATE, PRETRAINING_RATE])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
def test_bf16_weights_under_adamw_follow_fp32(lr, state_dtype):
    expected, _ = train_adamw("torch", 1.0, lr=lr)
    actual, _ = train_adamw(state_dtype, 1.0, dtype=torch.bfloat16, lr=lr)
    assert abs(progress(actual, expected) - 1.0) < 0.1


@pytest.mark.parametrize("lr", [FULL_RATE, PRETRAINING_RATE])
@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        (torch.float32, {}, 1e-4), (torch.bfloat16, {}, 0.1), (torch.float32, {"state_dtype": "bfloat16"}, 0.02),
        (torch.float32, {"state_dtype": "8bit"}, 0.05), (torch.float32, {"ns_dtype": torch.bfloat16}, 0.05),
    ],
)  # fmt: skip
def test_precision_of_muon_follows_torch(monkeypatch, lr, dtype, options, tolerance):
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", plain_newton_schulz)
    start = 0.02 * torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(2))

    def gradients():
        for step in range(STEPS):
            yield step_gradients(step, 1e-2).reshape(64, COLUMNS)

    exact = torch.nn.Parameter(start.to(dtype).float().clone())
    theirs = torch.optim.Muon([exact], lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    weight = torch.nn.Parameter(start.to(dtype, copy=True))
    name = "layers.0.self_attn.o_proj.weight"
    ns_dtype = options.get("ns_dtype", torch.float32)
    config = OptimizerConfig(name="Muon", lr=lr, weight_decay=0.1, state_dtype=options.get("state_dtype", "float32"))
    group = build_optimizers([(name, weight)], config, ns_dtype=ns_dtype)
    for gradient in gradients():
        exact.grad = gradient.clone()
        theirs.step()
        weight.grad = gradient.to(dtype)
        group.step(1.0)
    begin = start.to(dtype).float()
    moved = weight.detach().float() - begin
    expected = exact.detach() - begin
    assert abs(progress(moved, expected) - 1.0) < tolerance
    if dtype == torch.float32:
        assert distance(moved, expected) < 3 * tolerance


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_weight_decay_of_bf16_weights(name):
    """Without gradients to speak of, decay alone: 200 steps of 2.5e-5 each are below half a unit of BF16."""
    weight = torch.nn.Parameter(torch.full((64, 64), 0.02, dtype=torch.bfloat16))
    start = weight[0, 0].item()
    config = OptimizerConfig(name=name, lr=PRETRAINING_RATE, weight_decay=0.1)
    group = build_optimizers([("layers.0.self_attn.o_proj.weight", weight)], config, ns_dtype=torch.float32)
    for _ in range(STEPS):
        weight.grad = torch.zeros_like(weight)
        group.step(1.0)
    expected = start * (1.0 - 0.1 * PRETRAINING_RATE) ** STEPS
    assert abs(weight.detach().float().mean().item() - expected) < 0.1 * (start - expected)


def test_stochastic_rounding_is_fair_and_keeps_exact_values():
    values = torch.linspace(-3.0, 3.0, 256 * 256).view(256, 256)
    numbers = entry_numbers("x", values)
    target = torch.zeros(256, 256, dtype=torch.bfloat16)
    total = torch.zeros(256, 256, dtype=torch.float64)
    for update in range(100):
        store_bfloat16(target, values, numbers.random_bits(update, "weight"))
        assert ((target.float() - values).abs() <= 2**-7 * values.abs()).all()
        total += target.double()
    errors = (total / 100 - values) / values.abs()
    assert errors.abs().max() < 2**-8
    assert abs(errors.mean().item()) < 1e-5
    # BF16 values stay, also those that are not finite. 0x7FFFFFFF is the NaN of a GPU.
    special = torch.tensor([[0.0, 1.5, -2.0, float("inf"), -float("inf"), float("nan")]])
    special = torch.cat([special, torch.tensor([[2**31 - 1]], dtype=torch.int32).view(torch.float32)], dim=1)
    out = torch.zeros(1, 7, dtype=torch.bfloat16)
    store_bfloat16(out, special, entry_numbers("y", special).random_bits(1, "weight"))
    torch.testing.assert_close(out.float(), special, rtol=0.0, atol=0.0, equal_nan=True)


def test_random_bits_depend_on_the_global_place_alone():
    whole = entry_numbers("w", torch.zeros(6, 8, 10))
    bits = whole.random_bits(7, "weight")(torch.device("cpu"))
    assert bits.shape == (6, 8, 10)
    assert bits.min() >= 0
    assert bits.max() < 2**16
    part = whole[slice(2, 4), slice(3, 8)]
    assert torch.equal(part.random_bits(7, "weight")(torch.device("cpu")), bits[2:4, 3:8])
    folded = entry_numbers("w", torch.zeros(2, 3, 8, 10)).as_matrices()
    assert torch.equal(folded.random_bits(7, "weight")(torch.device("cpu")), bits)
    others = [(8, "weight"), (7, "exp_avg")]
    for update, tensor in others:
        assert (whole.random_bits(update, tensor)(torch.device("cpu")) == bits).float().mean() < 0.05


@pytest.mark.parametrize(
    ("name", "state_dtype"), list(itertools.product(["AdamW", "Muon"], ["float32", "bfloat16", "8bit"]))
)
def test_bf16_weights_resume_bit_for_bit(name, state_dtype):
    def make():
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter((0.02 * torch.randn(64, COLUMNS, generator=generator)).bfloat16())
        config = OptimizerConfig(name=name, lr=PRETRAINING_RATE, state_dtype=state_dtype)
        named = [("layers.0.self_attn.o_proj.weight", weight)]
        return weight, build_optimizers(named, config, ns_dtype=torch.float32)

    def train(weight, group, steps):
        for step in steps:
            weight.grad = step_gradients(step, 1e-2).reshape(64, COLUMNS).bfloat16()
            group.step(1.0, number=1000 * step)

    first, group = make()
    train(first, group, range(3))
    second, resumed = make()
    with torch.no_grad():
        second.copy_(first)
        for key, state in resumed.state_tensors().items():
            state.copy_(copy.deepcopy(group.state_tensors()[key]))
    train(first, group, range(3, 6))
    train(second, resumed, range(3, 6))
    assert torch.equal(first, second)


TERMS = 64
"""Ranks, or under a pipeline micro-batches, whose gradients are added one after another."""

SUM_ROWS, SUM_COLUMNS = 32, 64

SIGNAL = 0.1
"""The mean of a rank's gradient relative to its noise."""


@cache
def gradients_of(step: int) -> Tensor:
    """Gradients [terms, rows, columns] with a mean that all steps share, in BF16 as backward computes them."""
    mean = torch.randn(SUM_ROWS, SUM_COLUMNS, generator=torch.Generator().manual_seed(1000))
    noise = torch.randn(TERMS, SUM_ROWS, SUM_COLUMNS, generator=torch.Generator().manual_seed(step))
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
    start = 0.02 * torch.randn(SUM_ROWS, SUM_COLUMNS, generator=torch.Generator().manual_seed(2))
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
