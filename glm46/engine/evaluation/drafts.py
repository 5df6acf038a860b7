"""Share of the drafts of the prediction layers that the model accepts."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from glm46.compute.model.cross_entropy import summed_loss
from glm46.compute.model.mtp import accepted_drafts, draft_places
from glm46.compute.model.transformer import Transformer
from glm46.engine.evaluation.loss import Loss
from glm46.engine.evaluation.results import run_rows
from glm46.engine.evaluation.rows import Batch, Figures
from glm46.engine.inference.model_mesh import ModelMesh


class Drafts:
    """A `Measure` on the rows of `Loss`, with the prediction layers. Its figures of a row are the numbers of accepted
    drafts for each depth, see `accepted_drafts`, then the numbers of drafts for each depth."""

    def __init__(self, loss: Loss, depths: int):
        """Build the rows from ``loss``, which has inputs for this number of prediction depths."""
        self.width = 2 * depths
        self._depths = depths
        self.rows = [replace(row, key=f"drafts/{row.key}") for row in loss.rows]
        self._keys = {name: [f"drafts/{key}" for key in keys] for name, keys in loss.keys.items()}

    def figures(self, labels_S: np.ndarray, *scores_S: np.ndarray) -> list[float]:
        """Compute the figures of one row from the values of `draft_scores`."""
        return [float(scores.sum()) for scores in scores_S]

    def result(self, figures: Figures) -> dict[str, Any]:
        """Return ``sources``, with the accepted and all drafts of each depth for each source, and ``columns`` with
        ``mtp_acceptance``, the share over all depths and sources, like in validation rows."""
        sums = {
            name: np.sum([figures[key] for key in keys], axis=0).reshape(2, self._depths)
            for name, keys in self._keys.items()
        }
        accepted, drafts = sum(sums.values()).sum(axis=1)
        sources = {
            name: {"accepted": counts[0].tolist(), "drafts": counts[1].tolist()} for name, counts in sums.items()
        }
        return {"sources": sources, "columns": {"mtp_acceptance": accepted / max(drafts, 1.0)}}


def draft_scores(model: Transformer, mesh: ModelMesh, batch: Batch, document_mask: bool) -> tuple[Tensor, ...] | None:
    """Return for each depth if a draft is accepted, then for each depth if there is a draft, [B, S] each; None on
    stages without the head. Collective over the ranks in step."""
    output = run_rows(model, mesh, batch, document_mask, summed_loss)
    if output is None:
        return None
    labels = batch["mtp_labels"].to(output.predictions.device)
    predictions = output.predictions[..., : labels.shape[2]]  # without padding
    return *accepted_drafts(predictions, labels), *draft_places(labels)
