"""Evaluation of a model on its ranks, with the figures of finished rows in a file, so that a stopped call can
continue."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.cross_entropy import HeadForm, token_logprobs
from glm46.compute.model.transformer import LossSums, Transformer
from glm46.config.errors import UserError
from glm46.engine.evaluation.rows import (
    Figures,
    Measure,
    Row,
    build_batch,
    equal_lengths,
    padded,
    row_figures,
    share_of_rows,
)
from glm46.engine.inference.loading import Loaded
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.files.durable import replace_durably
from glm46.storage.data.batches import Batch

_TOKENS_AT_ONCE = 8192
"""Number of tokens of a batch of short rows."""
_SECONDS_BETWEEN_SAVES = 10.0

Score = Callable[[Transformer, ModelMesh, Batch, bool], tuple[Tensor, ...] | None]
"""Function (model, mesh, batch, document_mask) -> values of each position, [B, S] with padding; None on stages without
the head. Collective over the ranks in step."""


class Results:
    """Figures of finished rows, and the file that stores them."""

    def __init__(self, file: Path | None, identity: Mapping[str, Any]):
        """Read the rows that an earlier call finished.

        Args:
            file: JSON file; None to store nothing.
            identity: everything besides its key that determines the figures of a row: model, text, seed.

        Raises:
            UserError: the file has results of another evaluation, or cannot be read as results.
        """
        self.figures: Figures = {}
        self._file = file
        self._identity = dict(identity)
        self._saved_at = time.monotonic()
        if file is None or not file.exists():
            return
        try:
            content = json.loads(file.read_bytes())
            saved_identity = dict(content["identity"])
            self.figures = {key: [*map(float, figures)] for key, figures in content["rows"].items()}
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}; give another --output folder") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{file}: not results of an evaluation; remove it, or give another --output") from error
        if changed := [name for name in identity if saved_identity.get(name) != identity[name]]:
            raise UserError(
                f"{file}: results of another {' and '.join(changed)}; remove it, or give another --output folder"
            )

    def share(self) -> None:
        """Send the finished rows of rank 0 to all ranks. Collective."""
        received = [self.figures]  # filled in place
        dist.broadcast_object_list(received, src=0)
        (self.figures,) = received

    def missing(self, measure: Measure) -> list[Row]:
        """Return the rows of a measure that are not finished."""
        return [row for row in measure.rows if row.key not in self.figures]

    def add(self, key: str, figures: list[float]) -> None:
        """Add a finished row. The file is saved at most every few seconds. Raises UserError like `save`."""
        self.figures[key] = figures
        if time.monotonic() - self._saved_at > _SECONDS_BETWEEN_SAVES:
            self.save({})

    def save(self, results: Mapping[str, Any]) -> None:
        """Write the file: identity, results by task, rows. Raises UserError if it cannot be written."""
        self._saved_at = time.monotonic()
        if self._file is None:
            return
        content = {"identity": self._identity, "results": results, "rows": self.figures}
        try:
            replace_durably(self._file, [json.dumps(content, indent=1).encode()])
        except OSError as error:
            raise UserError(f"{self._file}: {error.strerror}; make room, or give another --output folder") from error


@torch.inference_mode()
def measure_rows(
    loaded: Loaded,
    measure: Measure,
    results: Results,
    document_mask: bool,
    advance: Callable[[int], None],
    score: Score | None = None,
) -> dict[str, Any]:
    """Compute the missing rows, and return the result of the measure. Collective over all ranks.

    Args:
        results: results with the same rows on all ranks.
        document_mask: attend only within documents.
        advance: called with the number of tokens just computed.
        score: computes the values of each position that the measure needs; default: log-probabilities of the labels,
            and most likely tokens.
    """
    mesh = loaded.mesh
    for rows in equal_lengths(results.missing(measure), _TOKENS_AT_ONCE, mesh.layout.dp_degree):
        places, mine = share_of_rows(rows, mesh.row_group, mesh.layout.dp_degree)
        batch = build_batch(mine)
        totals = torch.zeros(len(rows), measure.width, dtype=torch.float64)
        scores = (score or _score)(loaded.model, mesh, batch, document_mask)
        if scores is not None and mesh.is_source:
            figures = row_figures(measure, batch, *(values[:, : rows[0].length] for values in scores))
            # The last figures may be of rows that only fill up the share.
            for place, row_values in zip(places, figures, strict=False):
                totals[place] = torch.tensor(row_values, dtype=torch.float64)
        if mesh.layout.world_size > 1:
            dist.all_reduce(totals)  # one rank has the figures of a row
        for row, row_values in zip(rows, totals.tolist(), strict=True):
            results.add(row.key, row_values)
        advance(sum(row.length for row in rows))
    return measure.result(results.figures)


def _score(model: Transformer, mesh: ModelMesh, batch: Batch, document_mask: bool) -> tuple[Tensor, Tensor] | None:
    output = run_rows(model, mesh, batch, document_mask, token_logprobs)
    if output is None:
        return None
    predictions_of_head = output.predictions[0]  # the others are those of the prediction layers
    return cast(Tensor, output.logprobs), predictions_of_head


def run_rows(model: Transformer, mesh: ModelMesh, batch: Batch, document_mask: bool, form: HeadForm) -> LossSums | None:
    """Run the model on rows with padding, without the logits of a full row; None on stages without the head. Rows with
    inputs for the prediction layers also run these. Collective over the ranks in step."""
    weight = local_tensor(next(model.parameters()))
    padded_batch = cast(dict[str, Tensor], padded(batch, mesh.layout.tp))
    ids = padded_batch["document_ids"]
    names = ["input_ids", "positions", "labels"]
    if model.mtp and "mtp_labels" in padded_batch:
        names += ["mtp_input_ids", "mtp_labels"]
    inputs = {name: padded_batch[name].to(weight.device) for name in names}
    # Rows with one document use the causal kernel, without a mask; padding, -1, is at their end.
    if document_mask and (ids > 0).any():
        inputs["document_ids"] = ids.to(weight.device)
    if mesh.stage > 0:
        rows, length = inputs.pop("input_ids").shape
        size = (rows, length // mesh.layout.tp, model.shape.hidden_size)
        inputs["hidden"] = torch.empty(size, dtype=weight.dtype, device=weight.device)
        mesh.receive(inputs["hidden"])
    output = model(**inputs, is_real=(ids >= 0).to(weight.device), form=form)
    if not mesh.is_last:
        mesh.send(output.hidden)
        return None
    sums: LossSums = output
    return sums
