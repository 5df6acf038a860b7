"""Samples of a rollout as micro-batches: few rows of whole samples, balanced over the ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm46.config.model import ModelShape
from glm46.data.best_fit import best_fit
from glm46.model.cross_entropy import IGNORE
from glm46.model.routes import no_routes
from glm46.rl.rollouts import Rollout
from glm46.training.network import Batch


class PackShape(NamedTuple):
    """How micro-batches are cut."""

    seq_len: int
    """Tokens of a row."""
    rows: int
    """Of a micro-batch on each rank."""
    ranks: int
    """Data-parallel ranks."""
    micro_batches: int | None
    """Of each rank, where a pipeline needs a fixed number."""
    mtp_depth: int
    model: ModelShape | None = None
    """Given under routing replay."""


def pack(lengths: Sequence[int], shape: PackShape) -> list[list[list[list[int]]]]:
    """Distribute samples: for each rank its micro-batches, each a list of rows, each a list of numbers of samples.

    A row holds at most ``seq_len`` tokens; rows are dealt to the ranks so that these compute equally much attention and
    equally many micro-batches, at least one. Rows that are missing at the end are padding.
    """
    row_of, count = best_fit(np.asarray(lengths, dtype=np.int64), shape.seq_len)
    rows: list[list[int]] = [[] for _ in range(count)]
    for sample, row in enumerate(row_of.tolist()):
        rows[row].append(sample)
    cost = [sum(lengths[sample] * (shape.seq_len + lengths[sample]) for sample in row) for row in rows]
    per_rank = -(-max(count, 1) // (shape.ranks * shape.rows)) * shape.rows
    if shape.micro_batches is not None:
        per_rank = shape.micro_batches * shape.rows
    of_ranks: list[list[int]] = [[] for _ in range(shape.ranks)]
    loads = [0] * shape.ranks
    for row in sorted(range(count), key=lambda row: -cost[row]):
        rank = min((r for r in range(shape.ranks) if len(of_ranks[r]) < per_rank), key=loads.__getitem__)
        of_ranks[rank].append(row)
        loads[rank] += cost[row]
    return [
        [
            [rows[row] for row in of_rank[first : first + shape.rows]]
            + [[] for _ in range(shape.rows - len(of_rank[first : first + shape.rows]))]
            for first in range(0, per_rank, shape.rows)
        ]
        for of_rank in of_ranks
    ]


def empty_batch(rows: int, seq_len: int) -> Batch:
    """Padding: ``input_ids, positions, document_ids, labels``, int64 [rows, seq_len]."""
    size = (rows, seq_len)
    return {
        "input_ids": torch.zeros(size, dtype=torch.int64),
        "positions": torch.zeros(size, dtype=torch.int64),
        "document_ids": torch.full(size, -1, dtype=torch.int64),
        "labels": torch.full(size, IGNORE, dtype=torch.int64),
    }


def build_batch(rollout: Rollout, rows: Sequence[Sequence[int]], first: int, shape: PackShape) -> Batch:
    """A micro-batch of samples: ``input_ids, positions, document_ids, labels, sample``, and ``place``, the index of
    each label in the rollout's tokens, int64 [B, S]; under routing replay ``routes``, none where the rollout has none.

    Args:
        rows: numbers of samples in the step.
        first: number in the rollout of the step's first sample.
    """
    batch = empty_batch(len(rows), shape.seq_len)
    batch["sample"], batch["place"] = (torch.full_like(batch["labels"], -1) for _ in range(2))
    if shape.model is not None:
        batch["routes"] = no_routes(tuple(batch["labels"].shape), shape.model)
    for b, samples in enumerate(rows):
        start = 0
        for document, sample in enumerate(samples):
            prompt, completion = rollout.prompt(first + sample), rollout.completion(first + sample)
            length = len(prompt) + len(completion) - 1  # the last token is only a label
            here, labelled = slice(start, start + length), slice(start + len(prompt) - 1, start + length)
            batch["input_ids"][b, here] = torch.from_numpy(np.concatenate([prompt, completion])[:-1].astype(np.int64))
            batch["positions"][b, here] = torch.arange(length)
            batch["document_ids"][b, here] = document
            bounds = rollout.bounds(first + sample)
            is_reply = torch.from_numpy(rollout.arrays["is_reply"][slice(*bounds)])
            labels = torch.from_numpy(completion.astype(np.int64))
            batch["labels"][b, labelled] = labels.masked_fill(is_reply, IGNORE)
            batch["sample"][b, labelled] = torch.full_like(labels, sample).masked_fill(is_reply, -1)
            batch["place"][b, labelled] = torch.arange(*bounds).masked_fill(is_reply, -1)
            if "routes" in batch and (routes := rollout.routes(first + sample)) is not None:
                batch["routes"][b, here] = torch.from_numpy(routes)
            start += length
    if shape.mtp_depth:  # prediction layers are not trained, and a pipeline computes them
        batch["mtp_input_ids"] = torch.zeros((len(rows), shape.mtp_depth, shape.seq_len), dtype=torch.int64)
        batch["mtp_labels"] = torch.full((len(rows), shape.mtp_depth, shape.seq_len), IGNORE, dtype=torch.int64)
    return batch


def spread(values: Tensor, batch: Batch) -> Tensor:
    """Values of all tokens of a rollout, FP32 [T], at their labels in a batch: FP32 [B, S], 0 elsewhere."""
    return torch.cat([values, values.new_zeros(1)])[batch["place"]]  # -1 is the last one


def collect(values: Tensor, batch: Batch, into: Tensor) -> None:
    """The inverse of `spread`: write the values of a batch's labels, FP32 [B, S], into those of the rollout."""
    is_label = batch["place"] >= 0
    into[batch["place"][is_label]] = values[is_label].to(into.dtype)
