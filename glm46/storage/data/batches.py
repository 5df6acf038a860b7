"""Build batches from rows of tokens and the ends of the documents in them.

B rows of S tokens; K multi-token prediction layers. A row is read S + 1 + K tokens long.
"""

from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from glm46.storage.data.shards import NOT_A_TARGET

IGNORE = -100  # Label of a position that has no target. Source: the default of torch.nn.functional.cross_entropy.


class _Rows(TypedDict):
    input_ids: Tensor
    """int64 [B, S]: tokens; the end of text in padding."""
    labels: Tensor
    """int64 [B, S]: the next token of the same document if it is a target, else `IGNORE`."""
    positions: Tensor
    """int32 or int64 [B, S]: from 0 in the row, and again at each document under document masks."""
    document_ids: Tensor
    """int32 or int64 [B, S]: 0, 1, 2 ... in the row; -1 in padding."""


class Batch(_Rows, total=False):
    """A micro-batch on the CPU. A task adds the fields that its objective needs, [B, S] or [B, K, S]."""

    mtp_input_ids: Tensor
    """int64 [B, K, S]: the tokens 1 to K ahead."""
    mtp_labels: Tensor
    """int64 [B, K, S]: the tokens 2 to K + 1 ahead, or `IGNORE`, as in ``labels``."""
    sample_numbers: Tensor
    """int64 [B]: global sample number; in validation the number of the row, -1 for a row of padding."""
    prefix_ids: Tensor
    """int64 [B, S]: id of the earlier document that a token also attends to, -1 for none; see `attention_layout`."""
    routes: Tensor
    """[B, S, L, A]: experts to route to instead of the router's choice, see `compute/model/routes.py`."""
    kept: Tensor
    """int32 [B, K, S]: token ids to which the distribution of a label is restricted, see `token_logprobs`."""


class BatchBuilder:
    """Fills one batch row by row; `finish` returns it as tensors and starts the next.

    With ``document_mask``, positions restart at the first token of each document. ``eos_id`` pads a row after its last
    token.
    """

    def __init__(self, rows: int, seq_len: int, mtp_depth: int, document_mask: bool, eos_id: int):
        self.seq_len = seq_len
        self.mtp_depth = mtp_depth
        self._rows = rows
        self._document_mask = document_mask
        self._eos_id = eos_id
        self._count_up = np.arange(seq_len, dtype=np.int32)
        self._allocate()

    def _allocate(self) -> None:
        plain = (self._rows, self.seq_len)
        ahead = (self._rows, self.mtp_depth, self.seq_len)
        self._filled = 0
        self.input_ids = np.empty(plain, np.int64)
        self.labels = np.empty(plain, np.int64)
        self.positions = np.empty(plain, np.int32)
        self.document_ids = np.empty(plain, np.int32)
        self.mtp_input_ids = np.empty(ahead, np.int64)
        self.mtp_labels = np.empty(ahead, np.int64)
        self.sample_numbers = np.empty(self._rows, np.int64)

    def add(self, number: int, row: np.ndarray, used: int, ends: list[np.ndarray], *, is_marked: bool = False) -> None:
        """Append one row.

        Args:
            number: global sample number, or number of the validation row.
            row: int64 [S + 1 + K]; modified.
            used: number of tokens in ``row``. If fewer than its length, a document ends there.
            ends: exclusive ends of documents, ascending, as a list of arrays (`TokenStream.read`).
            is_marked: tokens that are not labels have the bit `NOT_A_TARGET`.
        """
        length = self.seq_len
        row_index = self._filled
        row[used:] = self._eos_id
        targets = row
        if is_marked:
            targets = np.where(row < NOT_A_TARGET, row, IGNORE)
            row &= ~NOT_A_TARGET
        self.sample_numbers[row_index] = number
        self.input_ids[row_index] = row[:length]
        self.labels[row_index] = targets[1 : length + 1]
        for k in range(1, self.mtp_depth + 1):
            self.mtp_input_ids[row_index, k - 1] = row[k : length + k]
            self.mtp_labels[row_index, k - 1] = targets[k + 1 : length + k + 1]
        doc_ends = ends[0] if len(ends) == 1 else np.concatenate([np.empty(0, np.int64), *ends])
        self._mask_targets(row_index, doc_ends)
        self._number_documents(row_index, doc_ends[: np.searchsorted(doc_ends, length)])
        if used < length:
            self._blank(row_index, used)
        self._filled += 1

    def add_padding(self) -> None:
        """Append a row without documents, which keeps the number of batches equal on all ranks."""
        row_index = self._filled
        self.sample_numbers[row_index] = -1
        self.input_ids[row_index] = self._eos_id
        self.mtp_input_ids[row_index] = self._eos_id
        self._blank(row_index, 0)
        self._filled += 1

    def finish(self) -> Batch:
        """Return the batch."""
        assert self._filled == self._rows, f"batch has {self._filled} of {self._rows} rows"
        names = ["input_ids", "labels", "positions", "document_ids", "mtp_input_ids", "mtp_labels", "sample_numbers"]
        batch: Any = {name: torch.from_numpy(getattr(self, name)) for name in names}
        self._allocate()
        rows: Batch = batch
        return rows

    def _mask_targets(self, row_index: int, ends: np.ndarray) -> None:
        """Mask targets in another document: targets k + 1 tokens ahead, at the last k + 1 positions before each end."""
        for ahead in range(1, self.mtp_depth + 2):
            places = ends - ahead
            places = places[np.searchsorted(places, 0) : np.searchsorted(places, self.seq_len)]
            if ahead == 1:
                self.labels[row_index, places] = IGNORE
            first_depth = max(ahead - 2, 0)  # `mtp_labels` begin with the target 2 tokens ahead
            self.mtp_labels[row_index, first_depth:, places] = IGNORE

    def _number_documents(self, row_index: int, inner_ends: np.ndarray) -> None:
        """Set document ids 0, 1, 2 ..., and positions within the document or the row."""
        bounds = np.concatenate(([0], inner_ends, [self.seq_len]))
        lengths = np.diff(bounds)
        self.document_ids[row_index] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        self.positions[row_index] = self._count_up
        if self._document_mask:
            self.positions[row_index] -= np.repeat(bounds[:-1].astype(np.int32), lengths)

    def _blank(self, row_index: int, start: int) -> None:
        self.labels[row_index, start:] = IGNORE
        self.mtp_labels[row_index, :, start:] = IGNORE
        self.positions[row_index, start:] = 0
        self.document_ids[row_index, start:] = -1
