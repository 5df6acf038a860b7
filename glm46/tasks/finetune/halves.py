"""Halves of pairs in rows of tokens: their positions, sums over their tokens, and mismatched completions for KTO."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.parallelize.pipeline import Fields
from glm46.storage.data.batches import Batch

HALF = "pair_half"


def with_fields(batch: Batch, fields: Fields) -> Batch:
    """Return a batch with fields of these tasks added or replaced."""
    return cast(Batch, {**batch, **fields})


def field_of(batch: Batch, name: str) -> Tensor:
    """Return a field of these tasks from a batch."""
    return cast(Fields, batch)[name]


def split_pairs(batch: Batch, begin_id: int) -> Batch:
    """Make each half of a pair a document of its own: replaces ``document_ids`` and ``positions``, adds ``pair_half``.

    ``pair_half``, int64 [B, S], holds at each position with a label the number of its half in the batch: 2n for the
    chosen half of pair n, and 2n + 1 for the rejected one; elsewhere -1. A labelled example is a pair in which one half
    has no labels.

    Args:
        batch: batch of the loader, whose documents are pairs.
        begin_id: the token that each half begins with; it occurs nowhere else.
    """
    is_real = batch["document_ids"] >= 0
    begins = (batch["input_ids"] == begin_id) & is_real
    halves = begins.cumsum(1)
    positions = torch.arange(begins.shape[1]).expand_as(halves)
    starts = torch.where(begins, positions, 0).cummax(1).values
    offsets = halves[:, -1:].cumsum(0) - halves[:, -1:]
    fields = {
        "document_ids": torch.where(is_real, halves - 1, -1),
        "positions": torch.where(is_real, positions - starts, 0),
        HALF: torch.where(batch["labels"] != IGNORE, offsets + halves - 1, -1),
    }
    return with_fields(batch, fields)


def only_ends(batch: Batch) -> Batch:
    """Keep the number of each half only at its last position with a label: the answer's last token, before the marker
    that ends it.

    Args:
        batch: result of `split_pairs`.
    """
    half = field_of(batch, HALF)
    no_half = torch.iinfo(half.dtype).max
    next_half = (
        half.where(half >= 0, no_half)[:, 1:].flip(1).cummin(1).values.flip(1)
    )  # next number after each position
    next_half = torch.cat([next_half, torch.full_like(half[:, :1], no_half)], 1)
    return with_fields(batch, {HALF: half.where(half != next_half, -1)})


def mismatch_completions(batch: Batch) -> tuple[Batch, int]:
    """Pair each completion with the prompt of another example of its row.

    The examples of a row are ordered chosen ones first, then rejected ones, and each prompt gets the completion of the
    previous example. Rows keep their length.

    Args:
        batch: result of `split_pairs`.

    Returns:
        The rows, with the loader's fields that a forward pass reads, and the number of examples in them. A row with
        only one pair has no examples, because both of its completions answer the same prompt.
    """
    mismatched: Batch = {
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
        prompts = []
        completions = []
        for example in sorted(examples, key=lambda number: (number % 2, number)):
            first = int((half == example).nonzero()[0])  # the last token of the prompt
            positions = (batch["document_ids"][row] == batch["document_ids"][row, first]).nonzero()
            begin = int(positions[0])
            end = int(positions[-1]) + 1
            prompts.append(ids[begin : first + 1])
            completions.append((ids[first + 1 : end], labels[first:end]))
        start = 0
        for number, (prompt, (answer, targets)) in enumerate(
            zip(prompts, completions[-1:] + completions[:-1], strict=True)
        ):
            end = start + len(prompt) + len(answer)
            mismatched["input_ids"][row, start:end] = torch.cat([prompt, answer])
            mismatched["labels"][row, end - len(targets) : end] = targets
            mismatched["positions"][row, start:end] = torch.arange(end - start)
            mismatched["document_ids"][row, start:end] = number
            start = end
        count += len(prompts)
    return mismatched, count


class PairSums(NamedTuple):
    """Sums over the tokens of each half, FP64 [pairs, 2]: chosen and rejected. Rows without a pair are zero."""

    logprobs: Tensor
    """Log-probabilities of the policy."""
    log_ratios: Tensor
    """Log-probabilities of the policy minus those of the reference; without a reference equal to ``logprobs``."""
    tokens: Tensor
    """Tokens with a label."""

    @property
    def exists(self) -> Tensor:
        """True for halves that have tokens; bool [pairs, 2]."""
        return self.tokens > 0

    def means(self) -> "PairSums":
        """Convert sums to means per token."""
        tokens = self.tokens.clamp(min=1)
        return PairSums(self.logprobs / tokens, self.log_ratios / tokens, self.tokens)


def sum_pairs(logprobs: Tensor, reference: Tensor | float, half: Tensor, size: int) -> PairSums:
    """Sum log-probabilities over halves.

    Args:
        logprobs, reference: FP32 [B, S]; ``reference`` is 0 without a reference.
        half: int64 [B, S], see `split_pairs`.
        size: even, and larger than the largest number of a half. An upper bound, because the exact number is on the
            device.
    """
    has_label = half >= 0
    values = torch.stack([logprobs, logprobs - reference, torch.ones_like(logprobs)]).double() * has_label
    sums = values.new_zeros(3, size).index_add(1, half.clamp(min=0).flatten(), values.flatten(1))
    return PairSums(*sums.view(3, -1, 2))
