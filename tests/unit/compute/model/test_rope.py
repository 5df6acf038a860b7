"""Rotary positions against `transformers`' own functions, and against what a rotation must do."""

import math

import pytest
import torch
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding, apply_rotary_pos_emb

from glm46.compute.model.rope import inverse_frequencies, rotary_dim, rotary_tables, rotate
from glm46.config.model import RopeScalingConfig

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


def test_scores_depend_on_distance_only(tiny_shape):
    shape = tiny_shape(rope_theta=1e4)
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(at_q, at_k):
        rotated = [
            rotate(x, rotary_tables(torch.tensor([[at]]), shape, torch.float64)) for x, at in ((q, at_q), (k, at_k))
        ]
        return (rotated[0] * rotated[1]).sum().item()

    # Angles are FP32, so positions near 1000 carry an error of 1000 * 6e-8.
    assert score(1007, 1000) == pytest.approx(score(7, 0), abs=1e-3)
    assert abs(score(8, 0) - score(7, 0)) > 1e-3


def test_yarn_keeps_fast_frequencies_and_interpolates_slow_ones(tiny_shape):
    scaling = SCALINGS["yarn"]
    base, one = inverse_frequencies(tiny_shape(head_dim=128, rope_theta=1e4), CPU)
    scaled, factor = inverse_frequencies(tiny_shape(head_dim=128, rope_theta=1e4, rope_scaling=scaling), CPU)
    turns = scaling.original_max_position_embeddings * base / (2 * math.pi)
    fast, slow = turns > 1.5 * scaling.beta_fast, turns < scaling.beta_slow / 1.5
    assert fast.any() and slow.any()
    assert torch.equal(scaled[fast], base[fast])
    torch.testing.assert_close(scaled[slow], base[slow] / scaling.factor, rtol=1e-6, atol=0)
    assert one == 1.0 and factor == pytest.approx(0.1 * math.log(8.0) + 1.0)
