"""Measures: rows of tokens for the model, figures of each row, and a result from the figures of all rows.

A measure uses neither a model nor a mesh. The caller passes the log-probabilities of the labels of its rows, so that
`evaluate` (`measure_rows`) and a training run on any layout (`tasks/pretrain/validation.py`) measure the same.
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
"""Figures of finished rows by their key."""


@dataclass(frozen=True)
class Row:
    """One row of tokens for the model."""

    key: str
    """Names the task and everything that decides the tokens, such as ``needle/4096/0.25/3``: a finished row of this key
    need not be computed again."""
    length: int
    """Tokens."""
    build: Callable[[], Batch]
    """Makes the batch of this row, [1, length] on the CPU."""


class Measure(Protocol):
    """One task of an evaluation."""

    @property
    def rows(self) -> Sequence[Row]:
        """Rows of equal length follow each other."""
        ...

    width: int
    """Number of figures of a row."""

    def figures(self, labels_S: np.ndarray, logprobs_S: np.ndarray, predictions_S: np.ndarray) -> list[float]:
        """Numbers of one row.

        Args:
            labels_S: of the row, `IGNORE` without a target.
            logprobs_S: FP64, of the labels; 0 without a target.
            predictions_S: most likely tokens.
        """
        ...

    def result(self, figures: Figures) -> dict[str, Any]:
        """The result over all rows, as JSON; ``columns`` are its numbers for a row of metrics, by name."""
        ...


def equal_lengths(rows: Sequence[Row], tokens: int, ranks: int = 1) -> Iterator[list[Row]]:
    """Split rows into groups of equal length, of about this many tokens, and at least one row, for each rank."""
    for length, same in groupby(rows, key=lambda row: row.length):
        left, at_once = list(same), max(1, tokens // length) * ranks
        for start in range(0, len(left), at_once):
            yield left[start : start + at_once]


def build_batch(rows: Sequence[Row]) -> Batch:
    """The batch of rows of equal length, on the CPU."""
    built: list[Any] = [row.build() for row in rows]
    return cast(Batch, {name: torch.cat([of_row[name] for of_row in built]) for name in built[0]})


def padded(batch: Batch, multiple: int) -> Batch:
    """Rows with padding behind them, so that a mesh can split them evenly; inputs of prediction layers if there are."""
    missing = -batch["input_ids"].shape[1] % multiple
    fill = {"input_ids": 0, "labels": IGNORE, "positions": 0, "document_ids": -1}
    if "mtp_labels" in batch and batch["mtp_labels"].shape[1]:
        fill |= {"mtp_input_ids": 0, "mtp_labels": IGNORE}
    columns = cast(dict[str, Tensor], batch)
    return cast(Batch, {name: F.pad(columns[name], (0, missing), value=value) for name, value in fill.items()})


def share_of_rows(rows: Sequence[_Row], rank: int, ranks: int) -> tuple[range, list[_Row]]:
    """The places of this rank's rows, and the rows that it computes: equally many on all ranks, with the last row again
    where there are too few."""
    share = -(-len(rows) // ranks)
    places = range(len(rows))[rank * share : (rank + 1) * share]
    return places, [rows[place] for place in places] + [rows[-1]] * (share - len(places))


def row_figures(measure: Measure, batch: Batch, *scores_BS: Tensor) -> list[list[float]]:
    """The figures of each row of a batch, from what the measure takes of each position beside the label: usually the
    log-probabilities of the labels and the most likely tokens."""
    wide = (scores.double() if scores.is_floating_point() else scores for scores in scores_BS)
    values = (batch["labels"].numpy(), *(scores.cpu().numpy() for scores in wide))
    return [measure.figures(*of_row) for of_row in zip(*values, strict=True)]


def one_document(tokens: np.ndarray, eos_id: int) -> Batch:
    """The batch of one row, [1, S], from S + 1 tokens of one document, each but the first a target."""
    length = len(tokens) - 1
    builder = BatchBuilder(1, length, 0, document_mask=True, eos_id=eos_id)
    builder.add(0, tokens.astype(np.int64), length + 1, [])
    return builder.finish()


def held_out(manifest: Manifest) -> TokenStream:
    """The validation split of a source. Raises UserError if it has nothing to predict, or pairs."""
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
