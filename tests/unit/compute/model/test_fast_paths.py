"""Hand-written forwards and backwards equal plain formulas; rotary positions equal those of transformers."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding, apply_rotary_pos_emb

from glm46.compute.model.dispatch import Copy, Sum
from glm46.compute.model.experts import Experts
from glm46.compute.model.layers import RMSNorm, swiglu
from glm46.compute.model.rope import rotary_dim, rotary_tables, rotate
from glm46.compute.model.router import fp32_linear
from glm46.config.model import RopeScalingConfig
from glm46.config.presets import PRESETS

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
def test_experts_equal_their_formula(sizes, dtype):
    shape = PRESETS["debug"].model_copy(update={"n_routed_experts": 8, "hidden_size": 32, "moe_intermediate_size": 16})
    experts = Experts(shape)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    experts = experts.to(dtype)
    rows, offsets = sum(sizes), torch.tensor(sizes).cumsum(0).to(torch.int32)
    expert_of_row = torch.repeat_interleave(torch.arange(8), torch.tensor(sizes))

    def plain(x, weights, gate_up, down):
        gate, up = torch.einsum("nd,nfd->nf", x, gate_up[expert_of_row]).chunk(2, -1)
        return torch.einsum("nf,ndf->nd", F.silu(gate) * up * weights.unsqueeze(1), down[expert_of_row])

    def ours(x, weights, gate_up, down):
        return torch.func.functional_call(experts, {"gate_up": gate_up, "down": down}, (x, weights, offsets))

    x, weights, grad = torch.randn(rows, 32).to(dtype), torch.rand(rows), torch.randn(rows, 32).to(dtype)
    arguments = (x, weights, experts.gate_up, experts.down)
    got = gradients(ours, arguments, grad)
    want = gradients(plain, [argument.double() for argument in arguments], grad.double())
    assert [part.dtype for part in got] == [dtype, dtype, torch.float32, dtype, dtype]
    assert_close([part.double() for part in got], want, TOLERANCE[dtype])
    empty = [expert for expert, size in enumerate(sizes) if size == 0]
    assert (got[3][empty] == 0).all() and (got[4][empty] == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_rms_norm_equals_its_formula(dtype):
    norm = RMSNorm(48, 1e-3).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, grad = torch.randn(3, 5, 48).to(dtype), torch.randn(3, 5, 48).to(dtype)
    got = gradients(lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x), (x, norm.weight), grad)

    def plain(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight

    want = gradients(plain, (x.double(), norm.weight.double()), grad.double())
    assert_close([part.double() for part in got], want, TOLERANCE[dtype])


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


def assert_rounded_once(got, want):
    """FP64 sums of few terms, rounded to the dtype of `got`: each element by at most half of its last place, after a
    sum in FP32."""
    bound = torch.finfo(got.dtype).eps / 2 * want.abs() + 1e-6
    assert ((got.double() - want).abs() <= bound).all()


def test_the_compiled_sum_of_assignments_is_rounded_once_too():
    place = torch.randperm(20).view(5, 4)
    y, token = torch.randn(20, 16).bfloat16(), torch.empty(20, dtype=torch.int64)
    token[place.flatten()] = torch.arange(20) // 4
    combine = torch.compile(lambda *rows: Sum.apply(*rows, None), backend="eager", fullgraph=True)
    assert_rounded_once(combine(y, token, place), y[place].double().sum(1))


@pytest.mark.parametrize("kept", [0, 1, 13, 20])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_dropped_assignments_have_no_rows(kept, dtype):
    """Sorted last, they are neither gathered nor added; a whole token can be dropped."""
    order = torch.randperm(20)
    place, token = order.argsort().view(5, 4), order[:kept] // 4

    def summed(rows):
        return torch.zeros(5, 16, dtype=torch.float64).index_add(0, token, rows.double())

    x, y, grad_rows, grad = (torch.randn(n, 16).to(dtype) for n in (5, kept, kept, 5))
    rows, grad_x = gradients(lambda x: Copy.apply(x, token, place, None), (x,), grad_rows)
    assert torch.equal(rows, x[token])
    assert_rounded_once(grad_x, summed(grad_rows))
    total, grad_y = gradients(lambda y: Sum.apply(y, token, place, None), (y,), grad)
    assert torch.equal(grad_y, grad[token])
    assert_rounded_once(total, summed(y))


def test_the_router_product_of_bf16_is_fp32():
    """Against FP64: the products of BF16 values are exact, so the result has the error of a sum in FP32. Gradients are
    rounded to BF16, by 2**-8 of themselves at most, after sums in which their FP32 factor is exact to 2**-16."""
    x, weight, grad = torch.randn(64, 48).bfloat16(), torch.randn(8, 48).bfloat16(), torch.randn(64, 8)
    got = gradients(fp32_linear, (x, weight), grad)
    want = gradients(F.linear, (x.double(), weight.double()), grad.double())
    assert [part.dtype for part in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert_close([got[0].double()], [want[0]], 1e-6)
    assert_close([part.double() for part in got[1:]], want[1:], 2**-8 + 2**-16)
    # With an error of 2**-16 before it, rounding gives the nearest BF16 number, except near the middle of two. A factor
    # rounded to BF16 alone would change one of three.
    for part, exact in zip(got[1:], want[1:], strict=True):
        assert (part == exact.bfloat16()).float().mean() > 0.97


def test_a_norm_in_bf16_rounds_before_the_weight():
    norm = RMSNorm(48, 1e-5).bfloat16()
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(64, 48).bfloat16()
    normalised = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = normalised.bfloat16() * norm.weight
    # FP32 may round a few values to the other neighbour; the other order would change one of three.
    assert (norm(x) == expected).float().mean() > 0.97


CPU = torch.device("cpu")
SCALINGS = {
    "none": None,
    "linear": RopeScalingConfig(rope_type="linear", factor=4.0, original_max_position_embeddings=128),
    "yarn": RopeScalingConfig(rope_type="yarn", factor=8.0, original_max_position_embeddings=4096),
    "yarn, fractional factor and own turns": RopeScalingConfig(
        rope_type="yarn", factor=1.546875, original_max_position_embeddings=131072, beta_fast=16.0, beta_slow=2.0
    ),
    "yarn, factor 1": RopeScalingConfig(rope_type="yarn", factor=1.0, original_max_position_embeddings=64),
    "yarn, a step instead of a ramp": RopeScalingConfig(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=4.0
    ),
}


def reference_tables(shape, positions, dtype):
    """Cosine and sine [B, S, rotary_dim] from `transformers`, both halves written out."""
    rope = dict(rope_type="default", rope_theta=shape.rope_theta, partial_rotary_factor=shape.partial_rotary_factor)
    if shape.rope_scaling is not None:
        rope |= shape.rope_scaling.model_dump()
        if rope["rope_type"] == "linear":
            rope = {key: rope[key] for key in ("rope_type", "rope_theta", "partial_rotary_factor", "factor")}
    keys = ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings")
    config = Glm4MoeConfig(**{key: getattr(shape, key) for key in keys}, rope_parameters=rope)
    return Glm4MoeRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("theta, part, head_dim", [(1e4, 0.5, 16), (1e6, 0.5, 128), (1e6, 1.0, 64)])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_tables_equal_transformers(scaling, theta, part, head_dim, dtype, tiny_shape):
    shape = tiny_shape(
        rope_scaling=scaling, rope_theta=theta, partial_rotary_factor=part, head_dim=head_dim,
        max_position_embeddings=scaling.original_max_position_embeddings if scaling else 128,
    )  # fmt: skip
    positions = torch.tensor([[0, 1, 2, 3, 63, 64, 1000, 4095], [5, 0, 1, 7, 8, 9, 202751, 131071]])
    cos, sin = rotary_tables(positions, shape, dtype)
    half = rotary_dim(shape) // 2
    assert cos.shape == (2, 8, 1, half) and cos.dtype == dtype
    for ours, theirs in zip((cos, sin), reference_tables(shape, positions, dtype), strict=True):
        # Equal up to the rounding of the frequencies: at position 2e5 one rounding of 6e-8 turns the angle by 1e-2.
        bound = positions.unsqueeze(-1) * 2e-7 + (1e-6 if dtype == torch.float32 else 8e-3)
        assert ((ours[:, :, 0].float() - theirs[..., :half].float()).abs() <= bound).all()
        assert torch.equal(theirs[..., :half], theirs[..., half:])


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_the_published_shape_without_scaling_has_the_same_bits(theta, tiny_shape):
    shape = tiny_shape(head_dim=128, rope_theta=theta)
    positions = torch.arange(4096).unsqueeze(0)
    for ours, theirs in zip(
        rotary_tables(positions, shape, torch.float32), reference_tables(shape, positions, torch.float32), strict=True
    ):
        assert torch.equal(ours[:, :, 0], theirs[..., :32])


def test_rotation_equals_transformers_and_leaves_the_rest_of_the_head(tiny_shape):
    shape = tiny_shape(head_dim=24, partial_rotary_factor=0.5)
    q, k = torch.randn(2, 9, 6, 24), torch.randn(2, 9, 2, 24)
    positions = torch.arange(9).expand(2, 9)
    tables = rotary_tables(positions, shape, torch.float32)
    cos, sin = reference_tables(shape, positions, torch.float32)
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for ours, theirs, before in zip((rotate(q, tables), rotate(k, tables)), expected, (q, k), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        assert torch.equal(ours[..., 12:], before[..., 12:])
