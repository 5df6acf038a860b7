"""Write trl_distillation.json: divergences and their gradients as TRL's trainers compute them.

    PYTHONPATH=. python tests/unit/tasks/finetune/trl_distillation.py

Needs trl 1.16 with its dependencies; the tests need only the file. With all tokens it is `GKDTrainer`. With some,
forward KL is `IWOPDTrainer`, whose support is that of the teacher then; for other divergences the same two functions of
it are given the teacher's tokens.
"""

import json
from pathlib import Path

import torch
import trl
from torch import Tensor
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer, _add_tail_bucket, _jsd_divergence

FILE = Path(__file__).with_name("trl_distillation.json")
ROWS, LENGTH, VOCABULARY, IGNORE = 2, 5, 11, -100
CASES = [(beta, temperature, k) for beta in (0.0, 0.3, 1.0) for temperature in (1.0, 2.5) for k in (1, 4, VOCABULARY)]


def judged(student: Tensor, teacher: Tensor, labels: Tensor, beta: float, temperature: float, k: int) -> Tensor:
    """The mean over targets."""
    if k == VOCABULARY:
        return GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, temperature)
    if beta == 0.0:
        return IWOPDTrainer.generalized_jsd_loss(student, teacher, labels, beta, temperature, top_k=k, add_tail=True)
    ids = teacher.topk(k).indices
    both = [torch.log_softmax(logits / temperature, -1).gather(-1, ids) for logits in (student, teacher)]
    (of_student, mask), (of_teacher, _) = (_add_tail_bucket(x, torch.ones_like(x, dtype=torch.bool)) for x in both)
    return _jsd_divergence(of_student, of_teacher, beta, mask)[labels != IGNORE].sum() / (labels != IGNORE).sum()


def main() -> None:
    """Generate the logits and write the file."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(2, ROWS, LENGTH, VOCABULARY, generator=generator)).double().unbind()
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[0, 1] = labels[1, 3:] = IGNORE
    found, student = [], student.requires_grad_()
    for keys in CASES:
        loss = judged(student, teacher, labels, *keys)
        (gradient,) = torch.autograd.grad(loss, student)
        names = dict(zip(("beta", "temperature", "top_k"), keys, strict=True))
        found.append({"keys": names, "loss": loss.item(), "gradient": gradient.tolist()})
    given = {"student": student.tolist(), "teacher": teacher.tolist(), "labels": labels.tolist()}
    FILE.write_text(json.dumps({"trl": trl.__version__, **given, "cases": found}) + "\n")


if __name__ == "__main__":
    main()
