"""Tensor parallelism with sequence parallelism: each rank of a group holds a part of every matrix, and between the
matrices a part of every sequence.

Attention and feed-forward networks gather the sequence, multiply by a first half of matrices split by outputs and by a
second half split by inputs, and reduce-scatter the results back to parts of the sequence. Norms, the router and the
routed experts see this rank's tokens only, as under data parallelism. Embedding and output head are split by the
vocabulary: no rank ever holds all logits.

Beyond the number of key heads, each rank stores and multiplies an equal part of the rows of one head's key and value
projection, and the ranks of this head gather its keys and values. So no weight exists twice: checkpoints, Muon and the
gradient norm see matrices split by rows, as for fewer ranks.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from glm46 import compat
from glm46.compute.distributed.collectives import gather_sequence, scatter_sum, sum_over_ranks, whole_sequence
from glm46.compute.distributed.groups import group_of_partition
from glm46.compute.model.attention import Attention
from glm46.compute.model.cross_entropy import HeadForm, HeadOutput, VocabularyPart, summed_loss
from glm46.compute.model.experts import Experts
from glm46.compute.model.index_loss import HeadShare
from glm46.compute.model.latent_attention import LatentAttention
from glm46.compute.model.layers import FeedForward, local_weight
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import Router, RoutingOptions
from glm46.compute.model.sparse_attention import SparseLatentAttention, SparseState
from glm46.compute.model.transformer import OutputHead, Transformer, ValueHead
from glm46.run.parameters import find_parameter

_Output = TypeVar("_Output")


def apply(model: Transformer, mesh: DeviceMesh) -> None:
    """Split all matrices except the routed experts over `mesh`, and gather and scatter the sequence around them; in
    place."""
    group = mesh.get_group()
    ranks_per_key_head = mesh.size() // model.shape.num_key_value_heads
    head_group = _ranks_of_head(group, ranks_per_key_head) if ranks_per_key_head > 1 else None
    for name, module in model.named_modules():
        replaced: Any = module
        if not isinstance(module, Experts):
            _split_parameters(module, f"{name}." if name else "", mesh)
        if isinstance(module, Attention | LatentAttention | FeedForward):
            is_sparse = isinstance(module, SparseLatentAttention)
            on_whole: Callable[..., Any] = _choosing_on_whole_sequences if is_sparse else _on_whole_sequences
            replaced.forward = on_whole(module.forward, group)
            if is_sparse:
                # The loss of an indexer needs the attention of all heads, and each rank computes it for other queries:
                # so the gradients of an indexer are partial sums, as those of norms are.
                replaced.head_share = HeadShare(dist.get_rank(group), mesh.size(), group.group_name)
            if isinstance(module, Attention) and head_group is not None:
                projections: tuple[Any, ...] = (module.k_proj, module.v_proj)
                for projection in projections:
                    projection.forward = _gathering_head(projection.forward, head_group)
        elif isinstance(module, MoE):
            replaced.forward = _with_own_padding(module.forward, group)
        elif isinstance(module, Router):
            module.sum_over_ranks = _sum_also_over(module.sum_over_ranks, group)
        elif isinstance(module, nn.Embedding):
            replaced.forward = vocabulary_parallel_lookup(module, group)
        elif isinstance(module, OutputHead):
            replaced.forward = vocabulary_parallel_head(module, group)
        elif isinstance(module, ValueHead):
            replaced.forward = _with_whole_output(module.forward, group)


def _split_parameters(module: nn.Module, prefix: str, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        dim = find_parameter(prefix + key).tensor_dim
        placement = Replicate() if dim is None else Shard(dim)
        part = distribute_tensor(parameter.data, mesh, [placement])
        module.register_parameter(key, nn.Parameter(part, requires_grad=parameter.requires_grad))


@lru_cache(maxsize=1)  # one for all layers and networks of a job
def _ranks_of_head(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:  # noqa: ARG001 - a key of the cache
    """Return the group of those consecutive ranks of a tensor-parallel group that share this rank's key head.
    Collective over all ranks."""
    return group_of_partition(torch.arange(dist.get_world_size()).view(-1, size))


# The following functions take the forward of a module and return its replacement.


def _on_whole_sequences(forward: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def on_whole_sequences(x: Tensor, *arguments: object) -> Tensor:
        return scatter_sum(forward(gather_sequence(x, group), *arguments), group)

    return on_whole_sequences


def _choosing_on_whole_sequences(
    forward: Callable[..., tuple[Tensor, SparseState]], group: dist.ProcessGroup
) -> Callable[..., tuple[Tensor, SparseState]]:
    # Indexers are not split: every rank makes the choice of all tokens, from the same numbers.
    def on_whole_sequences(x: Tensor, *arguments: object, **options: object) -> tuple[Tensor, SparseState]:
        out, state = forward(gather_sequence(x, group), *arguments, **options)
        return scatter_sum(out, group), state

    return on_whole_sequences


def _gathering_head(forward: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    # `gather_sequence` joins dimension 1, here the features of [tokens, features]. Its backward sums the gradients that
    # the queries of each rank give.
    def gather_head(x: Tensor) -> Tensor:
        part = forward(x)
        whole: Tensor = gather_sequence(part.flatten(0, 1), group).unflatten(0, part.shape[:2])
        return whole

    return gather_head


def _with_own_padding(forward: Callable[..., _Output], group: dist.ProcessGroup) -> Callable[..., _Output]:
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)

    def local_part(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else whole.chunk(ranks, dim=1)[rank]

    def with_own_padding(
        x: Tensor, is_real: Tensor | None, options: RoutingOptions, routes: Tensor | None = None
    ) -> _Output:
        return forward(x, local_part(is_real), options, local_part(routes))

    return with_own_padding


def _with_whole_output(forward: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    return lambda x: whole_sequence(forward(x), group)


def _sum_also_over(sum_over_others: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    return lambda x: sum_over_ranks(sum_over_others(x), group)


def vocabulary_parallel_lookup(embedding: nn.Embedding, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return the forward of an embedding split by rows: ids int64 [B, S], equal on all ranks, to this rank's [B, s,
    D]."""
    rank = dist.get_rank(group)

    def lookup(ids: Tensor) -> Tensor:
        weight = local_weight(embedding.weight)
        row = ids - rank * weight.shape[0]
        is_local = (row >= 0) & (row < weight.shape[0])
        embedded = F.embedding(row.where(is_local, 0), weight) * is_local.unsqueeze(-1)
        return scatter_sum(embedded, group)

    return lookup


def vocabulary_parallel_head(head: OutputHead, group: dist.ProcessGroup) -> Callable[..., Tensor | HeadOutput]:
    """Return the forward of a head split by rows. It takes this rank's part of the sequence and labels of the whole
    sequence; see `summed_loss` and `token_logprobs` for its output."""

    def gather(x: Tensor) -> Tensor:
        out = x.new_empty(part.ranks, *x.shape)
        compat.gather_rows(out, x.unsqueeze(0), group)
        return out

    part = VocabularyPart(dist.get_rank(group), dist.get_world_size(group), gather)

    def forward(hidden: Tensor, labels: Tensor | None = None, form: HeadForm = summed_loss) -> Tensor | HeadOutput:
        whole = gather_sequence(hidden, group)
        weight = local_weight(head.weight)
        if labels is None:
            return gather_sequence(head.product(whole, weight, None).transpose(1, 2), group).transpose(1, 2)
        return form(whole, weight, labels, part)

    return forward
