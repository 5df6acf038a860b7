"""Context parallelism: each rank computes a part of every sequence, and attention gathers all keys and values.

GLM has few key and value heads, so gathering them is cheap beside what attention computes on them; queries, and all
else in the model, stay where they are.
"""

import torch
from torch import Tensor

from glm46.distributed.collectives import gather_sequence, sum_over_ranks
from glm46.distributed.sequence import SequenceShard
from glm46.model.attention import Attention, AttentionCore
from glm46.model.router import Router
from glm46.model.transformer import Transformer


def apply(model: Transformer, shard: SequenceShard) -> None:
    """Let attention see the whole sequence, and routers sum over it, though this rank holds a part; in place."""
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
    """`attention_mask` of this rank's queries (rows) and the gathered keys (columns, in the order of the ranks)."""
    if document_ids is None:
        # Not from the positions: without document masks those of padding say nothing.
        places = [part.to(positions.device) for part in shard.places(positions.shape[1] * shard.ranks, sliding_window)]
        queries, keys = places[shard.rank][None, :, None], torch.cat(places)[None, None]
        mask = queries >= keys
    else:
        # Which tokens a rank holds depends on the documents, but inside one document positions tell the order.
        here = torch.stack([document_ids, positions], dim=-1).to(torch.int32)
        of_key, keys = gather_sequence(here, shard.group).unsqueeze(1).unbind(-1)
        of_query, queries = here.unsqueeze(2).unbind(-1)
        mask = (of_query == of_key).logical_and_(queries >= keys)
    if sliding_window is not None:
        mask &= queries - sliding_window < keys
    return mask.unsqueeze(1)
