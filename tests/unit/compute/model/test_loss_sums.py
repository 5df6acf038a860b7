"""What a forward pass reports: the same under recomputation, additive over micro-batches, shaped without experts."""

from functools import partial

import pytest
import torch

from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.router import RoutingOptions


def test_prediction_layers_alone_have_the_gradients_of_their_losses(tiny_shape, random_model, random_batch):
    shape = tiny_shape(num_nextn_predict_layers=2)
    batch, found = random_batch(shape), []
    for alone, weight in ((True, 0.3), (False, 0.3), (False, 0.0)):
        model = random_model(shape)
        model.mtp_alone = alone
        sums = model(**batch)
        (sums.loss + weight * sums.mtp_losses.sum()).backward()
        found.append((sums, {name: p.grad for name, p in model.named_parameters()}))
    (sums, alone), (of_both, both), (_, main) = found
    assert torch.equal(sums.mtp_losses, of_both.mtp_losses) and torch.equal(sums.loss, of_both.loss)
    for name, gradient in alone.items():
        torch.testing.assert_close(gradient, (both if name.startswith("mtp.") else main)[name], rtol=1e-6, atol=1e-9)
    assert (both["embed_tokens.weight"] - main["embed_tokens.weight"]).abs().max() > 1e-3


def test_sums_add_up_over_micro_batches(tiny_shape, random_model, random_batch):
    """A batch of four equals two of two: sums, not means, so the caller may cut as it likes."""
    shape = tiny_shape(num_nextn_predict_layers=1)
    model, batch = random_model(shape), random_batch(shape, rows=4)
    options = RoutingOptions(balance_loss=True, z_loss=True)
    whole = model(**batch, options=options)
    halves = [model(**{key: value[half] for key, value in batch.items()}, options=options) for half in ([0, 1], [2, 3])]
    for field in ("loss", "mtp_losses", "aux_losses"):
        torch.testing.assert_close(getattr(whole, field), sum(getattr(h, field) for h in halves), rtol=1e-6, atol=0)
    assert torch.equal(whole.tokens_per_expert, sum(h.tokens_per_expert for h in halves))
    assert torch.equal(whole.predictions, torch.cat([h.predictions for h in halves], 1))


@pytest.mark.parametrize("with_mtp", [False, True])
def test_rows_of_counts_belong_to_the_routers_in_order(with_mtp, tiny_shape, random_model, random_batch):
    shape = tiny_shape(num_hidden_layers=4, first_k_dense_replace=1, num_nextn_predict_layers=1)
    model, batch = random_model(shape), random_batch(shape)
    names = list(model.routers())
    assert names == [f"layers.{i}.mlp.router" for i in (1, 2, 3)] + ["mtp.0.block.mlp.router"]
    if not with_mtp:
        batch = {key: value for key, value in batch.items() if "mtp" not in key}
        names = names[:-1]
    for row, name in enumerate(names):
        router = model.routers()[name]
        before = router.e_score_correction_bias.clone()
        router.e_score_correction_bias[5] = 1000.0
        counts = model(**batch).tokens_per_expert
        router.e_score_correction_bias.copy_(before)
        assert counts.shape == (len(names), 8)
        assert counts[row, 5] == 2 * 19  # every token of this layer, and of no other
        assert (counts[:, 5] == 2 * 19).sum() == 1


def test_a_model_without_experts_reports_empty_counts(tiny_shape, random_model, random_batch):
    shape = tiny_shape(first_k_dense_replace=3, num_nextn_predict_layers=0)
    sums = random_model(shape)(**random_batch(shape))
    assert sums.tokens_per_expert.shape == (0, 8) and sums.overflow.shape == (0,)
    assert sums.mtp_losses.shape == (0,) and sums.aux_losses.tolist() == [0.0, 0.0]
    assert sums.tokens_per_expert.dtype == sums.overflow.dtype == torch.int64


def test_the_form_of_the_head_is_chosen_for_the_models_own_labels_alone(tiny_shape, random_model, random_batch):
    shape = tiny_shape(num_nextn_predict_layers=2)
    model, batch = random_model(shape), random_batch(shape)
    sums, by_token = model(**batch), model(**batch, form=partial(token_logprobs, entropy=True))
    assert by_token.loss is None and by_token.entropy.shape == batch["labels"].shape
    torch.testing.assert_close(-by_token.logprobs.sum(), sums.loss, rtol=1e-6, atol=0)
    assert torch.equal(by_token.predictions, sums.predictions) and torch.equal(by_token.mtp_losses, sums.mtp_losses)
    no_mtp = {key: value for key, value in batch.items() if "mtp" not in key}
    alone = model(**no_mtp, form=token_logprobs)
    assert torch.equal(alone.logprobs, by_token.logprobs) and alone.entropy is None and alone.mtp_losses.shape == (0,)
