"""Measures: rows of tokens for the model, figures of each row, and a result from the figures of all rows.

A measure uses neither a model nor a mesh: `measure_rows` passes it the log-probabilities of the labels of its rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.text_recipe import PREFERENCES
from glm46.storage.data.batches import IGNORE, Batch, BatchBuilder
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.packing import TokenStream

_Row = TypeVar("_Row")

Figures = dict[str, list[float]]
"""Figures of finished rows by key."""


@dataclass(frozen=True)
class Row:
    """One row of tokens for the model."""

    key: str
    """Name of the task and everything that determines the tokens, such as ``needle/4096/0.25/3``: a finished row with
    this key is not computed again."""
    length: int
    """Number of tokens."""
    build: Callable[[], Batch]
    """Function that builds the batch of this row, [1, length] on the CPU."""


class Measure(Protocol):
    """One task of an evaluation."""

    @property
    def rows(self) -> Sequence[Row]:
        """All rows, with rows of equal length next to each other."""
        ...

    width: int
    """Number of figures of a row."""

    def figures(self, labels_S: np.ndarray, logprobs_S: np.ndarray, predictions_S: np.ndarray) -> list[float]:
        """Compute the figures of one row.

        Args:
            labels_S: labels of the row, `IGNORE` without a target.
            logprobs_S: log-probabilities of the labels, FP64; 0 without a target.
            predictions_S: most likely tokens.
        """
        ...

    def result(self, figures: Figures) -> dict[str, Any]:
        """Compute the result over all rows, as JSON; ``columns`` are its numbers for a row of metrics, by name."""
        ...


def equal_lengths(rows: Sequence[Row], tokens: int, ranks: int = 1) -> Iterator[list[Row]]:
    """Split rows into groups of equal length, with about this many tokens, and at least one row, for each rank."""
    for length, group in groupby(rows, key=lambda row: row.length):
        remaining = list(group)
        group_size = max(1, tokens // length) * ranks
        for start in range(0, len(remaining), group_size):
            yield remaining[start : start + group_size]


def build_batch(rows: Sequence[Row]) -> Batch:
    """Build the batch of rows of equal length, on the CPU."""
    built: list[Any] = [row.build() for row in rows]
    return cast(Batch, {name: torch.cat([tensors[name] for tensors in built]) for name in built[0]})


def padded(batch: Batch, multiple: int) -> Batch:
    """Add padding at the end of rows, so that a mesh can split them evenly; inputs of prediction layers included."""
    missing = -batch["input_ids"].shape[1] % multiple
    fill = {"input_ids": 0, "labels": IGNORE, "positions": 0, "document_ids": -1}
    if "mtp_labels" in batch and batch["mtp_labels"].shape[1]:
        fill |= {"mtp_input_ids": 0, "mtp_labels": IGNORE}
    columns = cast(dict[str, Tensor], batch)
    return cast(Batch, {name: F.pad(columns[name], (0, missing), value=value) for name, value in fill.items()})


def share_of_rows(rows: Sequence[_Row], rank: int, ranks: int) -> tuple[range, list[_Row]]:
    """Return the places of this rank's rows, and the rows that it computes: the same number on all ranks, filled up
    with the last row if necessary."""
    share = -(-len(rows) // ranks)
    places = range(len(rows))[rank * share : (rank + 1) * share]
    return places, [rows[place] for place in places] + [rows[-1]] * (share - len(places))


def row_figures(measure: Measure, batch: Batch, *scores_BS: Tensor) -> list[list[float]]:
    """Compute the figures of each row of a batch, from the scores of each position: usually the log-probabilities of
    the labels and the most likely tokens."""
    wide = (scores.double() if scores.is_floating_point() else scores for scores in scores_BS)
    values = (batch["labels"].numpy(), *(scores.cpu().numpy() for scores in wide))
    return [measure.figures(*row_values) for row_values in zip(*values, strict=True)]


def one_document(tokens: np.ndarray, eos_id: int) -> Batch:
    """Build the batch of one row, [1, S], from S + 1 tokens of one document, all except the first as targets."""
    length = len(tokens) - 1
    builder = BatchBuilder(1, length, 0, document_mask=True, eos_id=eos_id)
    builder.add(0, tokens.astype(np.int64), length + 1, [])
    return builder.finish()


def held_out(manifest: Manifest) -> TokenStream:
    """Open the validation split of a source. Raises UserError if it has nothing to predict, or preference pairs."""
    split = manifest.splits["validation"]
    if manifest.format in PREFERENCES:
        raise UserError(
            f"{manifest.folder}: holds preferences, which only runs with [finetune.preference] validate; take "
            "another source"
        )
    if not split.labels:
        raise UserError(
            f"{manifest.folder}: no text to predict is held out; prepare it with a larger held_out, or take another "
            "source"
        )
    return TokenStream(manifest.folder, split, manifest.vocab_size)
