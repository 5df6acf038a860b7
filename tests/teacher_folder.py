"""A folder of teacher values without a run: documents and what is said of them."""

from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from glm46.tasks.finetune import teacher_values
from glm46.tasks.finetune.teacher_values import AskedDocument, Values

IGNORE = -100


def answer_of(
    tokens: Tensor, labels: Tensor, logits: Tensor, top_k: int, temperature: float
) -> tuple[AskedDocument, Values]:
    """A document, from its tokens and labels [S], and the most likely tokens at its targets by logits [S, V]."""
    best = (logits[labels != IGNORE].float() / temperature).log_softmax(-1).topk(top_k)
    document = AskedDocument(tokens.numpy(), (labels != IGNORE).numpy())
    return document, (best.indices.numpy().astype("u4"), best.values.detach().numpy())


def write_answers(folder: Path, answers: list[tuple[AskedDocument, Values]], parts: int) -> None:
    """Store answers in their order, in this many parts."""
    size, documents = -(-len(answers) // parts), [document for document, _ in answers]
    groups = iter([answers[at : at + size] for at in range(0, len(answers), size)])
    facts = {
        "format": "glm46-teacher-1", "documents": len(answers), "parts": parts, "top_k": answers[0][1][0].shape[1],
        "teacher": "of tests", "temperature": 1.0, "tokenizer": "", "shards": [],
    }  # fmt: skip

    def ask(asked: list[AskedDocument]) -> list[Values]:
        group = next(groups)
        assert [document.key for document, _ in group] == [document.key for document in asked]
        return [values for _, values in group]

    with mock.patch.object(teacher_values, "_documents", lambda _: iter(documents)):
        missing, stored = teacher_values.store(folder, facts, [], ask, lambda work: work(), writes=True)
        assert missing and len([*stored]) == len(answers)


def logits_of(model, tokens: Tensor) -> Tensor:
    """[S, V] of one document."""
    with torch.no_grad():
        return model(tokens.unsqueeze(0))[0]
