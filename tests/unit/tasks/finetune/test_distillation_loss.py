"""Distillation: TRL's trainers as judge, the formula in FP64, and the teacher's tokens in chunks."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.model.transformer import LossSums
from glm46.config.finetune import DistillationConfig
from glm46.tasks.finetune.distillation import TEACHER, DistillationLoss, divergence, top_tokens, with_values
from glm46.tasks.finetune.teacher_values import TeacherValues
from tests.teacher_folder import answer_of, write_answers

GOLDEN = json.loads(Path(__file__).with_name("trl_distillation.json").read_text())
STUDENT, OF_TEACHER = (torch.tensor(GOLDEN[name], dtype=torch.float32) for name in ("student", "teacher"))
LABELS = torch.tensor(GOLDEN["labels"])
VOCABULARY = STUDENT.shape[-1]
NONE = torch.zeros(0)
TOKENS = torch.arange(LABELS.numel()).view_as(LABELS)


def objective(**keys) -> DistillationLoss:
    cluster = SimpleNamespace(layout=SimpleNamespace(ranks_per_dp_rank=1))
    network = SimpleNamespace(cluster=cluster, whole_rows=lambda values, batch: values.detach())
    return DistillationLoss(network, DistillationConfig(**keys))


def sums_of(head) -> LossSums:
    """What a model gives for a head's output."""
    return LossSums(head.loss, NONE, NONE, NONE, NONE, head.predictions.unsqueeze(0), head.logprobs)


def stored_answers(folder: Path, keys: dict) -> TeacherValues:
    """Those of the rows, each a document, and of others before and behind them; of one token more."""
    found = [(torch.arange(n), torch.arange(n), torch.zeros(n, VOCABULARY)) for n in range(1, 9)]
    found[4:4] = [(row, labels, logits) for row, labels, logits in zip(TOKENS, LABELS, OF_TEACHER, strict=True)]
    count, temperature = min(keys["top_k"] + 1, VOCABULARY), keys.get("temperature", 1.0)
    write_answers(folder, [answer_of(*one, count, temperature) for one in found], 3)
    return TeacherValues(folder)


def run_loss(judge: DistillationLoss, student=STUDENT, teacher=OF_TEACHER, labels=LABELS, stored=None, top_k=0):
    """Loss, gradient of the logits, and sums: the weight of both heads is the identity."""
    weight = torch.eye(VOCABULARY)
    batch = {"labels": labels}
    totals = judge.count([batch])
    if stored is None:
        batch = judge.completed(batch, sums_of(judge.of_teacher(teacher, weight, labels)))
    else:
        rows = {"input_ids": TOKENS, "document_ids": torch.zeros_like(TOKENS)}
        batch = with_values(batch, *stored.of_batch(batch | rows, top_k))
    hidden = student.clone().requires_grad_()
    output = sums_of(judge.form(hidden, weight, batch["labels"], None))
    loss = judge.loss(output, {TEACHER: batch[TEACHER]}, totals, 0)
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss, gradient, judge.metrics(judge.sums(output, batch), totals, 0)


@pytest.mark.parametrize("is_stored", [False, True], ids=["network", "stored"])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["keys"].values())))
def test_loss_and_gradient_equal_those_of_trl(case, is_stored, tmp_path):
    stored = stored_answers(tmp_path / "values", case["keys"]) if is_stored else None
    loss, gradient, metrics = run_loss(objective(**case["keys"]), stored=stored, top_k=case["keys"]["top_k"])
    # FP32 log-probabilities against FP64; a rest below 1e-6 counts as 1e-6.
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    assert torch.allclose(gradient.double(), torch.tensor(case["gradient"], dtype=torch.float64), rtol=1e-4, atol=1e-6)
    assert metrics["loss"] == metrics["kl"] == pytest.approx(loss.item(), rel=1e-6)


def formula(logits, teacher, keys) -> torch.Tensor:
    """The step's loss in FP64, from all tokens as one distribution, of which the rest is one."""
    beta, temperature, k = keys.get("beta", 0.0), keys.get("temperature", 1.0), keys["top_k"]
    is_target = LABELS != IGNORE
    ids = teacher.topk(k).indices
    p, q = ((x / temperature).softmax(-1)[is_target] for x in (teacher, logits))
    p, q = (torch.cat([x.gather(-1, ids[is_target]), 1 - x.gather(-1, ids[is_target]).sum(-1, True)], -1)
            for x in (p, q))  # fmt: skip
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    mixture = beta * p + (1 - beta) * q
    value = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
    nll = -logits.log_softmax(-1)[is_target].gather(-1, LABELS[is_target].unsqueeze(-1))
    return value.mean() + keys.get("sft_weight", 0.0) * nll.mean()


@pytest.mark.parametrize("keys", [
    {"top_k": 3}, {"top_k": 3, "beta": 1.0, "sft_weight": 0.7}, {"top_k": 6, "beta": 0.4, "temperature": 0.5},
    {"top_k": 2, "beta": 0.1, "temperature": 2.0, "sft_weight": 1.3}, {"top_k": 1, "temperature": 3.0, "sft_weight": 1},
], ids=lambda keys: "-".join(map(str, keys.values())))  # fmt: skip
@pytest.mark.parametrize("is_stored", [False, True], ids=["network", "stored"])
def test_loss_and_gradient_equal_the_formula_in_fp64(keys, is_stored, tmp_path):
    keys = keys | {"sft_weight": float(keys.get("sft_weight", 0))}
    stored = stored_answers(tmp_path / "values", keys) if is_stored else None
    loss, gradient, metrics = run_loss(objective(**keys), stored=stored, top_k=keys["top_k"])
    exact = STUDENT.double().requires_grad_()
    wanted = formula(exact, OF_TEACHER.double(), keys)
    (wanted_gradient,) = torch.autograd.grad(wanted, exact)
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-6) and metrics["loss"] == pytest.approx(loss.item())
    assert torch.allclose(gradient.double(), wanted_gradient, rtol=2e-5, atol=2e-7)
    assert (gradient[LABELS == IGNORE] == 0).all()
    has_nll = keys["sft_weight"] > 0 or keys.get("temperature", 1.0) == 1.0
    nll = torch.nn.functional.cross_entropy(STUDENT.flatten(0, 1), LABELS.flatten()).item()
    assert ("nll_loss" in metrics) == has_nll and (not has_nll or metrics["nll_loss"] == pytest.approx(nll))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(beta):
    loss, gradient, _ = run_loss(objective(beta=beta, top_k=4), student=OF_TEACHER)
    assert abs(loss.item()) < 1e-7 and gradient.abs().max() < 1e-7


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_fewer_tokens_give_a_lower_bound(beta):
    found = [run_loss(objective(beta=beta, top_k=k))[0].item() for k in range(1, VOCABULARY + 1)]
    assert all(few <= more + 1e-6 for few, more in zip(found, found[1:], strict=False)) and found[0] < found[-1]


def test_a_certain_teacher_has_a_finite_loss():
    certain = torch.zeros_like(OF_TEACHER)
    certain[..., 3] = 200.0
    for beta in (0.0, 0.5, 1.0):
        for teacher, student in ((certain, STUDENT), (STUDENT, certain)):
            loss, gradient, _ = run_loss(objective(beta=beta, top_k=4), student, teacher)
            assert math.isfinite(loss.item()) and gradient.isfinite().all()
    assert divergence(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), 0.5).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("chunk", [1, 4, 7, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_teachers_tokens_are_those_of_all_logits_at_once(chunk, temperature):
    hidden = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(50, 12, generator=torch.Generator().manual_seed(2)).requires_grad_()
    labels = torch.zeros(3, 7, dtype=torch.int64)
    found = top_tokens(hidden, weight, labels, None, chunk, count=5, temperature=temperature)
    logprobs, ids = ((hidden @ weight.t()) / temperature).log_softmax(-1).topk(5)
    assert torch.equal(found.predictions, ids.transpose(1, 2)) and not found.logprobs.requires_grad
    assert torch.allclose(found.logprobs, logprobs.transpose(1, 2), atol=1e-5)
