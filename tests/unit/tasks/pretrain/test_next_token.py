"""The loss of a step is one mean, however its tokens are cut into micro-batches."""

from operator import truediv
from types import SimpleNamespace

import pytest
import torch

from glm46.compute.model.mtp import acceptance_length, accepted_drafts, draft_places, unbroken
from glm46.compute.model.transformer import LossSums
from glm46.config.moe import MoEConfig, MTPConfig
from glm46.config.presets import PRESETS
from glm46.engine.training.balance import auxiliary_loss
from glm46.engine.training.totals import count_half_pairs
from glm46.run.flops import batch_flops, training_flops
from glm46.tasks.pretrain.next_token import (
    NextToken,
    count_draft_runs,
    count_drafts,
    count_targets,
    next_token_loss,
)


def sums(loss: float, mtp: list[float], aux: tuple[float, float]) -> LossSums:
    empty = torch.zeros(0, 4, dtype=torch.int64)
    return LossSums(torch.tensor(loss), torch.tensor(mtp), torch.tensor([*aux, 0.0, 0.0]), empty, empty[:, 0], empty)


def test_parts_of_micro_batches_add_up_to_the_mean_of_the_step():
    totals, moe = {"targets": 10, "mtp_targets": [8, 5]}, MoEConfig(sequence_aux_loss_weight=0.01, z_loss_weight=0.001)
    parts = [sums(12.0, [4.0, 1.0], (30.0, 100.0)), sums(18.0, [12.0, 9.0], (10.0, 60.0))]
    total = sum(next_token_loss(part, totals, 0.3) + auxiliary_loss(part.aux_losses, 20, moe, 0) for part in parts)
    expected = 30 / 10 + 0.3 / 2 * (16 / 8 + 10 / 5) + 0.01 * 40 / 20 + 0.001 * 160 / 20
    assert abs(total.item() - expected) < 1e-6  # a handful of FP32 roundings


def test_a_step_without_any_target_has_loss_zero_not_nan():
    nothing, moe = sums(0.0, [0.0], (0.0, 0.0)), MoEConfig(sequence_aux_loss_weight=1.0, z_loss_weight=1.0)
    assert next_token_loss(nothing, {"targets": 0, "mtp_targets": [0]}, 0.3).item() == 0.0
    assert auxiliary_loss(nothing.aux_losses, 0, moe, 0).item() == 0.0


def test_weights_of_the_auxiliary_losses_follow_their_schedules():
    moe = MoEConfig(sequence_aux_loss_weight=((0, 0.1), (100, 0.3), (100, 0.0)), z_loss_weight=((50, 0.0), (150, 1.0)))
    aux_losses = torch.tensor([20.0, 10.0, 0.0, 0.0])  # of 10 tokens: 2 and 1 for each
    found = [auxiliary_loss(aux_losses, 10, moe, clock).item() for clock in (0, 50, 99, 100, 150, 1000)]
    assert found == pytest.approx([0.2, 0.4, 2 * 0.298 + 0.49, 0.5, 1.0, 1.0], rel=1e-6)


def test_tokens_are_counted_where_they_have_a_target():
    batch = {
        "labels": torch.tensor([[5, -100, 7], [-100, -100, -100]]),
        "mtp_labels": torch.tensor([[[1, 2, -100], [1, -100, -100]], [[-100] * 3, [-100] * 3]]),
    }
    counts = {"targets": 4, "mtp_targets": [4, 2], "drafts": [4, 2], "draft_runs": [4, 2]}
    assert count_targets([batch, batch], depths=2) == counts
    assert count_targets([], depths=2) == {name: [0, 0] if name != "targets" else 0 for name in counts}


def test_a_draft_is_accepted_when_the_model_itself_says_the_same_later():
    generator = torch.Generator().manual_seed(0)
    rows, depth, length = 3, 2, 9
    predictions = torch.randint(0, 2, (1 + depth, rows, length), generator=generator)
    mtp_labels = torch.randint(-1, 3, (rows, depth, length), generator=generator)
    mtp_labels[mtp_labels == -1] = -100
    expected, drafts = [0] * depth, [0] * depth
    for k in range(1, depth + 1):
        for row in range(rows):
            for i in range(length - k):
                if mtp_labels[row, k - 1, i] != -100:
                    drafts[k - 1] += 1
                    expected[k - 1] += int(predictions[k, row, i] == predictions[0, row, i + k])
    assert accepted_drafts(predictions, mtp_labels).sum((1, 2)).tolist() == expected
    assert count_drafts(mtp_labels) == drafts


def test_a_step_of_decoding_takes_the_drafts_before_the_first_rejected_one():
    generator = torch.Generator().manual_seed(0)
    rows, depths, length = 3, 3, 30
    predictions = torch.randint(0, 2, (1 + depths, rows, length), generator=generator)
    mtp_labels = torch.randint(-1, 5, (rows, depths, length), generator=generator)
    mtp_labels[mtp_labels == -1] = -100
    accepted = accepted_drafts(predictions, mtp_labels)
    places = draft_places(mtp_labels)
    runs = [0] * depths
    drafts = [0] * depths
    for row in range(rows):
        for i in range(length):
            for k in range(depths):
                if not places[: k + 1, row, i].all():
                    break
                drafts[k] += 1
                runs[k] += int(accepted[: k + 1, row, i].all())
    assert unbroken(accepted).sum((1, 2)).tolist() == runs
    assert count_draft_runs(mtp_labels) == drafts
    assert acceptance_length(runs, drafts) == pytest.approx(1 + sum(map(truediv, runs, drafts)))
    assert acceptance_length([0, 0], [0, 0]) == 1.0  # nothing to draft


def test_acceptance_is_reported_by_depth_and_as_tokens_of_a_step():
    plan = SimpleNamespace(config=SimpleNamespace(mtp=MTPConfig()), mtp_depths=2)
    objective = NextToken(SimpleNamespace(plan=plan))
    totals = {"targets": 10, "mtp_targets": [8, 5], "drafts": [8, 4], "draft_runs": [8, 4]}
    figures = {"loss": 20.0, "mtp_losses": [16.0, 5.0], "accepted": [6.0, 3.0], "accepted_runs": [6.0, 2.0]}
    row = objective.metrics({name: torch.tensor(value) for name, value in figures.items()}, totals, 0)
    assert row["mtp_acceptance"] == 9 / 12 and row["mtp_acceptance/2"] == 3 / 4
    assert row["mtp_acceptance_length"] == 1 + 6 / 8 + 2 / 4
    assert row["mtp_loss"] == (2.0 + 1.0) / 2


@pytest.mark.parametrize("window", [None, 3])
def test_flops_of_a_step_are_those_of_its_documents(window):
    shape = PRESETS["debug"].model_copy(update={"sliding_window": window})
    ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, -1], [-1] * 8])
    batches = [{"document_ids": ids}, {"document_ids": ids}]

    def by_document(lengths):
        return 2 * sum(length * training_flops(shape, length).total for length in lengths)

    for masked, lengths in ((True, (5, 3, 1, 6)), (False, (8, 7))):
        half_pairs = count_half_pairs(batches, shape, document_mask=masked)
        assert batch_flops(shape, 30, half_pairs) == pytest.approx(by_document(lengths), rel=1e-12)
