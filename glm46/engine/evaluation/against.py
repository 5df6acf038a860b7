"""Measures that take more of a model than the loss of its rows: a comparison with another model on the same text, such
as of a quantised folder with the one in BF16; and the share of drafts of the prediction layers that the model takes."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.model.cross_entropy import HeadOutput, VocabularyPart, summed_loss
from glm46.compute.model.mtp import accepted_drafts, draft_places
from glm46.compute.model.transformer import Transformer
from glm46.engine.evaluation.loss import Loss
from glm46.engine.evaluation.results import run_rows
from glm46.engine.evaluation.rows import Batch, Figures
from glm46.engine.inference.loading import Loaded
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.storage.data.batches import IGNORE

_SUMS = ("loss", "other_loss", "kl", "same_top1", "targets")
_TARGETS = _SUMS.index("targets")
_BINS = 10
"""Of confidence, of equal width."""
_CHUNK_TOKENS = 256
"""Tokens whose logits of both models exist at once."""


class Against:
    """The rows of `Loss` for two models. A `Measure`; its figures of a row are sums over the targets: `_SUMS`, then for
    each model and bin of confidence the confidence less the number of right tokens."""

    width = len(_SUMS) + 2 * _BINS

    def __init__(self, loss: Loss, other: str):
        """
        Args:
            other: names the other model and its weights.
        """
        self.rows = [replace(row, key=f"against/{other}/{row.key}") for row in loss.rows]
        self._keys = {name: [f"against/{other}/{key}" for key in keys] for name, keys in loss.keys.items()}

    def figures(self, labels_S: np.ndarray, *scores_S: np.ndarray) -> list[float]:
        """Numbers of one row, from the values of `compare`."""
        is_target = labels_S != IGNORE
        label_logprobs, others, kl, *top1 = (scores[is_target] for scores in scores_S)
        (tokens, confidence), (other_tokens, other_confidence) = top1[:2], top1[2:]
        sums = [-label_logprobs.sum(), -others.sum(), kl.sum(), (tokens == other_tokens).sum(), is_target.sum()]
        for chosen, sure in ((tokens, confidence), (other_tokens, other_confidence)):
            bins = np.minimum((sure * _BINS).astype(np.int64), _BINS - 1)
            sums += np.bincount(bins, sure - (chosen == labels_S[is_target]), _BINS).tolist()
        return [float(one) for one in sums]

    def result(self, figures: Figures) -> dict[str, Any]:
        """``columns``, over all sources and of each as ``<name>/<source>``: ``loss`` and ``other_loss``, nats per
        target; ``loss_difference``, the first less the second; ``kl``, mean KL divergence of the model from the other
        one, nats; ``same_top1``, share of the targets where both have the same most likely token;
        ``calibration_error`` and ``other_calibration_error``, expected calibration error of the most likely token
        (arXiv 1706.04599, 10 bins)."""
        sources = {name: np.sum([figures[key] for key in keys], axis=0) for name, keys in self._keys.items()}
        columns: dict[str, float] = {}
        for suffix, sums in (("", sum(sources.values())), *((f"/{name}", sums) for name, sums in sources.items())):
            columns |= {f"{name}{suffix}": value for name, value in _means(sums).items()}
        return {"targets": {name: int(sums[_TARGETS]) for name, sums in sources.items()}, "columns": columns}


def _means(sums: np.ndarray) -> dict[str, float]:
    targets = max(sums[_TARGETS], 1)
    means = dict(zip(_SUMS[:_TARGETS], (sums[:_TARGETS] / targets).tolist(), strict=True))
    errors = np.abs(sums[len(_SUMS) :].reshape(2, _BINS)).sum(axis=1) / targets
    means |= dict(zip(("calibration_error", "other_calibration_error"), errors.tolist(), strict=True))
    return means | {"loss_difference": means["loss"] - means["other_loss"]}


class _KeptInputs:
    """A form of the output head that keeps its inputs and computes nothing."""

    hidden: Tensor
    weight: Tensor
    part: VocabularyPart | None

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, part: VocabularyPart | None) -> HeadOutput:
        self.hidden, self.weight, self.part = hidden.flatten(0, -2), weight, part
        return HeadOutput(labels)

    def logits(self, rows: slice) -> Tensor:
        """Of these tokens over the whole vocabulary. Collective under tensor parallelism."""
        logits = self.hidden[rows] @ self.weight.t()
        return logits if self.part is None else self.part.gather(logits).movedim(0, 1).flatten(1)


def compare(
    other: Loaded, model: Transformer, mesh: ModelMesh, batch: Batch, document_mask: bool
) -> tuple[Tensor, ...] | None:
    """Compare two models of one vocabulary, without logits of a whole row. Collective over the ranks in step.

    Returns:
        [B, S] each, undefined without a label: FP32 log-probabilities of the labels by the model and by the other one,
        KL divergence sum(p_other * (log p_other - log p_model)) over the vocabulary, then the most likely token and its
        probability by the model and by the other one. None on stages without the head.
    """
    inputs = _KeptInputs(), _KeptInputs()
    outputs = [
        run_rows(one, its_mesh, batch, document_mask, form)
        for one, its_mesh, form in zip((model, other.model), (mesh, other.mesh), inputs, strict=True)
    ]
    if outputs[0] is None:
        return None
    labels = outputs[0].predictions[0]
    column = labels.clamp(min=0).reshape(-1, 1)
    chunks = []
    for start in range(0, labels.numel(), _CHUNK_TOKENS):
        rows = slice(start, start + _CHUNK_TOKENS)
        ours, others = (kept.logits(rows).log_softmax(-1, dtype=torch.float32) for kept in inputs)
        kl = F.kl_div(ours, others, reduction="none", log_target=True).sum(-1)
        of_labels = (values.gather(1, column[rows]).squeeze(1) for values in (ours, others))
        top1 = (values.max(-1) for values in (ours, others))
        chunks.append((*of_labels, kl, *(part for most in top1 for part in (most.indices, most.values.exp()))))
    return tuple(torch.cat(values).view_as(labels) for values in zip(*chunks, strict=True))


class Drafts:
    """The rows of `Loss` with the prediction layers. A `Measure`; its figures of a row are for each depth the accepted
    drafts, see `accepted_drafts`, and the drafts."""

    def __init__(self, loss: Loss, depths: int):
        """``loss``: with inputs of these prediction depths."""
        self.width, self._depths = 2 * depths, depths
        self.rows = [replace(row, key=f"drafts/{row.key}") for row in loss.rows]
        self._keys = {name: [f"drafts/{key}" for key in keys] for name, keys in loss.keys.items()}

    def figures(self, labels_S: np.ndarray, *scores_S: np.ndarray) -> list[float]:
        """Numbers of one row, from the values of `draft_scores`."""
        return [float(scores.sum()) for scores in scores_S]

    def result(self, figures: Figures) -> dict[str, Any]:
        """``sources``: of each the accepted and the counted drafts of each depth. ``columns``: ``mtp_acceptance``, the
        share over all depths and sources, as validation rows have it."""
        sums = {
            name: np.sum([figures[key] for key in keys], axis=0).reshape(2, self._depths)
            for name, keys in self._keys.items()
        }
        accepted, drafts = sum(sums.values()).sum(axis=1)
        sources = {name: {"accepted": own[0].tolist(), "drafts": own[1].tolist()} for name, own in sums.items()}
        return {"sources": sources, "columns": {"mtp_acceptance": accepted / max(drafts, 1.0)}}


def draft_scores(model: Transformer, mesh: ModelMesh, batch: Batch, document_mask: bool) -> tuple[Tensor, ...] | None:
    """For each depth whether a draft is accepted, then for each whether there is one, [B, S] each; None on stages
    without the head. Collective over the ranks in step."""
    output = run_rows(model, mesh, batch, document_mask, summed_loss)
    if output is None:
        return None
    labels = batch["mtp_labels"].to(output.predictions.device)
    predictions = output.predictions[..., : labels.shape[2]]  # without padding
    return *accepted_drafts(predictions, labels), *draft_places(labels)
