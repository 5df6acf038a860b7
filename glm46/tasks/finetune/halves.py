"""Halves of pairs in rows of tokens: where they are, sums over their tokens, and completions of other prompts."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.parallelize.pipeline import Fields
from glm46.storage.data.batches import Batch

HALF = "pair_half"


def with_fields(batch: Batch, fields: Fields) -> Batch:
    """A batch with fields of these tasks, in place of its own or beside them."""
    return cast(Batch, {**batch, **fields})


def field_of(batch: Batch, name: str) -> Tensor:
    """A field of these tasks."""
    return cast(Fields, batch)[name]


def split_pairs(batch: Batch, begin_id: int) -> Batch:
    """The halves of each pair as documents of their own: other ``document_ids`` and ``positions``, and the new field
    ``pair_half``, int64 [B, S]: at each position with a label the number of its half in the batch, the chosen half of
    pair n being 2n and the rejected one 2n + 1; else -1. A labelled example is a pair of which one half has no label.

    Args:
        batch: of the loader, whose documents are pairs.
        begin_id: the token that each half begins with, and no other place holds.
    """
    is_real = batch["document_ids"] >= 0
    begins = (batch["input_ids"] == begin_id) & is_real
    halves = begins.cumsum(1)
    places = torch.arange(begins.shape[1]).expand_as(halves)
    first = torch.where(begins, places, 0).cummax(1).values
    before = halves[:, -1:].cumsum(0) - halves[:, -1:]
    fields = {
        "document_ids": torch.where(is_real, halves - 1, -1),
        "positions": torch.where(is_real, places - first, 0),
        HALF: torch.where(batch["labels"] != IGNORE, before + halves - 1, -1),
    }
    return with_fields(batch, fields)


def only_ends(batch: Batch) -> Batch:
    """The same with the number of a half at its last position with a label alone: that of the last token of its answer,
    before the marker that ends it.

    Args:
        batch: as `split_pairs` gives it.
    """
    half = field_of(batch, HALF)
    none = torch.iinfo(half.dtype).max
    later = half.where(half >= 0, none)[:, 1:].flip(1).cummin(1).values.flip(1)  # the next number behind each position
    later = torch.cat([later, torch.full_like(half[:, :1], none)], 1)
    return with_fields(batch, {HALF: half.where(half != later, -1)})


def mismatch_completions(batch: Batch) -> tuple[Batch, int]:
    """Rows in which each completion answers the prompt of another example of its row: of the chosen ones in their
    order, then the rejected ones, each prompt has the completion before. Rows are as long as before.

    Args:
        batch: as `split_pairs` gives it.

    Returns:
        The rows, with the fields of the loader that a forward pass reads, and the number of examples in them. A row
        with one pair gives none: both of its completions answer one prompt.
    """
    made: Batch = {
        "input_ids": torch.zeros_like(batch["input_ids"]),
        "labels": torch.full_like(batch["labels"], IGNORE),
        "positions": torch.zeros_like(batch["positions"]),
        "document_ids": torch.full_like(batch["document_ids"], -1),
    }
    count = 0
    for row in range(len(batch["input_ids"])):
        ids, labels, half = (field_of(batch, name)[row] for name in ("input_ids", "labels", HALF))
        examples = half[half >= 0].unique().tolist()
        if len({example // 2 for example in examples}) < 2:
            continue
        prompts, completions = [], []
        for example in sorted(examples, key=lambda number: (number % 2, number)):
            first = int((half == example).nonzero()[0])  # the last token of the prompt
            places = (batch["document_ids"][row] == batch["document_ids"][row, first]).nonzero()
            begin, end = int(places[0]), int(places[-1]) + 1
            prompts.append(ids[begin : first + 1])
            completions.append((ids[first + 1 : end], labels[first:end]))
        at = 0
        for number, (prompt, (answer, targets)) in enumerate(
            zip(prompts, completions[-1:] + completions[:-1], strict=True)
        ):
            end = at + len(prompt) + len(answer)
            made["input_ids"][row, at:end] = torch.cat([prompt, answer])
            made["labels"][row, end - len(targets) : end] = targets
            made["positions"][row, at:end] = torch.arange(end - at)
            made["document_ids"][row, at:end] = number
            at = end
        count += len(prompts)
    return made, count


class PairSums(NamedTuple):
    """FP64 [pairs, 2], chosen and rejected: sums over the tokens of each half. Rows of no pair are zero."""

    logprobs: Tensor
    """Of the policy."""
    log_ratios: Tensor
    """Of policy and reference; without a reference equal to ``logprobs``."""
    tokens: Tensor

    @property
    def exists(self) -> Tensor:
        """Bool [pairs, 2]."""
        return self.tokens > 0

    def means(self) -> "PairSums":
        """The same with means per token in place of sums."""
        tokens = self.tokens.clamp(min=1)
        return PairSums(self.logprobs / tokens, self.log_ratios / tokens, self.tokens)


def sum_pairs(logprobs: Tensor, reference: Tensor | float, half: Tensor, size: int) -> PairSums:
    """Sum over halves.

    Args:
        logprobs, reference: FP32 [B, S]; no reference is 0.
        half: int64 [B, S], see `split_pairs`.
        size: more than the largest number of a half, and even. Not the exact one, which the host does not know.
    """
    has_label = half >= 0
    values = torch.stack([logprobs, logprobs - reference, torch.ones_like(logprobs)]).double() * has_label
    sums = values.new_zeros(3, size).index_add(1, half.clamp(min=0).flatten(), values.flatten(1))
    return PairSums(*sums.view(3, -1, 2))
