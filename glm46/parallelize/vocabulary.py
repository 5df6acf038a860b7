"""Embedding and loss when each rank of a group holds a part of the vocabulary: no rank ever has all logits."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from glm46.distributed.collectives import gather_sequence, scatter_sum
from glm46.model.cross_entropy import chunked_cross_entropy
from glm46.model.layers import local_part
from glm46.model.transformer import OutputHead


def vocabulary_parallel_lookup(embedding: nn.Embedding, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """The forward of an embedding split by rows: ids int64 [B, S], the same on all ranks, to this rank's [B, s, D]."""
    rank = dist.get_rank(group)

    def lookup(ids: Tensor) -> Tensor:
        weight = local_part(embedding.weight)
        row = ids - rank * weight.shape[0]
        is_here = (row >= 0) & (row < weight.shape[0])
        found = F.embedding(row.where(is_here, 0), weight) * is_here.unsqueeze(-1)
        return scatter_sum(found, group)

    return lookup


def vocabulary_parallel_head(head: OutputHead, group: dist.ProcessGroup) -> Callable:
    """The forward of a head split by rows; takes this rank's part of the sequence, and labels of all of it.

    Of the loss each rank returns the sum over its own part of the sequence, so that the ranks add up to the whole. The
    gradients belong to that whole sum: the gathered sequence gets this rank's summand of it.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def forward(hidden: Tensor, labels: Tensor | None = None):
        whole, weight = gather_sequence(hidden, group), local_part(head.weight)
        if labels is None:
            return gather_sequence(F.linear(whole, weight).transpose(1, 2), group).transpose(1, 2)
        is_mine = torch.zeros_like(labels, dtype=torch.bool)
        is_mine.chunk(ranks, dim=1)[rank].fill_(True)
        return chunked_cross_entropy(
            whole, weight, labels, is_counted=is_mine, chunk_losses=partial(_part_chunk_losses, group=group)
        )

    return forward


def _part_chunk_losses(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """`ChunkLosses` of logits over this rank's part of the vocabulary; collective."""
    logits, first = logits.float(), dist.get_rank(group) * logits.shape[1]
    largest_here, place = logits.max(-1)
    largest = largest_here.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # Of several tokens that are equally likely the first one, as one process takes it.
    predicted = (place + first).where(largest_here == largest, torch.iinfo(torch.int64).max)
    dist.all_reduce(predicted, dist.ReduceOp.MIN, group=group)

    column = labels - first
    is_here = (column >= 0) & (column < logits.shape[1])
    column = column.where(is_here, 0).unsqueeze(1)
    logits -= largest.unsqueeze(1)
    of_label = logits.gather(1, column).squeeze(1) * is_here
    logits.exp_()
    sums = torch.stack([logits.sum(-1), of_label])
    dist.all_reduce(sums, group=group)
    total, of_label = sums
    gradient = logits.div_(total.unsqueeze(1))
    gradient.scatter_add_(1, column, -is_here.unsqueeze(1).to(gradient.dtype))
    return total.log() - of_label, predicted, gradient
