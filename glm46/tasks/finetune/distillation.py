"""Distillation: the divergence of a student from a teacher at each target, and the teacher's most likely tokens.

Sources: generalised Jensen-Shannon divergence, arXiv 2306.13649, equation 1, as TRL's GKD has it; temperatures, arXiv
1503.02531. What is not among the teacher's tokens is one outcome more of both distributions, so nothing of them is
lost but how the rest is spread: the divergence is a lower bound of that of all tokens, and equal with all of them.
"""

import json
from collections.abc import Mapping
from functools import partial
from math import log, log1p
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.local_tensor import copy_to_device
from glm46.compute.model.cross_entropy import (
    IGNORE,
    HeadForm,
    HeadOutput,
    VocabularyPart,
    chunk_tokens_of,
    logit_chunks,
    rows_of,
    softmax_of,
    token_logprobs,
)
from glm46.compute.model.transformer import LossSums
from glm46.compute.parallelize.pipeline import Fields
from glm46.config.errors import UserError
from glm46.config.finetune import DistillationConfig
from glm46.engine.training.network import Network
from glm46.files.local_disk import real_path
from glm46.storage.checkpoint.integrity import META
from glm46.storage.data.batches import Batch
from glm46.storage.data.tokenizer import TOKENIZER_KEY, Tokenizer, load_tokenizer
from glm46.tasks.finetune.halves import field_of, with_fields
from glm46.tasks.pretrain.next_token import count_targets

TEACHER = "teacher_logprobs"
_LEAST_REST = 1e-6
"""Of a probability: FP32 sums of others do not know a smaller one."""


def check_teacher(config: DistillationConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError if the folder of the teacher has another tokenizer. One without a tokenizer is taken."""
    folder, fingerprint = real_path(config.load_path or "."), None
    if config.load_path is not None and (folder / "tokenizer.json").is_file():
        fingerprint = load_tokenizer(str(folder)).fingerprint
    elif config.load_path is not None and (folder / META).is_file():
        fingerprint = json.loads((folder / META).read_bytes()).get(TOKENIZER_KEY)
    if fingerprint not in (None, tokenizer.fingerprint):
        raise UserError(
            f"finetune.distillation.load_path = {config.load_path!r}: its tokenizer is not model.tokenizer_path = "
            f"{tokenizer.path!r}, whose tokens the student learns; give a teacher with the student's tokenizer"
        )


@torch.no_grad()
def top_tokens(
    hidden: Tensor, weight: Tensor, labels: Tensor, part: VocabularyPart | None = None, chunk_tokens: int | None = None,
    *, count: int, temperature: float = 1.0,
) -> HeadOutput:  # fmt: skip
    """Form of the head for a teacher: the most likely tokens of each position, and their log-probabilities.

    Arguments are those of `summed_loss`; of ``labels`` [B, S] only the shape is used. ``predictions`` and ``logprobs``
    are [B, ``count``, S]. With ``part``, collective: all its ranks get those of the whole sequence.
    """
    rows_TD, weight = rows_of(hidden, weight)
    ids_TK = labels.new_empty(len(rows_TD), count)
    logprobs_TK = torch.empty_like(ids_TK, dtype=torch.float32)
    for rows, logits, wide in logit_chunks(rows_TD, weight, chunk_tokens or chunk_tokens_of(weight), 1 / temperature):
        ids_TK[rows] = _most_likely(logits, count, part)
        logprobs_TK[rows] = softmax_of(logits, wide, ids_TK[rows], part).logprob
    ids, logprobs = (x.view(*labels.shape, count).transpose(1, 2).contiguous() for x in (ids_TK, logprobs_TK))
    return HeadOutput(ids, logprobs=logprobs)


def _most_likely(logits: Tensor, count: int, part: VocabularyPart | None) -> Tensor:
    """Ids [n, count] of the largest logits of each token. Collective if ``part`` is given."""
    values, ids = logits.topk(min(count, logits.shape[1]))
    if part is None:
        return ids
    # FP64 is exact for logits and for token ids. [ranks, 2, n, k] becomes [2, n, ranks * k].
    local = torch.stack([values.double(), (ids + part.rank * logits.shape[1]).double()])
    values, ids = part.gather(local).permute(1, 2, 0, 3).flatten(2)
    return ids.gather(1, values.topk(count).indices).long()


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence at each position, FP64 [B, S], from log-probabilities [B, K, S] of the same tokens; 0 where all of
    them are 0, as without a target.

    Args:
        beta: 0: of the teacher from the student, KL(teacher || student). 1: KL(student || teacher). Between: beta times
            the first and 1 - beta times the second, each against the mixture of both.
    """
    student, teacher = (_with_rest(logprobs.double()) for logprobs in (student, teacher))
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    mixture = torch.logaddexp(student + log1p(-beta), teacher + log(beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _with_rest(logprobs: Tensor) -> Tensor:
    """With the log-probability of all other tokens, [B, K + 1, S]."""
    of_all = logprobs.logsumexp(1, keepdim=True).clamp(max=-_LEAST_REST)
    return torch.cat([logprobs, torch.log(-torch.expm1(of_all))], 1)


def _kl(of: Tensor, other: Tensor) -> Tensor:
    return (of.exp() * (of - other)).sum(1)


def with_values(batch: Batch, ids: Tensor, logprobs: Tensor) -> Batch:
    """A batch of the loader with ``teacher_logprobs`` [B, K, S], and its tokens behind each target."""
    return with_fields(batch, {"labels": torch.cat([batch["labels"].unsqueeze(1), ids], 1), TEACHER: logprobs})


class DistillationLoss:
    """The objective of a student: the mean divergence over targets, and the weighted cross-entropy of the targets. Its
    total: ``targets``."""

    form: HeadForm
    fields: tuple[str, ...] = (TEACHER,)

    def __init__(self, network: Network, config: DistillationConfig):
        self._network, self._config = network, config
        temperature = config.temperature
        self._has_nll = temperature == 1.0 or config.runs_head_twice
        self.form = self._at_both if config.runs_head_twice else partial(token_logprobs, temperature=temperature)
        self.of_teacher = partial(top_tokens, count=config.top_k, temperature=temperature)

    def _at_both(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, part: VocabularyPart | None = None
    ) -> HeadOutput:
        """`token_logprobs` of the target itself, and at the temperature those of the teacher's tokens."""
        target = token_logprobs(hidden, weight, labels[:, 0], part)
        others = token_logprobs(hidden, weight, labels[:, 1:], part, temperature=self._config.temperature)
        assert target.logprobs is not None and others.logprobs is not None
        return target._replace(logprobs=torch.cat([target.logprobs.unsqueeze(1), others.logprobs], 1))

    def completed(self, batch: Batch, teacher: LossSums | None) -> Batch:
        """A batch of the loader with what the teacher says of it: ``teacher_logprobs`` [B, K, S], and ``labels``
        [B, 1 + K, S] with its tokens behind each target. Collective under context parallelism.

        Args:
            teacher: the output of `top_tokens` for it; None on pipeline stages without the head.
        """
        labels = batch["labels"].unsqueeze(1)
        ids, logprobs = labels.repeat(1, self._config.top_k, 1), torch.zeros(())
        if teacher is not None:  # sync: batches are on the CPU
            assert teacher.logprobs is not None, "the form is `top_tokens`"
            whole = (
                self._network.whole_rows(x.transpose(0, 1), batch).transpose(0, 1).cpu()
                for x in (teacher.predictions[0], teacher.logprobs)
            )
            ids, logprobs = (x.where(labels != IGNORE, none) for x, none in zip(whole, (IGNORE, 0.0), strict=True))
        return with_values(batch, ids, logprobs.expand(ids.shape).contiguous())

    def count(self, micro_batches: list[Batch]) -> dict[str, Any]:
        """See `Objective.count`."""
        return {"targets": count_targets(micro_batches, 0)["targets"]}

    def loss(self, output: LossSums, batch: Fields, totals: Mapping[str, Any], clock: int) -> Tensor:
        """See `Objective.loss`."""
        assert output.logprobs is not None, "the form is `token_logprobs`"
        figures = self._figures(output.logprobs, batch[TEACHER])
        return self._total(figures, totals).float()

    def _figures(self, logprobs: Tensor, teacher: Tensor) -> dict[str, Tensor]:
        """FP64 sums over targets: the divergence, and the cross-entropy where the form gives it."""
        kl = divergence(logprobs[:, 1:], teacher, self._config.beta).sum()
        return {"kl": kl, "nll_loss": -logprobs[:, 0].double().sum()}

    def _total(self, figures: Mapping[str, Any], totals: Mapping[str, Any]) -> Any:
        return (figures["kl"] + self._config.sft_weight * figures["nll_loss"]) / max(totals["targets"], 1)

    def empty_sums(self) -> dict[str, Tensor]:
        """FP64 []: over targets."""
        return {name: torch.zeros((), dtype=torch.float64) for name in ("loss", "kl", "nll_loss")}

    def sums(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.sums`. Collective under context parallelism."""
        assert output.logprobs is not None, "the form is `token_logprobs`"
        rows = self._network.whole_rows(output.logprobs.transpose(0, 1), batch).transpose(0, 1)
        figures = self._figures(rows, copy_to_device(field_of(batch, TEACHER), rows.device))
        figures["loss"] = self._total(figures, {"targets": 1})
        return {name: value / self._network.cluster.layout.ranks_per_dp_rank for name, value in figures.items()}

    def metrics(self, sums: dict[str, Tensor], totals: Mapping[str, Any], clock: int) -> dict[str, float]:
        """See `Objective.metrics`."""
        names = ("loss", "kl", "nll_loss") if self._has_nll else ("loss", "kl")
        return {name: sums[name].item() / max(totals["targets"], 1) for name in names}
