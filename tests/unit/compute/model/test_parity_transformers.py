"""The model equals `transformers`: logits, loss and every gradient, multi-token prediction included."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM
from transformers.modeling_layers import MtpModel

from glm46.compute.model import latent_attention
from glm46.compute.model.rope import rotate

# FP32 has 6e-8 of rounding; some hundred operations in another order give about 1e-6.
TOLERANCE = 1e-5

# A gradient that is zero in exact arithmetic is rounding noise in both models: without rotation, softmax does not see a
# key bias, for one. So the error is relative to the parameter's gradient plus this part of the norm of all gradients.
GRADIENT_FLOOR = 1e-4

AIR = dict(use_qk_norm=False, routed_scaling_factor=1.0, first_k_dense_replace=1)
LATENT = dict(
    num_attention_heads=3, num_key_value_heads=3, head_dim=16, q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=10,
    qk_rope_head_dim=6, v_head_dim=16, use_qk_norm=False, attention_bias=False, partial_rotary_factor=1.0,
)  # fmt: skip
CONFIGURATIONS = {
    "4.6-like": {},
    "4.6-like, three dense layers": dict(num_hidden_layers=5, first_k_dense_replace=3),
    "4.6-like, two MTP layers": dict(num_nextn_predict_layers=2),
    "4.6-like, one MTP layer for three depths": dict(depths=3),
    "Air-like": AIR,
    "Air-like, no MTP": AIR | dict(num_nextn_predict_layers=0),
    "dense only": dict(first_k_dense_replace=4, num_nextn_predict_layers=0),
    "dense decoder, MTP layer with experts": dict(first_k_dense_replace=3),
    "no dense layer, no biases": dict(first_k_dense_replace=0, attention_bias=False),
    "no biases, no QK-norm, two MTP layers": dict(attention_bias=False, use_qk_norm=False, num_nextn_predict_layers=2),
    "three experts per token, another factor": dict(num_experts_per_tok=3, routed_scaling_factor=1.7),
    "two shared experts": dict(num_experts_per_tok=2, n_shared_experts=2),
    "all experts": dict(num_experts_per_tok=8),
    "one key head": dict(num_attention_heads=7, num_key_value_heads=1, head_dim=8),
    "as many key heads as heads": dict(num_attention_heads=4, num_key_value_heads=4, hidden_size=64),
    "whole head rotated, other base": dict(partial_rotary_factor=1.0, rope_theta=1e6),
    "quarter of a head rotated, large eps": dict(partial_rotary_factor=0.25, rms_norm_eps=1e-2),
    "heads wider than the model": dict(num_attention_heads=12, num_key_value_heads=4, head_dim=32, hidden_size=40),
    "4.7-Flash-like": LATENT,
    "4.7-Flash-like, two MTP layers": LATENT | dict(num_nextn_predict_layers=2, rms_norm_eps=1e-2),
    "4.7-Flash-like, two MTP layers for three depths": LATENT | dict(num_nextn_predict_layers=2, depths=3),
    "4.7-Flash-like, one head, no dense layer": LATENT
    | dict(num_attention_heads=1, num_key_value_heads=1, first_k_dense_replace=0, num_nextn_predict_layers=0),
}


def reference_of(model):
    """`transformers`' models with the weights of ours: the decoder and its multi-token prediction (None without).

    No pad_token_id: with one, `transformers` gives that token's embedding no gradient. Ours trains it, because GLM's
    pad token is the one that ends a document.
    """
    shape = model.shape
    keys = shape.model_dump(exclude={"rope_scaling", "sliding_window", "rope_theta", "partial_rotary_factor"})
    rope = dict(rope_theta=shape.rope_theta, partial_rotary_factor=shape.partial_rotary_factor, rope_type="default")
    if shape.is_latent:
        keys["mlp_layer_types"] = ["dense"] * shape.first_k_dense_replace
        keys["mlp_layer_types"] += ["sparse"] * (shape.num_hidden_layers - shape.first_k_dense_replace)
        config = Glm4MoeLiteConfig(**keys | {"head_dim": shape.qk_rope_head_dim}, rope_parameters=rope)
        # Of prediction layers it has none before it is told so.
        config.num_mtp_layers = shape.num_nextn_predict_layers
        config.mtp_mlp_layer_types = ["sparse"] * shape.num_nextn_predict_layers
    else:
        config = Glm4MoeConfig(**keys, rope_parameters=rope)
    config._attn_implementation = "eager"
    reference = (Glm4MoeLiteForCausalLM if shape.is_latent else Glm4MoeForCausalLM)(config)
    mtp = MtpModel(reference, shape.num_nextn_predict_layers) if shape.num_nextn_predict_layers else None
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for part in (reference, mtp):
        for name, module in part.named_modules() if part is not None else ():
            if name.endswith("_a_layernorm"):  # its class default, not that of the config
                assert module.variance_epsilon == 1e-6
                module.variance_epsilon = shape.rms_norm_eps
    targets = paired(reference, mtp)
    assert set(targets) == set(tensors)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    return reference, mtp


def paired(reference, mtp):
    """Our name -> `transformers`' parameter or buffer; each of theirs is used once."""
    targets = {}
    for name, tensor in [*reference.named_parameters(), *reference.named_buffers()]:
        if "inv_freq" not in name:
            targets[_our_name(name.removeprefix("model."))] = tensor
    if mtp is not None:
        shared = ("embed_tokens.", "shared_head.", "rotary_emb.")
        for name, tensor in [*mtp.named_parameters(), *mtp.named_buffers()]:
            if not name.startswith(shared):
                name = name.replace("layers.", "mtp.", 1).replace(".mtp_block.", ".block.")
                targets[_our_name(name.replace(".post_norm.", ".norm."))] = tensor
    return targets


def _our_name(name):
    for theirs, ours in (
        (".mlp.gate.", ".mlp.router."),
        (".gate_up_proj", ".gate_up"),
        (".experts.down_proj", ".experts.down"),
    ):
        name = name.replace(theirs, ours)
    return name


def reference_losses(reference, mtp, batch):
    """Logits, the sum of the next-token losses, and that of each prediction depth."""
    decoder = reference.model(batch["input_ids"])
    logits = reference.lm_head(decoder.last_hidden_state)
    losses, hidden = [], decoder.last_hidden_state
    for k in range(batch["mtp_labels"].shape[1] if mtp is not None else 0):
        tokens = batch["mtp_input_ids"][:, k]
        # Its positions are those of the tokens looked at, ours those of the hidden states: attention sees differences.
        positions = torch.arange(tokens.shape[1]).expand_as(tokens) + k + 1
        hidden = mtp.forward_layer(k % mtp.num_mtp_layers, hidden, positions, None, input_ids=tokens)
        losses.append(summed_loss(mtp._project_to_logits(hidden), batch["mtp_labels"][:, k]))
    return logits, summed_loss(logits, batch["labels"]), losses


def summed_loss(logits, labels):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def weighted(loss, mtp_losses):
    """One scalar in which each part has its own factor, so that gradients cannot be exchanged between parts."""
    return loss + sum(mtp_loss * (0.3 + 0.2 * k) for k, mtp_loss in enumerate(mtp_losses))


@pytest.mark.parametrize("seed, changes", list(enumerate(CONFIGURATIONS.values())), ids=CONFIGURATIONS)
def test_logits_loss_and_every_gradient_equal_transformers(
    seed, changes, tiny_shape, random_model, random_batch, relative_error
):
    shape = tiny_shape(**{name: value for name, value in changes.items() if name != "depths"})
    depths = changes.get("depths", shape.num_nextn_predict_layers)
    model = random_model(shape, seed)
    batch = random_batch(shape.model_copy(update={"num_nextn_predict_layers": depths}), seed=seed)
    reference, mtp = reference_of(model)
    logits, loss, mtp_losses = reference_losses(reference, mtp, batch)
    sums = model(**batch)
    assert relative_error(model(batch["input_ids"]), logits) < TOLERANCE
    assert relative_error(sums.loss, loss) < TOLERANCE
    assert len(sums.mtp_losses) == len(mtp_losses) == depths
    for ours, theirs in zip(sums.mtp_losses, mtp_losses, strict=True):
        assert relative_error(ours, theirs) < TOLERANCE

    weighted(sums.loss, sums.mtp_losses).backward()
    weighted(loss, mtp_losses).backward()
    theirs = {name: p.grad for name, p in paired(reference, mtp).items() if p.requires_grad}
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert set(ours) == set(theirs)
    whole = torch.stack([grad.double().norm() for grad in theirs.values()]).norm().item()
    errors = {name: relative_error(ours[name], theirs[name], GRADIENT_FLOOR * whole) for name in ours}
    worst = max(errors, key=errors.get)
    assert errors[worst] < TOLERANCE, (worst, errors[worst])
    # The floor is for a few biases only: it must not excuse a parameter that matters.
    small = [name for name, grad in theirs.items() if grad.norm() < 10 * GRADIENT_FLOOR * whole]
    assert all(name.endswith("k_proj.bias") for name in small), small


def test_latent_attention_rotates_neighbours(monkeypatch, tiny_shape, random_model, random_batch, relative_error):
    model = random_model(tiny_shape(**LATENT))
    batch = random_batch(model.shape)
    logits, *_ = reference_losses(*reference_of(model), batch)
    monkeypatch.setattr(latent_attention, "rotate_pairs", rotate)
    assert (
        relative_error(model(batch["input_ids"]), logits) > 0.01
    )  # halves in place of neighbours: no error, other text


def test_predictions_are_the_reference_argmax(tiny_shape, random_model, random_batch):
    shape = tiny_shape(num_nextn_predict_layers=2)
    model, batch = random_model(shape, 3), random_batch(shape, seed=3)
    reference, mtp = reference_of(model)
    logits, _, _ = reference_losses(reference, mtp, batch)
    predictions = model(**batch).predictions
    assert predictions.shape == (3, 2, 19)
    assert torch.equal(predictions[0], logits.argmax(-1))


@pytest.mark.parametrize("changes", [{}, AIR], ids=["4.6-like", "Air-like"])
def test_bf16_is_as_near_to_fp32_as_transformers_in_bf16(
    changes, tiny_shape, random_model, random_batch, relative_error
):
    """BF16 rounds by up to 4e-3 and both models round at much the same places; the experts' sums differ (ours in FP32,
    theirs in BF16). Selection biases far apart keep the choice of experts fixed: a flipped choice is an error of order
    1 that says nothing about the arithmetic."""
    shape = tiny_shape(**changes, num_nextn_predict_layers=0)
    model = random_model(shape, 5)
    for router in model.routers().values():
        router.e_score_correction_bias.copy_(torch.tensor([2.0, 8.0, 0.0, 14.0, 6.0, 10.0, 4.0, 12.0]))
    batch = random_batch(shape, seed=5, length=64)
    truth = model(batch["input_ids"])
    reference, _ = reference_of(model)
    theirs = reference.to(torch.bfloat16)(batch["input_ids"]).logits
    ours = model.to(torch.bfloat16)(batch["input_ids"])
    assert ours.dtype == theirs.dtype == torch.bfloat16
    our_error, their_error = relative_error(ours, truth), relative_error(theirs, truth)
    # Measured: 0.017 each, 0.015 apart. Were the two roundings independent, they would be sqrt(2) * 0.017 apart.
    assert our_error < 1.2 * their_error
    assert relative_error(ours, theirs) < 0.024
