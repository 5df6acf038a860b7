"""Small shapes and models whose every weight is random, so that a forgotten norm, bias or factor cannot hide."""

import pytest
import torch

from glm46.config.model import ModelShape
from tests import builders

_TINY = dict(
    vocab_size=97, hidden_size=48, num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=80,
    moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=2.5,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16, use_qk_norm=True, max_position_embeddings=128,
    rope_theta=10000.0,
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_shape():
    """A function: the GLM-4.6-like tiny shape with changes."""
    return lambda **changes: ModelShape.model_validate(_TINY | changes)


@pytest.fixture(scope="session")
def random_model():
    """A function: a model of a shape with random weights."""
    return lambda shape, seed=0, dtype=torch.float32: builders.random_model(shape, seed).to(dtype)


@pytest.fixture(scope="session")
def random_batch():
    """A function: keyword arguments of `Transformer.forward` with labels, about one in eight of them ignored."""
    return builders.random_batch


@pytest.fixture(scope="session")
def relative_error():
    """A function: ||a - b|| / (||b|| + floor), in FP64."""

    def error(a, b, floor=0.0):
        return ((a.double() - b.double()).norm() / (b.double().norm() + floor).clamp(min=1e-300)).item()

    return error
