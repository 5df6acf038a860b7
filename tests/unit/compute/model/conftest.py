"""Small shapes and models whose every weight is random, so that a forgotten norm, bias or factor cannot hide."""

import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.config.model import ModelShape

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
    """A function: a model of a shape with random weights.

    Matrices have standard deviation 1 / sqrt(inputs), so that every layer changes its input by about as much as there
    is; norm weights lie around 1, biases around 0.
    """

    def make(shape, seed=0, dtype=torch.float32):
        model = Transformer(shape)
        randomise(model, seed)
        return model.to(dtype)

    return make


def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.2 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)


@pytest.fixture(scope="session")
def random_batch():
    """A function: keyword arguments of `Transformer.forward` with labels, about one in eight of them ignored."""

    def make(shape, batch=2, length=19, seed=1):
        generator = torch.Generator().manual_seed(seed)
        depth = shape.num_nextn_predict_layers

        def ids(*size):
            return torch.randint(0, shape.vocab_size, size, generator=generator)

        def labels(*size):
            ignored = torch.rand(size, generator=generator) < 0.125
            return ids(*size).masked_fill(ignored, -100)

        made = dict(input_ids=ids(batch, length), labels=labels(batch, length))
        if depth:
            made |= dict(mtp_input_ids=ids(batch, depth, length), mtp_labels=labels(batch, depth, length))
        return made

    return make


@pytest.fixture(scope="session")
def relative_error():
    """A function: ||a - b|| / (||b|| + floor), in FP64."""

    def error(a, b, floor=0.0):
        return ((a.double() - b.double()).norm() / (b.double().norm() + floor).clamp(min=1e-300)).item()

    return error
