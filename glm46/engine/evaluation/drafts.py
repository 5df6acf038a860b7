"""Drafts of the prediction layers that the model accepts: their share, and the tokens of a step with them."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from glm46.compute.model.cross_entropy import summed_loss
from glm46.compute.model.mtp import acceptance_length, accepted_drafts, draft_places, unbroken
from glm46.compute.model.transformer import Transformer
from glm46.engine.evaluation.loss import Loss
from glm46.engine.evaluation.results import run_rows
from glm46.engine.evaluation.rows import Figures
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.storage.data.batches import Batch


class Drafts:
    """A `Measure` on the rows of `Loss`, with the prediction layers. Its figures of a row are, for each depth, the
    numbers of accepted drafts, see `accepted_drafts`, and of drafts, then both after accepted drafts, or drafts, of all
    previous depths."""

    def __init__(self, loss: Loss, depths: int):
        """Build the rows from ``loss``, which has inputs for this number of prediction depths."""
        self.width = 4 * depths
        self._depths = depths
        # Figures of another number of depths are other figures.
        self.rows = [replace(row, key=f"drafts {depths}/{row.key}") for row in loss.rows]
        self._keys = {name: [f"drafts {depths}/{key}" for key in keys] for name, keys in loss.keys.items()}

    def figures(self, labels_S: np.ndarray, *scores_S: np.ndarray) -> list[float]:
        """Compute the figures of one row from the values of `draft_scores`."""
        return [float(scores.sum()) for scores in scores_S]

    def result(self, figures: Figures) -> dict[str, Any]:
        """Return ``sources``, with the accepted and all drafts of each depth and the `acceptance_length` for each
        source, and ``columns`` with ``mtp_acceptance``, the share over all depths and sources, and
        ``mtp_acceptance_length``, as in rows of metrics."""
        sums = {
            name: np.sum([figures[key] for key in keys], axis=0).reshape(4, self._depths)
            for name, keys in self._keys.items()
        }
        accepted, drafts, accepted_runs, draft_runs = sum(sums.values()).tolist()
        sources = {
            name: {
                "accepted": counts[0].tolist(),
                "drafts": counts[1].tolist(),
                "length": acceptance_length(*counts[2:].tolist()),
            }
            for name, counts in sums.items()
        }
        columns = {
            "mtp_acceptance": sum(accepted) / max(sum(drafts), 1.0),
            "mtp_acceptance_length": acceptance_length(accepted_runs, draft_runs),
        }
        return {"sources": sources, "columns": columns}


def draft_scores(model: Transformer, mesh: ModelMesh, batch: Batch, document_mask: bool) -> tuple[Tensor, ...] | None:
    """Return for each depth if a draft is accepted, then for each depth if there is a draft, then both after those of
    all previous depths, [B, S] each; None on stages without the head. Collective over the ranks in step."""
    output = run_rows(model, mesh, batch, document_mask, summed_loss)
    if output is None:
        return None
    labels = batch["mtp_labels"].to(output.predictions.device)
    predictions = output.predictions[..., : labels.shape[2]]  # without padding
    accepted = accepted_drafts(predictions, labels)
    drafts = draft_places(labels)
    return *accepted, *drafts, *unbroken(accepted), *unbroken(drafts)
