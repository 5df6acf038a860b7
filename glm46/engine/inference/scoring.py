"""Log-probabilities of continuations after contexts. Requests that begin with the same tokens share their computation.

The requests of a batch form a tree of tokens: the first call of the decoder computes the common prefixes of families of
requests, and each further call continues from copies of the keys and values of the previous call. So a multiple-choice
question is read once for all its answers, and the examples before the questions once for all questions of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.model.cross_entropy import IGNORE, token_logprobs
from glm46.compute.model.transformer import Transformer
from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.model_mesh import ModelMesh

_LEAST_SHARED = 16
"""Minimum number of shared tokens that justify a separate call."""

MOST_SLOTS = 16384
"""Maximum slots of a cache (rows of a batch times the longest one). A longer row is a batch of its own."""


class ContinuationRequest(NamedTuple):
    """Request for the log-probability of a continuation after a context."""

    context: tuple[int, ...]
    """Token ids, at least one."""
    continuation: tuple[int, ...]
    """Token ids, at least one."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens that the model reads."""
        return (*self.context, *self.continuation)[:-1]


class ContinuationScore(NamedTuple):
    """Result of a `ContinuationRequest`."""

    logprob: float
    """Log-probability in nats, summed over the continuation."""
    is_greedy: bool
    """True if each token of the continuation is the most likely one."""


@dataclass
class _Sequence:
    """Tokens that the model reads, and the indices of the requests that they answer."""

    inputs: tuple[int, ...]
    requests: list[int]


@dataclass
class _Node:
    """A row of a call of the decoder."""

    start: int
    tokens: tuple[int, ...]
    parent: int
    """Row of the parent in the previous call."""
    requests: list[int]
    """Indices of the requests that read these tokens."""


@torch.inference_mode()
def score(
    model: Transformer,
    mesh: ModelMesh,
    requests: Sequence[ContinuationRequest],
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[list[tuple[int, ContinuationScore]]]:
    """Score requests in batches, the longest first. Collective over all ranks, which pass equal requests.

    Args:
        model: the model; on a mesh, this rank's part.
        advance: called with the number of tokens of the requests just answered.

    Yields:
        Indices of requests and their scores, the same on all ranks.
    """
    batches = [*_batches(requests)]
    replicas = mesh.layout.dp_degree
    for first in range(0, len(batches), replicas):
        replica_batches = batches[first : first + replicas]
        calls = max(len(_calls(batch)) for batch in replica_batches)
        mine = replica_batches[mesh.row_group] if mesh.row_group < len(replica_batches) else []
        totals = torch.zeros(len(requests), 2, dtype=torch.float64)
        _add_scores(totals, model, mesh, requests, _calls(mine), calls)
        if mesh.layout.world_size > 1:
            dist.all_reduce(totals)
        numbers = [number for batch in replica_batches for item in batch for number in item.requests]
        yield [
            (number, ContinuationScore(totals[number, 0].item(), totals[number, 1].item() == 0)) for number in numbers
        ]
        advance(sum(len(requests[number].inputs) for number in numbers))


def _batches(requests: Sequence[ContinuationRequest]) -> Iterator[list[_Sequence]]:
    """Yield sequences that are computed together, the longest first; sequences with a common prefix are neighbours."""
    by_inputs: dict[tuple[int, ...], _Sequence] = {}
    for number, request in enumerate(requests):
        by_inputs.setdefault(request.inputs, _Sequence(request.inputs, [])).requests.append(number)
    parts = []
    for family in _families(sorted(by_inputs.values(), key=lambda item: item.inputs), 0):
        rows = max(1, MOST_SLOTS // max(len(item.inputs) for item in family))
        parts += [family[first : first + rows] for first in range(0, len(family), rows)]
    batch: list[_Sequence] = []
    max_length = 0
    for length, part in sorted(
        ((max(len(item.inputs) for item in part), part) for part in parts), key=lambda entry: -entry[0]
    ):
        if batch and (len(batch) + len(part)) * max_length > MOST_SLOTS:
            yield batch
            batch = []
        max_length = max_length if batch else length
        batch += part
    if batch:
        yield batch


def _families(members: Sequence[_Sequence], start: int) -> Iterator[list[_Sequence]]:
    """Split sorted sequences, which agree up to ``start``, between neighbours that share too few further tokens."""
    family = list(members[:1])
    for member, other in pairwise(members):
        if _agreement(member.inputs, other.inputs) - start < _LEAST_SHARED:
            yield family
            family = []
        family.append(other)
    if family:
        yield family


def _agreement(first: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))


def _calls(batch: Sequence[_Sequence]) -> list[list[_Node]]:
    """Return the rows of each call of the decoder."""
    calls: list[list[_Node]] = []

    def place(members: Sequence[_Sequence], start: int, call: int, parent: int) -> None:
        for family in _families(members, start):
            end = _agreement(family[0].inputs, family[-1].inputs)  # the minimum over a sorted family
            if end == start:  # an earlier node has these tokens
                continue
            calls.extend([] for _ in range(call + 1 - len(calls)))
            tokens = family[0].inputs[start:end]
            numbers = [number for item in family for number in item.requests]
            calls[call].append(_Node(start, tokens, parent, numbers))
            if len(family) > 1:
                place(family, end, call + 1, len(calls[call]) - 1)

    place(sorted(batch, key=lambda item: item.inputs), 0, 0, 0)
    return calls


def _add_scores(
    totals: Tensor,
    model: Transformer,
    mesh: ModelMesh,
    requests: Sequence[ContinuationRequest],
    calls: list[list[_Node]],
    max_calls: int,
) -> None:
    """Add the log-probabilities of a batch and the number of tokens that are not the most likely ones to ``totals``.

    Args:
        totals: FP64 [requests, 2]; only the first rank with the head, among ranks with the same rows, adds to it.
        max_calls: maximum number of calls over the ranks in step.
    """
    ends = [max(node.start for node in call) + max(len(node.tokens) for node in call) for call in calls]
    rows = max(map(len, calls), default=1)
    # Without the kernels for few tokens, which would copy the weights for each batch.
    decoder = Decoder(model, batch=rows, max_length=max(ends, default=1), cpu_kernels=False, mesh=mesh)
    with decoder:
        for nodes in calls:
            if nodes[0].start:
                decoder.copy_rows([node.parent for node in nodes], range(len(nodes)), max(node.start for node in nodes))
            width = max(len(node.tokens) for node in nodes)
            tokens = torch.tensor([(*node.tokens, *[0] * (width - len(node.tokens))) for node in nodes])
            hidden = decoder.hidden(tokens.to(decoder.device), [node.start for node in nodes])
            if hidden is None:
                continue
            places, labels, owners = _targets(nodes, requests, width)
            if len(places):
                logprobs, predictions = _head(model, mesh, hidden, places, labels)
                if mesh.is_source:
                    totals[:, 0].index_add_(0, owners, logprobs.double().cpu())
                    totals[:, 1].index_add_(0, owners, (predictions.cpu() != labels).double())
        for _ in range(max_calls - len(calls)):
            decoder.idle()


def _targets(
    nodes: Sequence[_Node], requests: Sequence[ContinuationRequest], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the labels of a call, the continuation tokens that follow its tokens, in three int64 tensors on the CPU:
    the place of the preceding token, counted over rows of ``width`` tokens, the label, and the index of its request."""
    places = list[int]()
    labels = list[int]()
    owners = list[int]()
    for row, node in enumerate(nodes):
        for number in node.requests:
            context, continuation = requests[number]
            first = len(context) - 1
            low = max(first, node.start)
            high = min(first + len(continuation), node.start + len(node.tokens))
            places += range(row * width + low - node.start, row * width + high - node.start)
            labels += continuation[low - first : max(high - first, 0)]
            owners += [number] * max(high - low, 0)
    targets = torch.tensor([places, labels, owners], dtype=torch.int64)
    return targets[0], targets[1], targets[2]


def _head(model: Transformer, mesh: ModelMesh, hidden: Tensor, places: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of labels [N], and the most likely tokens [N], at places of hidden states [B, S, D]."""
    chosen = hidden.reshape(1, -1, hidden.shape[-1])[:, places.to(hidden.device)]
    padding = mesh.padded(len(labels)) - len(labels)
    padded = F.pad(labels, (0, padding), value=IGNORE).unsqueeze(0).to(hidden.device)
    assert model.lm_head is not None, "the last stage has it"
    output = model.lm_head(mesh.own_tokens(chosen), padded, token_logprobs)
    return output.logprobs[0, : len(labels)], output.predictions[0, : len(labels)]
