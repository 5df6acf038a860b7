"""Prediction depths that share a layer: losses, gradients and counts equal a formula written with the layer's parts."""

import pytest
import torch
import torch.nn.functional as F

from glm46.compute.model.rope import rotary_tables
from glm46.compute.model.router import RoutingOptions

OPTIONS = RoutingOptions(balance_loss=True, z_loss=True)
WEIGHTS = (0.5, 0.3, 0.2, 0.7)
"""A factor of its own for each depth, so that gradients cannot be exchanged between depths."""


def rms_norm(x, norm):
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def plain_losses(model, batch):
    """Summed cross-entropy of each depth, auxiliary losses of all its calls, and real tokens of each expert and layer.

    The trunk is the model's own: its hidden states are what its last norm returns.
    """
    kept = []
    hook = model.norm.register_forward_hook(lambda module, inputs, output: kept.append(output))
    model(batch["input_ids"])
    hook.remove()
    hidden = kept[0]
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    rope = rotary_tables(positions, model.shape, hidden.dtype)
    layers = list(model.mtp.values())
    losses = []
    auxiliary = torch.zeros(4)
    counts = torch.zeros(len(layers), model.shape.n_routed_experts, dtype=torch.int64)
    for depth in range(batch["mtp_labels"].shape[1]):
        layer = layers[depth % len(layers)]
        embedding = F.embedding(batch["mtp_input_ids"][:, depth], model.embed_tokens.weight)
        joined = torch.cat([rms_norm(embedding, layer.enorm), rms_norm(hidden, layer.hnorm)], -1)
        block_output, statistics, *_ = layer.block(joined @ layer.eh_proj.weight.T, rope, None, None, OPTIONS)
        hidden = rms_norm(block_output, layer.norm)
        logits = hidden @ model.lm_head.weight.T
        labels = batch["mtp_labels"][:, depth]
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"))
        auxiliary = auxiliary + F.pad(statistics.aux_losses, (0, 2))
        counts[depth % len(layers)] += statistics.tokens_per_expert
    return losses, auxiliary, counts


@pytest.mark.parametrize("layers, depths", [(1, 1), (1, 3), (2, 3), (2, 4)])
def test_losses_and_gradients_of_depths_equal_the_formula(
    layers, depths, tiny_shape, random_model, random_batch, relative_error
):
    # Without biases of keys, whose gradient is a small difference of large terms.
    model = random_model(tiny_shape(num_nextn_predict_layers=layers, attention_bias=False))
    batch = random_batch(model.shape.model_copy(update={"num_nextn_predict_layers": depths}))
    sums = model(**batch, options=OPTIONS)
    trunk = model(**{name: value for name, value in batch.items() if "mtp" not in name}, options=OPTIONS)
    losses, auxiliary, counts = plain_losses(model, batch)
    assert sums.mtp_losses.shape == (depths,)
    for loss, expected in zip(sums.mtp_losses, losses, strict=True):
        assert relative_error(loss, expected) < 1e-6
    assert relative_error(sums.aux_losses, trunk.aux_losses + auxiliary) < 1e-6
    assert torch.equal(sums.tokens_per_expert[-layers:], counts)
    assert sums.overflow.shape == (len(model.routers()),)

    def gradients(mtp_losses, aux_losses):
        total = sum(weight * loss for weight, loss in zip(WEIGHTS, mtp_losses, strict=False)) + aux_losses.sum()
        names, parameters = zip(*model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(total, parameters, materialize_grads=True), strict=True))

    ours = gradients(sums.mtp_losses, sums.aux_losses)
    theirs = gradients(losses, trunk.aux_losses + auxiliary)
    # The floor: vectors of norms in attention have small gradients, which are differences of larger terms.
    norm = torch.stack([gradient.double().norm() for gradient in theirs.values()]).norm().item()
    for name, gradient in ours.items():
        assert relative_error(gradient, theirs[name], 1e-3 * norm) < 1e-6, name


def test_depths_that_share_a_layer_leave_the_trunk_alone(tiny_shape, random_model, random_batch):
    """With `mtp_alone` no depth gives a gradient to what the main model shares with its prediction layer."""
    model = random_model(tiny_shape(num_nextn_predict_layers=1))
    model.mtp_alone = True
    batch = random_batch(model.shape.model_copy(update={"num_nextn_predict_layers": 3}))
    model(**batch).mtp_losses.sum().backward()
    for name, parameter in model.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.any())
        assert has_gradient == name.startswith("mtp."), name
