"""Measures a model in one process, and keeps the figures of finished rows in a file, so that a stopped call goes on."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.evaluation.rows import Batch, Figures, Measure, Row, build_batch, equal_lengths, row_figures
from glm46.files.durable import replace_durably
from glm46.model.cross_entropy import token_logprobs
from glm46.model.transformer import Transformer

_TOKENS_AT_ONCE = 8192
"""Tokens of a batch of short rows."""
_SECONDS_BETWEEN_SAVES = 10.0


class Results:
    """The figures of finished rows, and the file that keeps them."""

    def __init__(self, file: Path | None, identity: Mapping[str, Any]):
        """Read the rows that an earlier call finished.

        Args:
            file: JSON; None keeps nothing.
            identity: what decides the figures of a row beside its key: model, text, seed.

        Raises:
            UserError: the file has results of something else, or cannot be read as results.
        """
        self.figures: Figures = {}
        self._file, self._identity, self._saved_at = file, dict(identity), time.monotonic()
        if file is None or not file.exists():
            return
        try:
            content = json.loads(file.read_bytes())
            known, self.figures = content["identity"], content["rows"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{file}: not results of an evaluation; remove it, or give another --output") from error
        if changed := [name for name in identity if known.get(name) != identity[name]]:
            raise UserError(
                f"{file}: results of another {' and '.join(changed)}; remove it, or give another --output folder"
            )

    def missing(self, measure: Measure) -> list[Row]:
        """The rows of a measure that are not finished."""
        return [row for row in measure.rows if row.key not in self.figures]

    def add(self, key: str, figures: list[float]) -> None:
        """Add a finished row. The file is written every few seconds."""
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
    model: Transformer, measure: Measure, results: Results, document_mask: bool, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Compute the rows that are missing, and return the result of the measure.

    Args:
        document_mask: attend only within documents.
        advance: called with the number of tokens just computed.
    """
    for rows in equal_lengths(results.missing(measure), _TOKENS_AT_ONCE):
        batch = build_batch(rows)
        figures = row_figures(measure, batch, *_score(model, batch, document_mask))
        for row, of_row in zip(rows, figures, strict=True):
            results.add(row.key, of_row)
        advance(sum(row.length for row in rows))
    return measure.result(results.figures)


def _score(model: Transformer, batch: Batch, document_mask: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and most likely tokens, [B, S], without logits of a whole row."""
    device = model.embed_tokens.weight.device
    ids = batch["document_ids"]
    inputs = {name: batch[name].to(device) for name in ("input_ids", "positions", "labels")}
    # Rows of one document are plainly causal, which has a kernel of its own.
    if document_mask and ids.any():
        inputs["document_ids"] = ids.to(device)
    output = model(**inputs, is_real=(ids >= 0).to(device), form=token_logprobs)
    return output.logprobs, output.predictions[0]
