"""Context parallelism: each rank computes a part of every sequence, and attention gathers all keys and values.

GLM has few key and value heads, so gathering them is cheap compared with attention itself. Queries and all other
activations stay on their rank.
"""

import torch
from torch import Tensor

from glm46.distributed.collectives import gather_sequence, sum_over_ranks
from glm46.distributed.sequence import SequenceShard
from glm46.model.attention import Attention, AttentionCore
from glm46.model.router import Router
from glm46.model.transformer import Transformer


def apply(model: Transformer, shard: SequenceShard) -> None:
    """Make attention gather the whole sequence and routers sum over it, in place."""
    model.build_mask = lambda *arguments: _mask(shard, *arguments)
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = _gathering(module.core, shard)
        elif isinstance(module, Router):
            module.sum_over_ranks = torch.compiler.disable(lambda x: sum_over_ranks(x, shard.group))


def _gathering(core: AttentionCore, shard: SequenceShard) -> AttentionCore:
    gather = torch.compiler.disable(lambda x: gather_sequence(x, shard.group))

    def gathering_core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return core(q, gather(k), gather(v), mask)

    return gathering_core


def _mask(shard: SequenceShard, document_ids: Tensor | None, positions: Tensor, sliding_window: int | None) -> Tensor:
    """`attention_mask` for this rank's queries (rows) and the gathered keys (columns, in rank order)."""
    if document_ids is None:
        # Not from the positions, which are undefined for padding without document masks.
        places = [part.to(positions.device) for part in shard.places(positions.shape[1] * shard.ranks, sliding_window)]
        queries, keys = places[shard.rank][None, :, None], torch.cat(places)[None, None]
        mask = queries >= keys
    else:
        # The documents decide which tokens a rank holds; within a document positions give the order.
        here = torch.stack([document_ids, positions], dim=-1).to(torch.int32)
        of_key, keys = gather_sequence(here, shard.group).unsqueeze(1).unbind(-1)
        of_query, queries = here.unsqueeze(2).unbind(-1)
        mask = (of_query == of_key).logical_and_(queries >= keys)
    if sliding_window is not None:
        mask &= queries - sliding_window < keys
    return mask.unsqueeze(1)
