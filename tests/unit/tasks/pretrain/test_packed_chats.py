"""Packing does not leak in one process; tests/ranks/test_packed_chats.py has the layouts."""

import pytest
import torch

from glm46.tasks.pretrain.next_token import count_targets, next_token_loss
from tests.ranks.packed_chats import DEPTHS, MTP_WEIGHT, load_batches, make_model, run_alone, run_config
from tests.ranks.sharded_layouts import Layout


@pytest.fixture(scope="module")
def alone():
    return run_alone(make_model(run_config(Layout())))


def run_packed(batches, unseen=()):
    """Summed loss and gradients of the batches."""
    model, loss = make_model(run_config(Layout())), 0.0
    totals = count_targets(batches, DEPTHS)
    for batch in batches:
        seen = {name: t for name, t in batch.items() if name not in ("sample_numbers", *unseen)}
        sums = model(**seen, is_real=batch["document_ids"] >= 0)
        next_token_loss(sums, totals, MTP_WEIGHT).backward()
        loss += sums.loss.item()
    return loss, totals, {name: p.grad for name, p in model.named_parameters()}


def test_packed_rows_equal_their_documents_alone(alone, tmp_path):
    batches = load_batches(tmp_path)
    assert max(int(batch["document_ids"].max()) for batch in batches) >= 2, "no row holds several documents"
    loss, totals, gradients = run_packed(batches)
    assert loss == pytest.approx(alone[0], rel=1e-6)
    assert all(totals[key] == alone[1][key] for key in alone[1])
    whole = torch.stack([g.norm() for g in alone[2].values()]).norm()
    for name, gradient in gradients.items():
        assert (gradient - alone[2][name]).norm() <= 1e-5 * max(alone[2][name].norm(), 1e-4 * whole), name
    # What the test is for: documents that see each other, or prompts that are learned, are found.
    assert abs(run_packed(batches, unseen=("document_ids",))[0] / alone[0] - 1) > 1e-4
    prompts = [batch | {"labels": batch["input_ids"].roll(-1, 1)} for batch in batches]
    assert run_packed(prompts)[1]["targets"] > totals["targets"]
