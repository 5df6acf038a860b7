"""The loss of pairs: the formula in FP64, TRL's trainer as judge, and sums that packing does not change."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm46.config.finetune import PreferenceConfig
from glm46.tasks.finetune.preference_loss import HALF, REFERENCE, PreferenceLoss, pair_losses, split_pairs, sum_pairs

BEGIN, IGNORE = 9, -100


def network(context=1):
    """What the objective asks of a network on one rank."""
    layout, meshes = SimpleNamespace(cp=context, ranks_per_dp_rank=1), SimpleNamespace(sequence=None)
    whole_rows = lambda values, batch: values  # noqa: E731
    return SimpleNamespace(cluster=SimpleNamespace(layout=layout, meshes=meshes), whole_rows=whole_rows)


def objective(**keys) -> PreferenceLoss:
    return PreferenceLoss(network(), PreferenceConfig(**keys))


def row(*pairs, length):
    """A row of the loader: each pair, a prompt and the targets of both halves by their numbers, is one document."""
    ids, labels, documents = [], [], []
    for number, lengths in enumerate(pairs):
        for prompt, targets in lengths:
            ids += [BEGIN] + [1] * (prompt + targets - 1)
            labels += [IGNORE] * (prompt - 1) + [1] * targets + [IGNORE]
            documents += [number] * (prompt + targets)
    padding = length - len(ids)
    fields = (ids + [0] * padding, labels + [IGNORE] * padding, documents + [-1] * padding)
    return dict(zip(("input_ids", "labels", "document_ids"), map(torch.tensor, fields), strict=True))


def batch_of(*rows):
    batch = {name: torch.stack([one[name] for one in rows]) for name in rows[0]}
    return split_pairs(batch | {"positions": torch.zeros_like(batch["input_ids"])}, BEGIN)


SIZES = [((3, 4), (3, 2)), ((2, 1), (2, 6)), ((4, 3), (4, 3))]
"""Tokens of prompt and targets of the halves of each pair."""
PACKED = batch_of(row(SIZES[0], SIZES[1], length=26), row(SIZES[2], length=26), row(length=26))
SINGLE = [batch_of(row(pair, length=20)) for pair in SIZES]


def test_halves_are_documents_with_positions_of_their_own():
    assert PACKED["document_ids"][0].tolist() == [0] * 7 + [1] * 5 + [2] * 3 + [3] * 8 + [-1] * 3
    assert PACKED["positions"][0].tolist() == [*range(7), *range(5), *range(3), *range(8), 0, 0, 0]
    assert PACKED[HALF][0].tolist() == [-1, -1, 0, 0, 0, 0, -1, -1, -1, 1, 1, -1, -1, 2, -1, -1] + [3] * 6 + [-1] * 4
    assert PACKED[HALF][1].unique().tolist() == [-1, 4, 5] and PACKED[HALF][2].unique().tolist() == [-1]
    assert objective().count([PACKED]) == {"targets": 3, "chosen_targets": 8}
    counts = [objective().count([one]) for one in SINGLE]
    assert [count["targets"] for count in counts] == [1, 1, 1] and objective().count([])["targets"] == 0


def logprobs(batch, seed=0):
    """Random ones of policy and reference, equal for equal tokens wherever they are packed."""
    values = torch.zeros(2, *batch[HALF].shape)
    flat = -torch.rand(2, 64, generator=torch.Generator().manual_seed(seed))
    has_label = batch[HALF] >= 0
    values[:, has_label] = flat[:, : int(has_label.sum())]
    return values


def loss_and_gradient(objective, batch, policy, reference, totals):
    policy = policy.clone().requires_grad_()
    output = SimpleNamespace(logprobs=policy)
    loss = objective.loss(output, batch | {REFERENCE: reference}, totals, 0)
    (gradient,) = torch.autograd.grad(loss, policy)
    return loss.item(), gradient


@pytest.mark.parametrize("keys", [{}, {"beta": 0.5, "label_smoothing": 0.2}, {"beta": 2.0, "sft_weight": 0.7}])
def test_loss_and_gradient_equal_the_formula_in_fp64_packed_and_single(keys):
    config, judge = PreferenceConfig(**keys), objective(**keys)
    policy, reference = logprobs(PACKED)
    totals = judge.count([PACKED])
    packed, gradient = loss_and_gradient(judge, PACKED, policy, reference, totals)

    exact = policy.double().requires_grad_()
    wanted = 0
    for chosen, rejected in ((0, 1), (2, 3), (4, 5)):
        ratios = [(exact - reference.double())[PACKED[HALF] == half].sum() for half in (chosen, rejected)]
        sigmoid = torch.sigmoid(config.beta * (ratios[0] - ratios[1]))
        smooth = config.label_smoothing
        wanted = wanted - ((1 - smooth) * sigmoid.log() + smooth * (1 - sigmoid).log()) / 3
    wanted = wanted - config.sft_weight * exact[PACKED[HALF] % 2 == 0].mean()
    (wanted_gradient,) = torch.autograd.grad(wanted, exact)
    # Sums are in FP64: what differs is one rounding of the loss and of each gradient to FP32.
    assert packed == pytest.approx(wanted.item(), rel=2e-7)
    assert torch.allclose(gradient.double(), wanted_gradient, rtol=1e-6, atol=1e-9)

    single, done = 0.0, 0
    for one, sizes in zip(SINGLE, SIZES, strict=True):
        count = sum(targets for _, targets in sizes)
        values = torch.zeros(2, *one[HALF].shape)
        values[:, one[HALF] >= 0] = torch.stack([policy, reference])[:, PACKED[HALF] >= 0][:, done : done + count]
        done += count
        single += loss_and_gradient(judge, one, *values, totals)[0]
    assert single == pytest.approx(packed, rel=1e-6)


GOLDEN = json.loads(Path(__file__).with_name("trl_golden.json").read_text())["cases"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: "-".join(map(str, case["keys"].values())))
def test_trl_is_the_judge_of_loss_gradient_and_metrics(case):
    """The file is made by trl_golden.py, from TRL's DPOTrainer."""
    batch, judge = batch_of(row([(2, len(half)) for half in case["policy"]], length=20)), objective(**case["keys"])
    policy, reference = torch.zeros(2, *batch[HALF].shape)
    for values, of_halves in ((policy, case["policy"]), (reference, case["reference"])):
        for number, half in enumerate(of_halves):
            values[batch[HALF] == number] = torch.tensor(half)
    totals = judge.count([batch])
    loss, gradient = loss_and_gradient(judge, batch, policy, reference, totals)
    # TRL sums in FP32.
    assert loss == pytest.approx(case["loss"], rel=1e-6)
    for number, half in enumerate(case["gradient"]):
        assert gradient[batch[HALF] == number].tolist() == pytest.approx(half, rel=1e-5)
    found = judge.metrics(judge.sums(SimpleNamespace(logprobs=policy), batch | {REFERENCE: reference}), totals, 0)
    assert {name: found[name] for name in case["metrics"]} == pytest.approx(case["metrics"], rel=1e-5, abs=1e-6)


def test_a_policy_that_is_its_reference_has_loss_ln_2_and_half_of_the_orders():
    judge, (policy, _) = objective(), logprobs(PACKED)
    totals = judge.count([PACKED])
    loss, gradient = loss_and_gradient(judge, PACKED, policy, policy, totals)
    found = judge.metrics(judge.sums(SimpleNamespace(logprobs=policy), PACKED | {REFERENCE: policy}), totals, 0)
    assert loss == pytest.approx(math.log(2), rel=1e-7) and found["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert found["reward_accuracy"] == 0.5 and found["reward_margin"] == 0.0
    # Descent raises chosen tokens and lowers rejected ones, by beta / 2 each.
    assert torch.allclose(gradient[PACKED[HALF] == 2], torch.tensor(-0.1 / 2 / 3))
    assert torch.allclose(gradient[PACKED[HALF] == 3], torch.tensor(0.1 / 2 / 3))


def test_large_margins_stay_finite():
    ratios = torch.tensor([[800.0, -800.0], [-800.0, 800.0]], dtype=torch.float64, requires_grad=True)
    losses = pair_losses(ratios, beta=1.0, label_smoothing=0.1)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([160.0, 1440.0]) and ratios.grad.isfinite().all()
    sums = sum_pairs(*torch.zeros(2, 1, 4), torch.tensor([[-1, -1, -1, -1]]), 8)
    assert sums.tokens.sum() == 0
