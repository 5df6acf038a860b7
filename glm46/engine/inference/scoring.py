"""Log-probabilities of continuations after contexts. Requests that begin with the same tokens share their computation.

The requests of a batch are a tree of tokens: the first call of the decoder computes what families of requests have in
common, and each further call goes on from copies of the keys and values of the call before. A multiple-choice question
is so read once for all its answers, and the examples before the questions once for all questions of a batch.
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
"""Fewest tokens that are worth a call of their own."""

MOST_SLOTS = 16384
"""Most slots of a cache: rows of a batch, each as long as the longest one. One longer row is a batch of its own."""


class ContinuationRequest(NamedTuple):
    """A question: the log-probability of a continuation after a context."""

    context: tuple[int, ...]
    """Token ids, at least one."""
    continuation: tuple[int, ...]
    """Token ids, at least one."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """The tokens that the model reads."""
        return (*self.context, *self.continuation)[:-1]


class ContinuationScore(NamedTuple):
    """The answer to a `ContinuationRequest`."""

    logprob: float
    """In nats, summed over the continuation."""
    is_greedy: bool
    """True if each token of the continuation is the most likely one."""


@dataclass
class _Sequence:
    """Tokens that the model reads, and the requests, by number, that they answer."""

    inputs: tuple[int, ...]
    requests: list[int]


@dataclass
class _Node:
    """A row of a call of the decoder."""

    start: int
    tokens: tuple[int, ...]
    parent: int
    """Its row in the call before."""
    requests: list[int]
    """Those that read these tokens."""


@torch.inference_mode()
def score(
    model: Transformer,
    mesh: ModelMesh,
    requests: Sequence[ContinuationRequest],
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[list[tuple[int, ContinuationScore]]]:
    """Score requests in batches, the longest first. Collective over all ranks, which pass equal requests.

    Args:
        model: on a mesh this rank's part.
        advance: called with the number of tokens of the requests just answered.

    Yields:
        Numbers of requests and their scores, the same on all ranks.
    """
    batches, replicas = [*_batches(requests)], mesh.layout.dp_degree
    for first in range(0, len(batches), replicas):
        of_replicas = batches[first : first + replicas]
        calls = max(len(_calls(batch)) for batch in of_replicas)
        mine = of_replicas[mesh.row_group] if mesh.row_group < len(of_replicas) else []
        found = torch.zeros(len(requests), 2, dtype=torch.float64)
        _add_scores(found, model, mesh, requests, _calls(mine), calls)
        if mesh.layout.world_size > 1:
            dist.all_reduce(found)
        numbers = [number for batch in of_replicas for one in batch for number in one.requests]
        yield [(number, ContinuationScore(found[number, 0].item(), found[number, 1].item() == 0)) for number in numbers]
        advance(sum(len(requests[number].inputs) for number in numbers))


def _batches(requests: Sequence[ContinuationRequest]) -> Iterator[list[_Sequence]]:
    """Sequences that are computed together, the longest first; those that begin alike are neighbours."""
    by_inputs: dict[tuple[int, ...], _Sequence] = {}
    for number, request in enumerate(requests):
        by_inputs.setdefault(request.inputs, _Sequence(request.inputs, [])).requests.append(number)
    parts = []
    for family in _families(sorted(by_inputs.values(), key=lambda one: one.inputs), 0):
        rows = max(1, MOST_SLOTS // max(len(one.inputs) for one in family))
        parts += [family[first : first + rows] for first in range(0, len(family), rows)]
    batch: list[_Sequence] = []
    longest = 0
    for length, part in sorted(((max(len(one.inputs) for one in part), part) for part in parts), key=lambda of: -of[0]):
        if batch and (len(batch) + len(part)) * longest > MOST_SLOTS:
            yield batch
            batch = []
        longest = longest if batch else length
        batch += part
    if batch:
        yield batch


def _families(members: Sequence[_Sequence], start: int) -> Iterator[list[_Sequence]]:
    """Divide sorted sequences that agree up to ``start`` where neighbours share too few further tokens."""
    family = list(members[:1])
    for one, other in pairwise(members):
        if _agreement(one.inputs, other.inputs) - start < _LEAST_SHARED:
            yield family
            family = []
        family.append(other)
    if family:
        yield family


def _agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of first tokens that are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _calls(batch: Sequence[_Sequence]) -> list[list[_Node]]:
    """The rows of each call of the decoder."""
    calls: list[list[_Node]] = []

    def place(members: Sequence[_Sequence], start: int, call: int, parent: int) -> None:
        for family in _families(members, start):
            end = _agreement(family[0].inputs, family[-1].inputs)  # the least of a sorted family
            if end == start:  # these tokens are those of a node before
                continue
            calls.extend([] for _ in range(call + 1 - len(calls)))
            tokens, numbers = family[0].inputs[start:end], [number for one in family for number in one.requests]
            calls[call].append(_Node(start, tokens, parent, numbers))
            if len(family) > 1:
                place(family, end, call + 1, len(calls[call]) - 1)

    place(sorted(batch, key=lambda one: one.inputs), 0, 0, 0)
    return calls


def _add_scores(
    found: Tensor,
    model: Transformer,
    mesh: ModelMesh,
    requests: Sequence[ContinuationRequest],
    calls: list[list[_Node]],
    most: int,
) -> None:
    """Add the log-probabilities of a batch and the number of tokens that are not the most likely ones.

    Args:
        found: FP64 [requests, 2], on the first rank with the head among those with the same rows.
        most: calls of the ranks in step.
    """
    ends = [max(node.start for node in call) + max(len(node.tokens) for node in call) for call in calls]
    rows = max(map(len, calls), default=1)
    # The kernels for few tokens copy the weights, which is slow for each batch.
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
                    found[:, 0].index_add_(0, owners, logprobs.double().cpu())
                    found[:, 1].index_add_(0, owners, (predictions.cpu() != labels).double())
        for _ in range(most - len(calls)):
            decoder.idle()


def _targets(
    nodes: Sequence[_Node], requests: Sequence[ContinuationRequest], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of all tokens of continuations that follow tokens of a call: the place of the token before, counted over the rows
    of ``width`` tokens, the token, and the number of its request; int64 on the CPU."""
    places, labels, owners = list[int](), list[int](), list[int]()
    for row, node in enumerate(nodes):
        for number in node.requests:
            context, continuation = requests[number]
            first = len(context) - 1
            low, high = max(first, node.start), min(first + len(continuation), node.start + len(node.tokens))
            places += range(row * width + low - node.start, row * width + high - node.start)
            labels += continuation[low - first : max(high - first, 0)]
            owners += [number] * max(high - low, 0)
    found = torch.tensor([places, labels, owners], dtype=torch.int64)
    return found[0], found[1], found[2]


def _head(model: Transformer, mesh: ModelMesh, hidden: Tensor, places: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels [N] and the most likely tokens [N] at places of hidden states [B, S, D]."""
    chosen = hidden.reshape(1, -1, hidden.shape[-1])[:, places.to(hidden.device)]
    padding = mesh.padded(len(labels)) - len(labels)
    padded = F.pad(labels, (0, padding), value=IGNORE).unsqueeze(0).to(hidden.device)
    assert model.lm_head is not None, "the last stage has it"
    output = model.lm_head(mesh.own_tokens(chosen), padded, token_logprobs)
    return output.logprobs[0, : len(labels)], output.predictions[0, : len(labels)]
