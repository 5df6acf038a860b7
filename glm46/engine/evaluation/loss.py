"""Loss on held-out text: nats per token and bits per byte, for each source and over all sources."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from glm46.engine.evaluation.rows import Figures, Row, held_out
from glm46.engine.training.loss_columns import SUMS, loss_columns
from glm46.storage.data.batches import IGNORE, Batch
from glm46.storage.data.loader import BatchLayout, validation_rows
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.packing import ConcatenatedRows, PackedRows
from glm46.storage.data.tokenizer import Tokenizer


class Loss:
    """A `Measure` on the rows that validation reads (`ValidationStream`). Its figures of a row are the values of
    `Sums`."""

    def __init__(
        self,
        manifests: Mapping[str, Manifest],
        tokenizer: Tokenizer,
        *,
        length: int,
        samples: int,
        document_mask: bool,
        mtp_depth: int = 0,
    ):
        """Build the rows. Raises UserError if a source has no held-out text.

        Args:
            manifests: sources, by name.
            length: number of tokens of a row.
            samples: maximum number of rows of each source.
            document_mask: restart positions at each document.
            mtp_depth: number of prediction layers for which the rows have inputs.
        """
        self.width = len(SUMS)
        self._token_bytes = tokenizer.token_bytes()
        self._layout = BatchLayout(length, mtp_depth, 1, 0, 1, document_mask)
        self.keys: dict[str, list[str]] = {}
        """Keys of the rows of each source."""
        self.rows = []
        for name, manifest in manifests.items():
            held_out(manifest)
            source, order = validation_rows(manifest, length)
            rows = [
                Row(f"loss/{length}/{name}/{row}", length, partial(self._row, source, manifest.eos_id, row))
                for row in order[:samples]
            ]
            self.keys[name] = [row.key for row in rows]
            self.rows += rows

    def _row(self, source: ConcatenatedRows | PackedRows, eos_id: int, row: int) -> Batch:
        builder = self._layout.builder(eos_id)
        buffer = np.empty(self._layout.seq_len + 1 + self._layout.mtp_depth, np.int64)
        builder.add(row, buffer, *source.read(row, buffer), is_marked=source.is_marked)
        return builder.finish()

    def figures(self, labels_S: np.ndarray, logprobs_S: np.ndarray, predictions_S: np.ndarray) -> list[float]:
        """Compute the figures of a row, see the class."""
        labels = labels_S[labels_S != IGNORE]
        return [-float(logprobs_S.sum()), float(len(labels)), float(self._token_bytes[labels].sum())]

    def result(self, figures: Figures) -> dict[str, Any]:
        """Return ``sources`` with the `Sums` and the ``perplexity`` of each source, and ``columns``."""
        sources: dict[str, Any] = {
            name: dict(zip(SUMS, map(sum, zip(*(figures[key] for key in keys), strict=True)), strict=True))
            for name, keys in self.keys.items()
        }
        columns = loss_columns(sources)
        for name, sums in sources.items():
            sums["perplexity"] = float(np.exp(columns[f"loss/{name}"]))
        return {"sources": sources, "columns": columns}
