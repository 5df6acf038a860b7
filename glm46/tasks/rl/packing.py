"""Samples of a rollout as micro-batches: few rows of whole samples, balanced over the ranks, with little padding."""

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
"""Most keys that the documents of a row see together, in rows, before the shared prefixes see their own."""


class PackShape(NamedTuple):
    """The shape of micro-batches."""

    seq_len: int
    """Tokens of a row."""
    rows: int
    """Most rows of a micro-batch on each rank; all have equally many."""
    ranks: int
    """Data-parallel ranks."""
    micro_batches: Callable[[int], int] | None
    """Their number on each rank, from the least that has room for all rows, where a pipeline needs some numbers and one
    size."""
    mtp_depth: int
    """Prediction layers that batches have tokens for."""
    model: ModelShape | None = None
    """Given under routing replay."""
    shares_prompts: bool = False
    """The samples of a prompt that lie in one row have its tokens once."""


class Item(NamedTuple):
    """A sample that is to be packed."""

    prompt: int
    """Equal for samples that can share their prompt."""
    shared: int
    """Tokens that they share: those of the prompt but its last one, which predicts the completion."""
    own: int

    @property
    def length(self) -> int:
        """Tokens that it has alone."""
        return self.shared + self.own


def items_of(samples: Samples, numbers: range, shape: PackShape) -> list[Item]:
    """Some samples of a rollout; each has a prompt of its own unless they share them."""
    prompts: dict[tuple[int, bytes, bytes], int] = {}
    items = []
    for number in numbers:
        start, end = samples.bounds(number)
        shared, routes = int(samples.prompt_lengths[number]) - 1, b""
        if samples.routes is not None:
            routes = samples.routes[start - number : start - number + shared].tobytes()
        # The samples of an episode may have different prompts.
        key = (int(samples.group[samples.episode[number]]), samples.prompt(number).tobytes(), routes)
        prompt = prompts.setdefault(key, len(prompts)) if shape.shares_prompts and shared else -1 - number
        items.append(Item(prompt, shared, end - start - 1 - shared))  # the last token is only a label
    return items


def pack(items: Sequence[Item], shape: PackShape) -> list[list[list[list[int]]]]:
    """Distribute samples: for each rank its micro-batches, each a list of rows, each a list of numbers of samples.

    A row holds at most ``seq_len`` tokens; rows do not depend on the ranks, and are dealt to them so that these compute
    equally much attention and equally many micro-batches, at least one, of as many rows as their number needs. Rows
    that are missing at the end are padding.
    """
    rows = _rows(items, shape.seq_len)
    parts = [_documents(row, items) for row in rows]
    cost = [sum((end - begin) * (shape.seq_len + end) for _, begin, end, _ in of_row) for of_row in parts]
    count, height = len(rows), shape.rows
    least = -(-max(count, 1) // shape.ranks)
    batches = -(-least // height)
    if shape.micro_batches is not None:
        batches = shape.micro_batches(batches)
    else:
        height = -(-least // batches)
    per_rank = batches * height
    of_ranks, loads = [list[int]() for _ in range(shape.ranks)], [0] * shape.ranks
    for row in sorted(range(count), key=lambda row: -cost[row]):
        rank = min((r for r in range(shape.ranks) if len(of_ranks[r]) < per_rank), key=loads.__getitem__)
        of_ranks[rank].append(row)
        loads[rank] += cost[row]
    dealt = [[rows[row] for row in of_rank] + [[] for _ in range(per_rank - len(of_rank))] for of_rank in of_ranks]
    return [[of_rank[first : first + height] for first in range(0, per_rank, height)] for of_rank in dealt]


def join(
    of_ranks: Sequence[Sequence[Sequence[Sequence[int]]]], items: Sequence[Item], multiple: int, most: int
) -> tuple[list[list[list[list[int]]]], int]:
    """Put the rows of each micro-batch behind each other in one row, without the padding at their ends.

    Args:
        of_ranks: result of `pack`.
        multiple: of the tokens of a row.
        most: tokens that a micro-batch may have.

    Returns:
        The same with one row in each micro-batch, and the tokens of a row: as many as the longest one of all needs,
        so that micro-batches have equal shapes.
    """
    found, longest = list[list[list[list[int]]]](), 1
    for of_rank in of_ranks:
        found.append([])
        for rows in of_rank:
            of_prompts: dict[int, list[int]] = {}
            for number in chain(*rows):  # two rows may have samples of one prompt
                of_prompts.setdefault(items[number].prompt, []).append(number)
            row = [*chain(*of_prompts.values())]
            shared = sum(items[numbers[0]].shared for numbers in of_prompts.values())
            longest = max(longest, shared + sum(items[number].own for number in row))
            found[-1].append([row])
    return found, min(-(-longest // multiple) * multiple, most)


def _rows(items: Sequence[Item], seq_len: int) -> list[list[int]]:
    """Numbers of the samples of each row, those of a prompt together. Prompt by prompt, longest first, each goes
    into the row that has the prompt, or else the fullest one that has room for both."""
    of_prompts: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        of_prompts.setdefault(item.prompt, []).append(number)
    for numbers in of_prompts.values():
        numbers.sort(key=lambda number: -items[number].own)
    rows: list[list[int]] = []
    free, keys = np.zeros(len(items), np.int64), np.full(len(items), _KEYS_OF_ROW * seq_len)
    for numbers in sorted(of_prompts.values(), key=lambda numbers: -sum(items[n].length for n in numbers)):
        here, room, keys_left = -1, 0, 0  # of the row of the prompt: reading arrays number by number is slow
        for number in numbers:
            _, shared, own = items[number]
            length = needed = shared + own
            if here >= 0 and room >= own and keys_left >= length:
                needed = own
            else:
                if here >= 0:
                    free[here], keys[here] = room, keys_left
                has_room = (free[: len(rows)] >= length) & (keys[: len(rows)] >= length)
                if has_room.any():
                    here = int(np.where(has_room, free[: len(rows)], seq_len + 1).argmin())
                else:
                    here = len(rows)
                    rows.append([])
                    free[here] = seq_len
                room, keys_left = int(free[here]), int(keys[here])
            rows[here].append(number)
            room, keys_left = room - needed, keys_left - length
        free[here], keys[here] = room, keys_left
    return rows


_PADDING = {"input_ids": 0, "positions": 0, "document_ids": -1, "labels": IGNORE}


def build_batch(
    samples: Samples, rows: Sequence[Sequence[int]], first: int, shape: PackShape, items: Sequence[Item], width: int
) -> Batch:
    """A micro-batch of samples: ``input_ids, positions, document_ids, labels, sample``, ``episode``, which is
    ``sample`` in the first one of each episode and else -1, and ``place``, the number of each label among the rollout's
    targets, int64 [B, S = width]; if samples share prompts ``prefix_ids``, int64 [B, S], see
    `attention_layout`; under routing replay ``routes``, none where the rollout has none; for prediction layers
    ``mtp_input_ids`` and ``mtp_labels``, int64 [B, K, S], with labels where the main model has one and the token that
    depth k predicts is a target, too.

    Args:
        rows: numbers of samples in the step.
        first: number in the rollout of the step's first sample.
        items: of the step.
        width: tokens of a row: ``shape.seq_len``, or those that `join` says.
    """
    fill = _PADDING | {"sample": -1, "episode": -1, "place": -1} | ({"prefix_ids": -1} if shape.shares_prompts else {})
    arrays = {name: np.full((len(rows), width), value) for name, value in fill.items()}
    depths = range(1, shape.mtp_depth + 1)
    if shape.model is not None:
        arrays["routes"] = no_routes(arrays["labels"].shape, shape.model).numpy()
    for name in ("input_ids", "labels") if depths else ():
        arrays[f"mtp_{name}"] = np.full((len(rows), width, len(depths)), fill[name])
    documents = np.array([
        (row, document, sample, begin, end, -1 if prefix is None else prefix)
        for row, of_row in enumerate(rows)
        for document, (sample, begin, end, prefix) in enumerate(_documents(of_row, items))
    ], np.int64).reshape(-1, 6)  # fmt: skip
    lengths = documents[:, 4] - documents[:, 3]
    row, document, sample, begin, _, prefix = documents.repeat(lengths, 0).T
    token = np.arange(len(row))
    position = begin + token - (lengths.cumsum() - lengths).repeat(lengths)
    number = first + sample
    last = samples.ends[number] - 1
    here = samples.ends[number] - samples.lengths[number] + position  # index among all tokens of the rollout

    def ahead(count: int, values: np.ndarray, none: int | None = None) -> np.ndarray:
        """Values of the tokens so far behind each token; behind the last one of a sample none, or those of this."""
        found = values[np.minimum(here + count, last)]
        return found if none is None else np.where(here + count > last, none, found)

    place, targets = ahead(1, samples.places, -1), np.where(samples.targets >= 0, samples.targets, IGNORE)
    is_first = np.diff(samples.episode, prepend=-1) != 0
    found = {
        "input_ids": samples.tokens[here], "positions": position, "document_ids": document, "prefix_ids": prefix,
        "labels": ahead(1, targets, IGNORE), "place": place, "sample": np.where(place >= 0, sample, -1),
        "episode": np.where((place >= 0) & is_first[number], sample, -1),
    }  # fmt: skip
    if samples.routes is not None:  # one fewer of each sample than tokens
        found["routes"] = samples.routes[here - number]
    if depths:
        found["mtp_input_ids"] = np.stack([ahead(depth, samples.tokens) for depth in depths], 1)
        # As the main model at these places, so that the loss does not depend on who shares a prompt.
        of_depths = [np.where(place >= 0, ahead(depth + 1, targets, IGNORE), IGNORE) for depth in depths]
        found["mtp_labels"] = np.stack(of_depths, 1)
    for name in arrays.keys() & found.keys():
        arrays[name][row, token - np.searchsorted(row, row)] = found[name]
    batch: Any = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return batch | {name: batch[name].transpose(1, 2).contiguous() for name in batch if name.startswith("mtp_")}


def _documents(samples: Sequence[int], items: Sequence[Item]) -> Iterator[tuple[int, int, int, int | None]]:
    """The documents of a row: a sample, the range of its tokens, and the number of the document before them."""
    document = 0
    for _, group in groupby(samples, key=lambda number: items[number].prompt):
        of_prompt = list(group)
        shared = items[of_prompt[0]].shared
        if len(of_prompt) == 1:
            yield of_prompt[0], 0, items[of_prompt[0]].length, None
            document += 1
            continue
        yield of_prompt[0], 0, shared, None
        for sample in of_prompt:
            yield sample, shared, items[sample].length, document
        document += 1 + len(of_prompt)


def fields_of(batch: Batch) -> Mapping[str, Tensor]:
    """A batch with the fields that are not of every task."""
    fields: Mapping[str, Any] = batch
    return fields


def spread(values: Tensor, batch: Batch) -> Tensor:
    """Values of all targets of a rollout, FP32 [G], at their labels in a batch: FP32 [B, S], 0 elsewhere."""
    return torch.cat([values, values.new_zeros(1)])[fields_of(batch)["place"]]  # -1 is the last one


def collect(values: Tensor, batch: Batch, into: Tensor) -> None:
    """The inverse of `spread`: write the values of a batch's labels, FP32 [B, S], into those of the rollout."""
    place = fields_of(batch)["place"]
    into[place[place >= 0]] = values[place >= 0].to(into.dtype)
