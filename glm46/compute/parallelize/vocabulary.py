"""Embedding and output head when each rank of a group holds a part of the vocabulary: no rank ever has all logits."""

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from glm46 import compat
from glm46.compute.distributed.collectives import gather_sequence, scatter_sum
from glm46.compute.model.cross_entropy import HeadForm, VocabularyPart, summed_loss
from glm46.compute.model.layers import local_weight
from glm46.compute.model.transformer import OutputHead


def vocabulary_parallel_lookup(embedding: nn.Embedding, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Forward of an embedding split by rows: ids int64 [B, S], equal on all ranks, to this rank's [B, s, D]."""
    rank = dist.get_rank(group)

    def lookup(ids: Tensor) -> Tensor:
        weight = local_weight(embedding.weight)
        row = ids - rank * weight.shape[0]
        is_local = (row >= 0) & (row < weight.shape[0])
        found = F.embedding(row.where(is_local, 0), weight) * is_local.unsqueeze(-1)
        return scatter_sum(found, group)

    return lookup


def vocabulary_parallel_head(head: OutputHead, group: dist.ProcessGroup) -> Callable:
    """Forward of a head split by rows. It takes this rank's part of the sequence and labels of the whole sequence; see
    `summed_loss` and `token_logprobs` for its output."""

    def gather(x: Tensor) -> Tensor:
        out = x.new_empty(part.ranks, *x.shape)
        compat.gather_rows(out, x.unsqueeze(0), group)
        return out

    part = VocabularyPart(dist.get_rank(group), dist.get_world_size(group), gather)

    def forward(hidden: Tensor, labels: Tensor | None = None, form: HeadForm = summed_loss):
        whole, weight = gather_sequence(hidden, group), local_weight(head.weight)
        if labels is None:
            return gather_sequence(head.product(whole, weight, None).transpose(1, 2), group).transpose(1, 2)
        return form(whole, weight, labels, part)

    return forward
