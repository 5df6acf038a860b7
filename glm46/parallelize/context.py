"""Context parallelism: each rank computes a part of every sequence, and attention gathers all keys and values.

GLM has few key and value heads, so gathering them is cheap compared with attention itself. Queries and all other
activations stay on their rank.
"""

from typing import Any

import torch
from torch import Tensor

from glm46.distributed.collectives import gather_sequence, sum_over_ranks
from glm46.distributed.sequence import SequenceShard
from glm46.model.attention import Attention, AttentionCore
from glm46.model.attention_layout import AttentionLayout, attention_layout
from glm46.model.router import Router
from glm46.model.transformer import Transformer


def apply(model: Transformer, shard: SequenceShard) -> None:
    """Make attention gather the keys and values of all ranks, and routers sum over them, in place."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = _gathering(module.core, shard)
        elif isinstance(module, Router):
            module.sum_over_ranks = torch.compiler.disable(lambda x: sum_over_ranks(x, shard.group))


def take_part(
    rows: dict[str, Tensor], document_ids: Tensor | None, window: int | None, shard: SequenceShard | None
) -> dict[str, Any]:
    """This rank's part of whole rows, on the CPU, and their `layout` if there is one; arguments of the model.

    Args:
        rows: [B, S] or [B, K, S], ``input_ids`` among them.
        document_ids: [B, S]; None to attend across documents.
        window: of the model.
        shard: None without context parallelism.
    """
    size = tuple(rows["input_ids"].shape)
    if shard is None:
        layout = attention_layout(document_ids, size, window)
        return rows if layout is None else rows | {"layout": layout}
    places = shard.places(document_ids, size, window)
    return shard.cut(rows, places) | {"layout": attention_layout(document_ids, size, window, places, shard.rank)}


def _gathering(core: AttentionCore, shard: SequenceShard) -> AttentionCore:
    # As one row: the parts of several rows would be copied into the order of the rows, and again into that of the runs.
    gather = torch.compiler.disable(lambda x: gather_sequence(x.flatten(0, 1).unsqueeze(0), shard.group))

    def gathering_core(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return core(q, gather(k), gather(v), layout)

    return gathering_core
