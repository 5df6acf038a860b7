"""Loss on held-out text: nats per token and bits per byte, of each source and over all."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from glm46.engine.evaluation.rows import Batch, Figures, Row, held_out
from glm46.storage.data.batches import IGNORE
from glm46.storage.data.loader import BatchLayout, validation_rows
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.packing import ConcatenatedRows, PackedRows
from glm46.storage.data.tokenizer import Tokenizer

_SUMS = ("loss", "targets", "text_bytes")
Sums = Mapping[str, float]
"""``loss`` in nats, ``targets``, and ``text_bytes`` of the targets, summed over them."""


def loss_columns(of_sources: Mapping[str, Sums]) -> dict[str, float]:
    """Mean loss and bits per byte over all sources, and of each source as ``loss/<source>``."""
    columns = {}
    total = {name: sum(sums[name] for sums in of_sources.values()) for name in _SUMS}
    for suffix, sums in (("", total), *((f"/{name}", of_source) for name, of_source in of_sources.items())):
        columns[f"loss{suffix}"] = sums["loss"] / max(sums["targets"], 1)
        columns[f"bits_per_byte{suffix}"] = sums["loss"] / math.log(2.0) / max(sums["text_bytes"], 1)
    return columns


class Loss:
    """The rows that validation reads (`ValidationStream`). A `Measure`; its figures of a row are the sums of `Sums`."""

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
        """Raises UserError if a source has no held-out text.

        Args:
            manifests: sources, by name.
            length: tokens of a row.
            samples: most rows of each source.
            document_mask: restart positions at each document.
            mtp_depth: prediction layers that the rows have inputs for.
        """
        self.width = len(_SUMS)
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
        """See the class."""
        labels = labels_S[labels_S != IGNORE]
        return [-float(logprobs_S.sum()), float(len(labels)), float(self._token_bytes[labels].sum())]

    def result(self, figures: Figures) -> dict[str, Any]:
        """``sources``: the `Sums` of each, and their ``perplexity``."""
        sources: dict[str, Any] = {
            name: dict(zip(_SUMS, map(sum, zip(*(figures[key] for key in keys), strict=True)), strict=True))
            for name, keys in self.keys.items()
        }
        columns = loss_columns(sources)
        for name, sums in sources.items():
            sums["perplexity"] = float(np.exp(columns[f"loss/{name}"]))
        return {"sources": sources, "columns": columns}
