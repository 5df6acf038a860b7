"""Context parallelism: each rank computes a part of every sequence, and attention gathers all keys and values.

GLM has few key and value heads, so gathering them is cheap compared with attention itself. Under a sliding window the
ranks exchange only the keys that are seen; where all keys would take too much memory, they pass from rank to rank.
Queries and all other activations stay on their rank.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from glm46 import compat
from glm46.compat import uncompiled
from glm46.compute.distributed.collectives import exchange_rows, gather_sequence, sum_over_ranks
from glm46.compute.distributed.sequence import SequenceShard
from glm46.compute.model.attention import Attention
from glm46.compute.model.attention_layout import AttentionLayout, KeyExchange, KeyRing, attention_layout
from glm46.compute.model.latent_attention import LatentAttention
from glm46.compute.model.router import Router
from glm46.compute.model.sparse_attention import GatherKeys, SparseLatentAttention
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.ring import ring_attention


def apply(model: Transformer, shard: SequenceShard) -> None:
    """Make attention gather the keys and values of all ranks, and routers sum over them, in place."""
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core = _gathering(module.core, shard)
            if isinstance(module, SparseLatentAttention):
                module.gather_keys = _gather_keys(shard)
        elif isinstance(module, Router):
            module.sum_over_ranks = lambda x: sum_over_ranks(x, shard.group)


def take_part(
    rows: dict[str, Tensor],
    document_ids: Tensor | None,
    window: int | None,
    shard: SequenceShard | None,
    *,
    ring: bool = False,
    prefix_ids: Tensor | None = None,
) -> dict[str, Any]:
    """Return this rank's part of whole rows, on the CPU, with their `layout` if there is one: arguments of the model.

    Args:
        rows: [B, S], [B, K, S] or [B, S, L, A], ``input_ids`` among them.
        document_ids: [B, S]; None to attend across documents.
        window: sliding window of the model.
        shard: None without context parallelism.
        ring, prefix_ids: see `attention_layout`.
    """
    size = rows["input_ids"].shape
    if shard is None:
        layout = attention_layout(document_ids, size, window, prefix_ids=prefix_ids)
        return rows if layout is None else rows | {"layout": layout}
    assert prefix_ids is None
    places = shard.places(document_ids, size, window)
    layout = attention_layout(document_ids, size, window, places, shard.rank, ring=ring)
    return shard.cut(rows, places) | {"layout": layout}


def _gather_runs(shard: SequenceShard) -> Callable[[Tensor, KeyExchange], Tensor]:
    """Return a function that makes the keys [1, keys, K, C] of the runs from this rank's part [B, S, K, C]."""

    @uncompiled
    def gather_runs(x: Tensor, exchange: KeyExchange) -> Tensor:
        x = x.flatten(0, 1)
        if exchange.tokens is None:
            # As one row: parts of several rows would be copied into the order of the rows, and again into the runs'.
            gathered = gather_sequence(x.unsqueeze(0), shard.group)[0]
        else:
            gathered = exchange_rows(x.index_select(0, exchange.tokens), exchange.send, exchange.receive, shard.group)
        run_keys = gathered.index_select(0, exchange.keys).unsqueeze(0)
        compat.let_size_vary(run_keys, 1)
        return run_keys

    return gather_runs


def _gather_keys(shard: SequenceShard) -> GatherKeys:
    gather_runs = _gather_runs(shard)

    def gather_keys(x: Tensor, layout: AttentionLayout | None) -> Tensor:
        assert layout is not None and isinstance(layout.exchange, KeyExchange), "see `take_part`"
        return gather_runs(x, layout.exchange).flatten(0, 2)

    return gather_keys


def _gathering(core: Callable[..., Tensor], shard: SequenceShard) -> Callable[..., Tensor]:
    gather_runs = _gather_runs(shard)

    @uncompiled
    def around_the_ring(q: Tensor, k: Tensor, v: Tensor, ring: KeyRing) -> Tensor:
        return ring_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ring, shard.group).view(q.shape)

    def gathering_core(
        q: Tensor, k: Tensor, v: Tensor | Callable[..., Tensor], layout: AttentionLayout | None
    ) -> Tensor:
        assert layout is not None and layout.exchange is not None, "see `take_part`"
        if isinstance(layout.exchange, KeyRing):
            assert isinstance(v, Tensor), "latent attention has no ring"
            return around_the_ring(q, k, v, layout.exchange)
        if callable(v):  # latent attention: rows are gathered, and expanded after it
            return core(q, gather_runs(k, layout.exchange), v, layout._replace(exchange=None))
        # Each call frees its gathered tensor, so that those of keys and values do not exist at the same time.
        return core(q, gather_runs(k, layout.exchange), gather_runs(v, layout.exchange), layout._replace(exchange=None))

    return gathering_core
