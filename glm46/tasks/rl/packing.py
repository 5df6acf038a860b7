"""Packs samples of a rollout into micro-batches: few rows of whole samples, balanced over the ranks, little padding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.model.routes import no_routes
from glm46.config.model import ModelShape
from glm46.run.context_keys import SHARED_KEYS
from glm46.storage.data.batches import Batch
from glm46.tasks.rl.samples import Samples

_KEYS_OF_ROW = SHARED_KEYS - 1
"""Most keys that the documents of a row attend to in total, in multiples of a row's tokens; shared prefixes, which
attend to themselves, add at most one row's tokens to reach `SHARED_KEYS`."""


class PackShape(NamedTuple):
    """The shape of micro-batches."""

    seq_len: int
    """Tokens of a row."""
    rows: int
    """Most rows of a micro-batch on each rank; all micro-batches have the same number."""
    ranks: int
    """Data-parallel ranks."""
    micro_batches: Callable[[int], int] | None
    """With a pipeline, which needs certain numbers of micro-batches of one size: rounds up the smallest number per rank
    that holds all rows. None without a pipeline."""
    mtp_depth: int
    """Number of prediction layers that batches have tokens for."""
    model: ModelShape | None = None
    """Shape of the model under routing replay, otherwise None."""
    shares_prompts: bool = False
    """True if samples of one prompt in the same row share one copy of its tokens."""
    restricts: bool = False
    """True if batches have the tokens that each label was sampled from."""


class Item(NamedTuple):
    """A sample to pack."""

    prompt: int
    """Equal for samples that can share their prompt."""
    shared: int
    """Tokens that can be shared: the prompt except its last token, which predicts the completion."""
    unshared: int
    """The other tokens, except the last one, which is only a label."""

    @property
    def length(self) -> int:
        """Tokens of the sample if it shares none."""
        return self.shared + self.unshared


def items_of(samples: Samples, numbers: range, shape: PackShape) -> list[Item]:
    """Describe these samples of a rollout for packing. Samples that cannot share a prompt get different ``prompt``."""
    prompts: dict[tuple[int, bytes, bytes], int] = {}
    items = []
    for number in numbers:
        start, end = samples.bounds(number)
        shared = int(samples.prompt_lengths[number]) - 1
        routes = b""
        if samples.routes is not None:
            routes = samples.routes[start - number : start - number + shared].tobytes()
        # The samples of an episode may have different prompts.
        key = (int(samples.group[samples.episode[number]]), samples.prompt(number).tobytes(), routes)
        prompt = prompts.setdefault(key, len(prompts)) if shape.shares_prompts and shared else -1 - number
        items.append(Item(prompt, shared, end - start - 1 - shared))  # the last token is only a label
    return items


def pack(items: Sequence[Item], shape: PackShape) -> list[list[list[list[int]]]]:
    """Distribute samples over rows, and rows over ranks.

    A row holds at most ``seq_len`` tokens. Rows do not depend on the number of ranks. They are dealt so that the ranks
    compute about the same attention and the same number of micro-batches, at least one, with as few rows as possible.
    Missing rows are empty, that is padding.

    Returns:
        For each rank its micro-batches, each a list of rows, each a list of sample numbers.
    """
    rows = _rows(items, shape.seq_len)
    parts = [_documents(row, items) for row in rows]
    costs = [sum((end - begin) * (shape.seq_len + end) for _, begin, end, _ in documents) for documents in parts]
    count = len(rows)
    height = shape.rows
    min_rows = -(-max(count, 1) // shape.ranks)
    batches = -(-min_rows // height)
    if shape.micro_batches is not None:
        batches = shape.micro_batches(batches)
    else:
        height = -(-min_rows // batches)
    per_rank = batches * height
    by_rank = [list[int]() for _ in range(shape.ranks)]
    loads = [0] * shape.ranks
    for row in sorted(range(count), key=lambda row: -costs[row]):
        rank = min((r for r in range(shape.ranks) if len(by_rank[r]) < per_rank), key=loads.__getitem__)
        by_rank[rank].append(row)
        loads[rank] += costs[row]
    padded = [
        [rows[row] for row in rank_rows] + [[] for _ in range(per_rank - len(rank_rows))] for rank_rows in by_rank
    ]
    return [[rank_rows[first : first + height] for first in range(0, per_rank, height)] for rank_rows in padded]


def join(
    by_rank: Sequence[Sequence[Sequence[Sequence[int]]]], items: Sequence[Item], multiple: int, max_tokens: int
) -> tuple[list[list[list[list[int]]]], int]:
    """Concatenate the rows of each micro-batch into one row, without the padding at their ends.

    Args:
        by_rank: result of `pack`.
        multiple: the length of a row is a multiple of this.
        max_tokens: most tokens of a micro-batch.

    Returns:
        The same with one row in each micro-batch, and the length of all rows: the length that the longest row needs,
        so that micro-batches have equal shapes.
    """
    joined = list[list[list[list[int]]]]()
    width = 1
    for rank_batches in by_rank:
        joined.append([])
        for rows in rank_batches:
            by_prompt: dict[int, list[int]] = {}
            for number in chain(*rows):  # two rows may have samples of one prompt
                by_prompt.setdefault(items[number].prompt, []).append(number)
            row = [*chain(*by_prompt.values())]
            shared = sum(items[numbers[0]].shared for numbers in by_prompt.values())
            width = max(width, shared + sum(items[number].unshared for number in row))
            joined[-1].append([row])
    return joined, min(-(-width // multiple) * multiple, max_tokens)


def _rows(items: Sequence[Item], seq_len: int) -> list[list[int]]:
    """Assign samples to rows; returns the sample numbers of each row, samples of a prompt together.

    Prompts are placed in descending order of their tokens. Each sample goes into the row that has its prompt, or else
    into the fullest row that has room for sample and prompt.
    """
    by_prompt: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        by_prompt.setdefault(item.prompt, []).append(number)
    for numbers in by_prompt.values():
        numbers.sort(key=lambda number: -items[number].unshared)
    rows: list[list[int]] = []
    free = np.zeros(len(items), np.int64)
    keys = np.full(len(items), _KEYS_OF_ROW * seq_len)
    for numbers in sorted(by_prompt.values(), key=lambda numbers: -sum(items[n].length for n in numbers)):
        # Row of this prompt, and copies of its `free` and `keys`: reading single array elements is slow.
        row = -1
        room = 0
        keys_left = 0
        for number in numbers:
            _, shared_tokens, own_tokens = items[number]
            length = needed = shared_tokens + own_tokens
            if row >= 0 and room >= own_tokens and keys_left >= length:
                needed = own_tokens
            else:
                if row >= 0:
                    free[row] = room
                    keys[row] = keys_left
                has_room = (free[: len(rows)] >= length) & (keys[: len(rows)] >= length)
                if has_room.any():
                    row = int(np.where(has_room, free[: len(rows)], seq_len + 1).argmin())
                else:
                    row = len(rows)
                    rows.append([])
                    free[row] = seq_len
                room = int(free[row])
                keys_left = int(keys[row])
            rows[row].append(number)
            room = room - needed
            keys_left = keys_left - length
        free[row] = room
        keys[row] = keys_left
    return rows


_PADDING = {"input_ids": 0, "positions": 0, "document_ids": -1, "labels": IGNORE}


def build_batch(
    samples: Samples, rows: Sequence[Sequence[int]], first: int, shape: PackShape, items: Sequence[Item], width: int
) -> Batch:
    """Build a micro-batch of samples.

    Its fields, int64 [B, S = width]: ``input_ids``, ``positions``, ``document_ids``, ``labels``; ``sample``, the number
    of the sample in the step; ``episode``, equal to ``sample`` in the first sample of each episode, otherwise -1;
    ``place``, the index of each label among the rollout's targets; ``prefix_ids`` if samples share prompts, see
    `attention_layout`. Under routing replay also ``routes``, marked as missing where the rollout has no routes. With
    `PackShape.restricts` also ``kept``, int32 [B, K, S], see `token_logprobs`; K is a power of two for all batches of
    the rollout, because a pipeline joins them. For
    prediction layers ``mtp_input_ids`` and ``mtp_labels``, int64 [B, K, S], with labels where the main model has one
    and the token that depth k predicts is a target, too.

    Args:
        rows: for each row the numbers of its samples in the step.
        first: number of the step's first sample in the rollout.
        items: all samples of the step.
        width: tokens of a row: ``shape.seq_len``, or the length that `join` returns.
    """
    fill = _PADDING | {"sample": -1, "episode": -1, "place": -1} | ({"prefix_ids": -1} if shape.shares_prompts else {})
    arrays = {name: np.full((len(rows), width), value) for name, value in fill.items()}
    depths = range(1, shape.mtp_depth + 1)
    if shape.model is not None:
        arrays["routes"] = no_routes(arrays["labels"].shape, shape.model).numpy()
    for name in ("input_ids", "labels") if depths else ():
        arrays[f"mtp_{name}"] = np.full((len(rows), width, len(depths)), fill[name])
    documents = np.array(
        [
            (row, document, sample, begin, end, -1 if prefix is None else prefix)
            for row, row_samples in enumerate(rows)
            for document, (sample, begin, end, prefix) in enumerate(_documents(row_samples, items))
        ],
        np.int64,
    ).reshape(-1, 6)
    lengths = documents[:, 4] - documents[:, 3]
    row, document, sample, begin, _, prefix = documents.repeat(lengths, 0).T
    token = np.arange(len(row))
    position = begin + token - (lengths.cumsum() - lengths).repeat(lengths)
    number = first + sample
    last = samples.ends[number] - 1
    index = samples.ends[number] - samples.lengths[number] + position  # index among all tokens of the rollout

    def ahead(count: int, values: np.ndarray, absent: int | None = None) -> np.ndarray:
        """Return the values ``count`` tokens ahead of each token. Past the end of its sample this is ``absent``, or the
        value of the sample's last token if ``absent`` is None."""
        result = values[np.minimum(index + count, last)]
        return result if absent is None else np.where(index + count > last, absent, result)

    place = ahead(1, samples.places, -1)
    targets = np.where(samples.targets >= 0, samples.targets, IGNORE)
    is_first = np.diff(samples.episode, prepend=-1) != 0
    columns = {
        "input_ids": samples.tokens[index],
        "positions": position,
        "document_ids": document,
        "prefix_ids": prefix,
        "labels": ahead(1, targets, IGNORE),
        "place": place,
        "sample": np.where(place >= 0, sample, -1),
        "episode": np.where((place >= 0) & is_first[number], sample, -1),
    }
    if samples.routes is not None:  # each sample has one row fewer than tokens
        columns["routes"] = samples.routes[index - number]
    if depths:
        columns["mtp_input_ids"] = np.stack([ahead(depth, samples.tokens) for depth in depths], 1)
        # Labels only where the main model has them, so that the loss does not depend on which samples share a prompt.
        mtp_labels = [np.where(place >= 0, ahead(depth + 1, targets, IGNORE), IGNORE) for depth in depths]
        columns["mtp_labels"] = np.stack(mtp_labels, 1)
    for name in arrays.keys() & columns.keys():
        arrays[name][row, token - np.searchsorted(row, row)] = columns[name]
    tensors: Any = {name: torch.from_numpy(values) for name, values in arrays.items()}
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in tensors if name.startswith("mtp_")}
    batch: Batch = tensors | ({"kept": _kept(samples, tensors["place"])} if shape.restricts else {})
    return batch


def _kept(samples: Samples, place: Tensor) -> Tensor:
    """Return the ids that labels were sampled from, int32 [B, K, S] with -1 for none, by the place of each label."""
    width = 1 << max(samples.most_kept - 1, 0).bit_length()
    table = np.full((*place.shape, width), -1, np.int32)
    if samples.kept_ids is not None and samples.kept_counts is not None:
        is_label = place.numpy() >= 0
        number = place.numpy()[is_label]
        counts = samples.kept_counts[number]
        starts = (samples.kept_counts.cumsum() - samples.kept_counts)[number]
        label = np.arange(len(number)).repeat(counts)
        column = np.arange(len(label)) - (counts.cumsum() - counts).repeat(counts)
        rows = np.full((len(number), width), -1, np.int32)
        rows[label, column] = samples.kept_ids[starts.repeat(counts) + column]
        table[is_label] = rows
    return torch.from_numpy(table).transpose(1, 2).contiguous()


def _documents(samples: Sequence[int], items: Sequence[Item]) -> Iterator[tuple[int, int, int, int | None]]:
    """Yield the documents of a row: sample, start and end of its tokens, and the number of the document with its shared
    prompt or None."""
    document = 0
    for _, group in groupby(samples, key=lambda number: items[number].prompt):
        numbers = list(group)
        shared = items[numbers[0]].shared
        if len(numbers) == 1:
            yield numbers[0], 0, items[numbers[0]].length, None
            document += 1
            continue
        yield numbers[0], 0, shared, None
        for sample in numbers:
            yield sample, shared, items[sample].length, document
        document += 1 + len(numbers)


def fields_of(batch: Batch) -> Mapping[str, Tensor]:
    """Return a batch as a mapping, for access to fields that only some tasks have."""
    fields: Mapping[str, Any] = batch
    return fields


def spread(values: Tensor, batch: Batch) -> Tensor:
    """Move values of all targets of a rollout, FP32 [G], to their labels in a batch: FP32 [B, S], 0 elsewhere."""
    return torch.cat([values, values.new_zeros(1)])[fields_of(batch)["place"]]  # index -1 is the added zero


def collect(values: Tensor, batch: Batch, into: Tensor) -> None:
    """Write the values of a batch's labels, [B, S] on any device, into the values of the rollout on the CPU; the
    inverse of `spread`."""
    place = fields_of(batch)["place"]
    into[place[place >= 0]] = values.cpu()[place >= 0].to(into.dtype)
