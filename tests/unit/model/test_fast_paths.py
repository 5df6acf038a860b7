"""Each hand-written forward and backward equals the plain formula that it replaces."""

import pytest
import torch
import torch.nn.functional as F

from glm46.config.presets import PRESETS
from glm46.model.attention import fused_core, sdpa_core
from glm46.model.attention_cpu import causal_attention, causal_attention_backward
from glm46.model.dispatch import LocalDispatcher
from glm46.model.experts import Experts
from glm46.model.experts_cpu import experts_loop, experts_loop_backward
from glm46.model.layers import RMSNorm, swiglu
from glm46.model.rope import rotary_tables, rotate

# FP32: other orders of the same few operations. BF16: a result is rounded by at most 2**-8 of itself.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}

SIZES = {"uneven": [0, 5, 1, 0, 0, 9, 2, 0], "even": [3] * 8, "all at one": [0, 17, 0, 0, 0, 0, 0, 0], "none": [0] * 8}


def gradients(function, arguments, grad):
    """Result of a function and its gradients to all floating arguments."""
    leaves = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in arguments]
    result = function(*leaves)
    result.backward(grad)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.is_floating_point())]


def assert_close(got, want, tolerance):
    for fast, slow in zip(got, want, strict=True):
        assert fast.dtype == slow.dtype and fast.shape == slow.shape
        assert (fast - slow).float().norm() <= tolerance * slow.float().norm()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_the_loop_over_experts_equals_the_grouped_products(sizes, dtype):
    shape = PRESETS["debug"].model_copy(update={"n_routed_experts": 8, "hidden_size": 32, "moe_intermediate_size": 16})
    experts = Experts(shape)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    experts = experts.to(dtype)
    rows, offsets = sum(sizes), torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, weights, grad = torch.randn(rows, 32).to(dtype), torch.rand(rows), torch.randn(rows, 32).to(dtype)
    results = []
    for function in (experts, experts.grouped):
        experts.zero_grad()
        found = gradients(lambda x, weights, function=function: function(x, weights, offsets), (x, weights), grad)
        results.append([*found, experts.gate_up.grad.clone(), experts.down.grad.clone()])
    assert_close(*results, TOLERANCE[dtype])
    empty = [expert for expert, size in enumerate(sizes) if size == 0]
    assert (results[0][3][empty] == 0).all() and (results[0][4][empty] == 0).all()


def test_the_loops_operators_keep_torchs_rules():
    x, weights = torch.randn(7, 8, requires_grad=True), torch.rand(7, requires_grad=True)
    gate_up, down = torch.randn(3, 8, 8, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True)
    offsets = torch.tensor([3, 3, 7], dtype=torch.int32)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(experts_loop._opoverload, (x, weights, gate_up, down, offsets), test_utils=utils)
    backward = (torch.randn(7, 8), x, weights, gate_up, down, offsets, torch.randn(7, 8))
    torch.library.opcheck(experts_loop_backward._opoverload, backward, test_utils=utils)


def test_rms_norm_equals_torchs():
    norm = RMSNorm(48, 1e-3)
    torch.nn.init.normal_(norm.weight)
    x, grad = torch.randn(3, 5, 48), torch.randn(3, 5, 48)
    got = gradients(lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x), (x, norm.weight), grad)
    want = gradients(lambda x, weight: F.rms_norm(x, (48,), weight, 1e-3), (x, norm.weight), grad)
    assert_close(got, want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_swiglu_equals_its_formula(dtype):
    gate, up, grad = (torch.randn(6, 40).to(dtype) for _ in range(3))
    got = gradients(swiglu, (gate, up), grad)
    want = gradients(lambda gate, up: F.silu(gate) * up, (gate, up), grad)
    assert_close(got, want, TOLERANCE[dtype])


def test_rotation_equals_its_formula():
    shape = PRESETS["debug"]
    cos, sin = rotary_tables(torch.arange(9).expand(2, 9), shape, torch.float32)
    half = cos.shape[-1]

    def plain(x):
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    x, grad = torch.randn(2, 9, 3, shape.head_dim), torch.randn(2, 9, 3, shape.head_dim)
    got = gradients(lambda x: rotate(x, (cos, sin)), (x,), grad)
    assert_close(got, gradients(plain, (x,), grad), TOLERANCE[torch.float32])


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("heads, key_heads", [(6, 2), (3, 3), (4, 1)])
def test_causal_attention_in_blocks_equals_torchs(tokens, heads, key_heads):
    q = torch.randn(2, tokens, heads, 16)
    k, v, grad = torch.randn(2, tokens, key_heads, 16), torch.randn(2, tokens, key_heads, 16), torch.randn_like(q)
    got = gradients(lambda q, k, v: sdpa_core(q, k, v, None), (q, k, v), grad)
    want = gradients(lambda q, k, v: fused_core(q, k, v, None), (q, k, v), grad)
    assert_close(got[:1] + got[3:], want[:1] + want[3:], TOLERANCE[torch.float32])
    # A single token attends to itself alone, so gradients to queries and keys are zero up to rounding.
    floor = 1e-6 * grad.norm()
    for fast, slow in zip(got[1:3], want[1:3], strict=True):
        assert (fast - slow).norm() <= TOLERANCE[torch.float32] * slow.norm() + floor


def test_attentions_operators_keep_torchs_rules():
    q, k, v = (torch.randn(2, 70, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(causal_attention._opoverload, (q, k, v), test_utils=utils)
    result, log_sum = causal_attention(q, k, v)
    torch.library.opcheck(
        causal_attention_backward._opoverload, (torch.randn_like(q), q, k, v, result, log_sum), test_utils=utils
    )


def test_combining_equals_indexing_and_summing():
    place = torch.randperm(20).view(5, 4)
    y, grad = torch.randn(20, 16), torch.randn(5, 16)
    token = torch.empty(20, dtype=torch.int64)
    token[place.flatten()] = torch.arange(20) // 4
    got = gradients(lambda y: LocalDispatcher().combine(y, (token, place)), (y,), grad)
    assert_close(got, gradients(lambda y: y[place].sum(1), (y,), grad), 0.0)
