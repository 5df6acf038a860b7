"""The losses of preferences: formulas in FP64, TRL's trainers as judge, and sums that packing does not change."""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm46.config.finetune import PreferenceConfig
from glm46.tasks.finetune.halves import HALF, PairSums, mismatch_completions, only_ends, split_pairs, sum_pairs
from glm46.tasks.finetune.preference_loss import KL, LOSSES, REFERENCE, PreferenceLoss

BEGIN, IGNORE = 9, -100
DIVERGENCE = 0.375


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
    assert objective().count([PACKED]) == {"targets": 3, "chosen": 3, "rejected": 3, "chosen_targets": 8}
    assert objective(loss_type="kto").count([PACKED])["targets"] == 6
    counts = [objective().count([one]) for one in SINGLE]
    assert [count["targets"] for count in counts] == [1, 1, 1] and objective().count([])["targets"] == 0


def logprobs(batch, seed=0):
    """Random ones of policy and reference, equal for equal tokens wherever they are packed."""
    values = torch.zeros(2, *batch[HALF].shape)
    flat = -torch.rand(2, 64, generator=torch.Generator().manual_seed(seed))
    has_label = batch[HALF] >= 0
    values[:, has_label] = flat[:, : int(has_label.sum())]
    return values


def loss_and_gradient(objective, batch, policy, reference, totals, divergence=DIVERGENCE):
    policy = policy.clone().requires_grad_()
    output, fields = (
        SimpleNamespace(logprobs=policy, values=policy),
        {REFERENCE: reference, KL: torch.full_like(reference, divergence)},
    )
    given = batch | {name: value for name, value in fields.items() if name in objective.fields}
    loss = objective.loss(output, given, totals, 0)
    (gradient,) = torch.autograd.grad(loss, policy)
    return loss.item(), gradient


def log_odds(mean):
    return mean - torch.log(1 - mean.exp())


def formula(keys, chosen, rejected, tokens):
    """The loss of a pair by its paper, from summed log-probabilities of policy and reference, [2] each."""
    config = PreferenceConfig(**keys)
    beta, ratios = config.beta, (chosen[0] - chosen[1], rejected[0] - rejected[1])
    if config.loss_type == "kto":
        of_chosen = config.desirable_weight * (1 - torch.sigmoid(beta * (ratios[0] - DIVERGENCE)))
        return of_chosen + config.undesirable_weight * (1 - torch.sigmoid(beta * (DIVERGENCE - ratios[1])))
    if config.loss_type == "ipo":
        return (ratios[0] / tokens[0] - ratios[1] / tokens[1] - 1 / (2 * beta)) ** 2
    means = chosen[0] / tokens[0], rejected[0] / tokens[1]
    if config.loss_type == "orpo":
        return -beta * torch.sigmoid(log_odds(means[0]) - log_odds(means[1])).log()
    margin = beta * (ratios[0] - ratios[1])
    if config.loss_type == "simpo":
        margin = beta * (means[0] - means[1]) - config.simpo_gamma
    return -torch.sigmoid(margin).log()


@pytest.mark.parametrize("keys", [
    {}, {"beta": 0.5}, {"beta": 2.0, "sft_weight": 0.7},
    {"loss_type": "ipo"}, {"loss_type": "ipo", "beta": 2.0, "sft_weight": 0.3},
    {"loss_type": "simpo", "beta": 2.0}, {"loss_type": "simpo", "simpo_gamma": 1.0, "sft_weight": 0.2},
    {"loss_type": "orpo"}, {"loss_type": "orpo", "beta": 1.5},
    {"loss_type": "kto"}, {"loss_type": "kto", "beta": 0.7, "desirable_weight": 1.25, "undesirable_weight": 0.5},
], ids=lambda keys: "-".join(map(str, keys.values())))  # fmt: skip
def test_loss_and_gradient_equal_the_formula_in_fp64_packed_and_single(keys):
    config, judge = PreferenceConfig(**keys), objective(**keys)
    policy, reference = logprobs(PACKED)
    totals = judge.count([PACKED])
    packed, gradient = loss_and_gradient(judge, PACKED, policy, reference, totals)

    exact, wanted = policy.double().requires_grad_(), 0
    for pair in ((0, 1), (2, 3), (4, 5)):
        here = [PACKED[HALF] == half for half in pair]
        sums = [torch.stack([exact[of].sum(), reference.double()[of].sum()]) for of in here]
        wanted = wanted + formula(keys, *sums, [int(of.sum()) for of in here])
    wanted = wanted / (6 if config.loss_type == "kto" else 3)
    sft_weight = 1.0 if config.loss_type == "orpo" else config.sft_weight
    wanted = wanted - sft_weight * exact[PACKED[HALF] % 2 == 0].mean()
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


def golden_batch(case):
    """The halves of a case in one row. An example of KTO is a pair of which the other half has no label."""
    if "labels" not in case:
        return batch_of(row([(2, len(half)) for half in case["policy"]], length=20)), [0, 1]
    pairs = [
        [(2, len(half)), (1, 0)] if label else [(1, 0), (2, len(half))]
        for half, label in zip(case["policy"], case["labels"], strict=True)
    ]
    return batch_of(row(*pairs, length=30)), [2 * n + (not label) for n, label in enumerate(case["labels"])]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: "-".join(map(str, case["keys"].values())))
def test_trl_is_the_judge_of_loss_gradient_and_metrics(case):
    """The file is made by trl_golden.py, from TRL's trainers."""
    (batch, halves), judge = golden_batch(case), objective(**case["keys"])
    policy, reference = torch.zeros(2, *batch[HALF].shape)
    for values, of_halves in ((policy, case["policy"]), (reference, case["reference"])):
        for number, half in zip(halves, of_halves, strict=True):
            values[batch[HALF] == number] = torch.tensor(half)
    divergence = 0.0
    if "mismatched" in case:
        of_policy, of_reference = map(torch.tensor, case["mismatched"])
        divergence = max((of_policy - of_reference).mean().item(), 0.0)
    totals = judge.count([batch])
    loss, gradient = loss_and_gradient(judge, batch, policy, reference, totals, divergence)
    # TRL sums in FP32.
    assert loss == pytest.approx(case["loss"], rel=1e-6)
    for number, half in zip(halves, case["gradient"], strict=True):
        assert gradient[batch[HALF] == number].tolist() == pytest.approx(half, rel=1e-5)
    fields = {REFERENCE: reference, KL: torch.full_like(reference, divergence)}
    found = judge.metrics(judge.sums(SimpleNamespace(logprobs=policy), batch | fields), totals, 0)
    assert {name: found[name] for name in case["metrics"]} == pytest.approx(case["metrics"], rel=1e-5, abs=1e-6)
    assert found["loss"] == pytest.approx(case["loss"], rel=1e-6)
    extra = {"loss"} | (set() if case["keys"].get("loss_type") == "kto" else {"nll_loss"})
    assert found.keys() - case["metrics"].keys() == extra


def test_a_reward_is_read_at_the_last_token_of_an_answer():
    """Behind gaps too, which are the replies of tools."""
    assert (
        only_ends(PACKED)[HALF][0].tolist()
        == [-1] * 5 + [0] + [-1] * 4 + [1] + [-1] * 2 + [2] + [-1] * 7 + [3] + [-1] * 4
    )
    half = torch.tensor([[-1, 0, 0, -1, 0, -1, 1, -1, 3, -1, -1, 3]])
    wanted = [[-1, -1, -1, -1, 0, -1, 1, -1, -1, -1, -1, 3]]
    assert only_ends({HALF: half})[HALF].tolist() == wanted


def test_the_loss_of_a_reward_model_is_that_of_trl_and_of_the_formula_packed_and_single():
    trainer = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    of, batch = objective(loss_type="reward"), only_ends(PACKED)
    values = torch.randn(batch[HALF].shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
    totals = of.count([batch])
    assert totals["targets"] == 3
    loss = of.loss(SimpleNamespace(values=values), batch, totals, 0)
    (gradient,) = torch.autograd.grad(loss, values)
    places = [(batch[HALF] == half).nonzero()[0].tolist() for half in range(6)]
    rewards = torch.stack([values.detach()[row, at] for row, at in places]).double()
    margins = rewards[0::2] - rewards[1::2]
    assert loss.item() == pytest.approx(-margins.sigmoid().log().mean().item(), rel=1e-6)
    leaf = torch.cat([rewards[0::2], rewards[1::2]]).float().requires_grad_()
    alone = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    mine = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=alone, _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"attention_mask": torch.ones(6, 2)}
    theirs = trainer.compute_loss(mine, lambda **_: SimpleNamespace(logits=leaf[:, None]), inputs)
    (wanted,) = torch.autograd.grad(theirs, leaf)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    found = torch.stack([gradient[row, at] for row, at in places])
    assert torch.allclose(torch.cat([found[0::2], found[1::2]]), wanted, rtol=1e-5)
    assert gradient.count_nonzero() == 6
    sums = of.sums(SimpleNamespace(values=values.detach()), batch)
    row = of.metrics(sums, totals, 0)
    metrics = mine._metrics["train"]
    assert row["rewards/margins"] == pytest.approx(metrics["margin"][0], rel=1e-5)
    assert row["rewards/accuracies"] == pytest.approx(metrics["accuracy"][0])
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6) and "logps/chosen" not in row


def test_a_policy_that_is_its_reference_has_loss_ln_2_and_half_of_the_orders():
    judge, (policy, _) = objective(), logprobs(PACKED)
    totals = judge.count([PACKED])
    loss, gradient = loss_and_gradient(judge, PACKED, policy, policy, totals)
    found = judge.metrics(judge.sums(SimpleNamespace(logprobs=policy), PACKED | {REFERENCE: policy}), totals, 0)
    assert loss == pytest.approx(math.log(2), rel=1e-7) and found["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert found["rewards/accuracies"] == 0.5 and found["rewards/margins"] == 0.0
    # Descent raises chosen tokens and lowers rejected ones, by beta / 2 each.
    assert torch.allclose(gradient[PACKED[HALF] == 2], torch.tensor(-0.1 / 2 / 3))
    assert torch.allclose(gradient[PACKED[HALF] == 3], torch.tensor(0.1 / 2 / 3))


LARGE = [[800.0, -800.0], [-800.0, 800.0]]
CERTAIN = [[0.0, 0.0], [0.0, -900.0]]


@pytest.mark.parametrize(("loss_type", "values", "wanted"), [
    ("sigmoid", LARGE, [0.0, 1600.0]), ("ipo", LARGE, [1599.5**2, 1600.5**2]), ("kto", LARGE, [[0, 0], [1, 1]]),
    ("orpo", CERTAIN, [math.log(2), 0.0]), ("simpo", CERTAIN, [math.log(1 + math.exp(0.5)), None]),
])  # fmt: skip
def test_large_margins_and_certain_tokens_stay_finite(loss_type, values, wanted):
    """FP32 rounds the probability of a token that is learnt to 1, where the odds of ORPO are infinite."""
    ratios = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    sums = PairSums(ratios, ratios, torch.ones(2, 2, dtype=torch.float64))
    losses = LOSSES[loss_type](sums, PreferenceConfig(loss_type=loss_type, beta=1.0), 0.0)
    losses.sum().backward()
    assert losses.isfinite().all() and ratios.grad.isfinite().all()
    for found, value in zip(losses.tolist(), wanted, strict=True):
        assert value is None or found == pytest.approx(value, abs=1e-9)


def test_rows_of_no_pair_have_no_loss_and_no_gradient():
    empty = batch_of(row(length=4))
    for loss_type in LOSSES:
        judge = objective(loss_type=loss_type)
        loss, gradient = loss_and_gradient(judge, empty, *torch.zeros(2, 1, 4), judge.count([PACKED]))
        assert loss == 0 and not gradient.any()
    assert sum_pairs(*torch.zeros(2, 1, 4), empty[HALF], 8).tokens.sum() == 0


def test_a_completion_answers_the_prompt_of_the_example_after_it():
    """Chosen examples first, as TRL unpairs pairs; rows keep their length, and a row of one pair has none."""
    made, count = mismatch_completions(PACKED)
    ids, labels = PACKED["input_ids"][0], PACKED["labels"][0]
    bounds = {0: (0, 3, 7), 1: (7, 10, 12), 2: (12, 14, 15), 3: (15, 17, 23)}  # begin, completion, end
    at, order = 0, [0, 2, 1, 3]
    for number, half in enumerate(order):
        (begin, cut, _), (_, first, last) = bounds[half], bounds[order[number - 1]]
        end = at + cut - begin + last - first
        assert made["input_ids"][0, at:end].tolist() == ids[begin:cut].tolist() + ids[first:last].tolist()
        assert made["labels"][0, at : at + cut - begin - 1].unique().tolist() == [IGNORE]
        assert made["labels"][0, at + cut - begin - 1 : end].tolist() == labels[first - 1 : last].tolist()
        assert made["positions"][0, at:end].tolist() == list(range(end - at))
        assert made["document_ids"][0, at:end].unique().tolist() == [number]
        at = end
    assert count == 4 and at == 23 and (made["document_ids"][:, 23:] == -1).all()
    assert (made["document_ids"][1:] == -1).all() and (made["labels"][1:] == IGNORE).all()
    examples = batch_of(row([(2, 3), (1, 0)], [(1, 0), (3, 1)], [(1, 0), (2, 2)], length=20))
    made, count = mismatch_completions(examples)
    assert count == 3 and (made["labels"] != IGNORE).sum() == 6
