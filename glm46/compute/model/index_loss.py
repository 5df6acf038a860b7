"""Loss of an indexer: how far its scores are from the attention that they select keys for.

For each query, the attention of all heads is averaged and taken as a target distribution over keys. The loss is the
divergence KL(target || softmax(index scores)). Source: DeepSeek-V3.2 (technical report, section 2.1); GLM-5 (arXiv
2602.15763, section 2.1). Shape letters as in `indexer.py` and `sparse_attention.py`; n queries of a chunk, M keys that
they are compared with.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glm46.compat import FunctionContext, sum_over_named_group
from glm46.compute.model.indexer import IndexTensors, KeySpans, best_keys, query_chunks

_MAX_ELEMENTS = 2**26
"""Maximum number of elements of a temporary tensor."""


class HeadShare(NamedTuple):
    """Division of attention heads over ranks. All ranks have all queries; each computes the loss of a part of them."""

    rank: int = 0
    ranks: int = 1
    group_name: str = ""
    """Name of the process group of the ranks; empty if heads are not divided."""


class AttentionInputs(NamedTuple):
    """Queries and keys of the heads of this rank, without gradient."""

    q_NHW: Tensor
    """Absorbed queries, see `SparseLatentAttention.absorbed_queries`, times the scale of attention."""
    rows_TW: Tensor


class _Chunk(NamedTuple):
    """Queries and the keys that they are compared with: a range of keys, or the chosen keys of each query."""

    queries: slice
    keys: slice | Tensor
    """int64 [n, M] if keys were chosen."""
    is_visible_nM: Tensor


def index_loss(
    index: IndexTensors,
    attention: AttentionInputs,
    spans: KeySpans,
    chosen_NK: Tensor | None,
    is_real_N: Tensor | None,
    top_k: int,
    heads: HeadShare = HeadShare(),  # noqa: B008 - a tuple
) -> Tensor:
    """Compute the loss of an indexer for the attention of one layer. Collective if heads are divided.

    Only `index` gets a gradient.

    Args:
        index: index tensors of the queries, with all keys of `attention`.
        chosen_NK: see `choose_keys`; target and scores are those of the chosen keys. None: of all visible keys.
        is_real_N: bool, false for padding, which is not counted. None: there is none.
        top_k: number of keys that an indexer chooses.

    Returns:
        FP32 [2]: the loss summed over real queries, with a gradient; and, if `chosen_NK` is None, the sum of the target
        on the ``top_k`` best keys, without gradient, else 0. With divided heads, the sums over this rank's queries.
    """
    if is_real_N is None:
        is_real_N = torch.ones_like(spans.first_N, dtype=torch.bool)
    queries = [spans.first_N, spans.end_N, is_real_N]
    counts = [spans.queries_per_row, top_k, heads.rank, heads.ranks]
    results: tuple[Tensor, ...] = index_loss_operator(
        *index, list(attention), queries, chosen_NK, counts, heads.group_name
    )
    return results[0]


def _chunks(
    attention: AttentionInputs, index: IndexTensors, spans: KeySpans, chosen_NK: Tensor | None
) -> Iterator[_Chunk]:
    heads = max(attention.q_NHW.shape[1], index.q_NGJ.shape[1])
    if chosen_NK is None:
        return _chunks_of_visible(spans, len(attention.rows_TW), heads)
    return _chunks_of_chosen(chosen_NK, max(heads, attention.rows_TW.shape[1]))


def _chunks_of_visible(spans: KeySpans, num_keys: int, elements_per_pair: int) -> Iterator[_Chunk]:
    size = max(1, _MAX_ELEMENTS // (elements_per_pair * (spans.queries_per_row or num_keys)))
    for queries, keys in query_chunks(len(spans.first_N), num_keys, spans.queries_per_row, size):
        key = torch.arange(keys.start, keys.stop, device=spans.first_N.device)
        yield _Chunk(queries, keys, (key >= spans.first_N[queries, None]) & (key < spans.end_N[queries, None]))


def _chunks_of_chosen(chosen_NK: Tensor, elements_per_pair: int) -> Iterator[_Chunk]:
    N, K = chosen_NK.shape
    size = max(1, _MAX_ELEMENTS // (elements_per_pair * K))
    for start in range(0, N, size):
        chosen = chosen_NK[start : start + size]
        yield _Chunk(slice(start, start + len(chosen)), chosen.clamp(min=0).long(), chosen >= 0)


def _share_of(chunk: _Chunk, rank: int, ranks: int) -> tuple[_Chunk, slice]:
    """Return the part of a chunk that this rank computes the loss of, and its place in the chunk."""
    size = len(chunk.is_visible_nM)
    part = slice(rank * size // ranks, (rank + 1) * size // ranks)
    start = chunk.queries.start
    keys = chunk.keys if isinstance(chunk.keys, slice) else chunk.keys[part]
    return _Chunk(slice(start + part.start, start + part.stop), keys, chunk.is_visible_nM[part]), part


def _products(queries_nXY: Tensor, keys: Tensor) -> Tensor:
    """Multiply queries with shared keys [M, Y], or with their own [n, M, Y]. Returns [n, X, M]."""
    return queries_nXY @ keys.mT


def _target(attention: AttentionInputs, chunk: _Chunk) -> Tensor:
    """Sum the attention of this rank's heads, FP32 [n, M]."""
    scores_nHM = _products(attention.q_NHW[chunk.queries], attention.rows_TW[chunk.keys]).float()
    return scores_nHM.masked_fill_(~chunk.is_visible_nM.unsqueeze(1), float("-inf")).softmax(-1).sum(1)


class _Totals(NamedTuple):
    """Sums over the chunks."""

    losses: Tensor
    """Result of `index_loss`."""
    grad_q_NGJ: Tensor
    grad_k_TJ: Tensor
    """FP32: a key gets a part of its gradient from each of its queries."""
    grad_weights_NG: Tensor

    def add(self, index: IndexTensors, chunk: _Chunk, target_nM: Tensor, is_real_N: Tensor, top_k: int) -> None:
        """Add the loss of a chunk and its derivatives, in place. ``target_nM``: each row has the sum 1."""
        q_nGJ = index.q_NGJ[chunk.queries].float()
        k = index.k_TJ[chunk.keys].float()
        weights_nG = index.weights_NG[chunk.queries]
        scale = q_nGJ.shape[-1] ** -0.5
        active_nGM = _products(q_nGJ, k).mul_(scale).relu_()
        scores_nM = torch.bmm(weights_nG.unsqueeze(1), active_nGM).squeeze(1)
        scores_nM.masked_fill_(~chunk.is_visible_nM, float("-inf"))

        log_share_nM = scores_nM.log_softmax(-1).masked_fill(~chunk.is_visible_nM, 0.0)
        divergence_n = (torch.special.xlogy(target_nM, target_nM) - target_nM * log_share_nM).sum(-1)
        grad_scores_nM = scores_nM.softmax(-1) - target_nM
        is_real_n = is_real_N[chunk.queries]
        grad_scores_nM = grad_scores_nM * is_real_n.unsqueeze(1)
        self.losses[0] += (divergence_n * is_real_n).sum()

        self.grad_weights_NG[chunk.queries] = torch.bmm(active_nGM, grad_scores_nM.unsqueeze(-1)).squeeze(-1)
        grad_products = grad_scores_nM.unsqueeze(1) * weights_nG.unsqueeze(-1) * (active_nGM > 0) * scale
        self.grad_q_NGJ[chunk.queries] = (grad_products @ k).to(self.grad_q_NGJ.dtype)
        if isinstance(chunk.keys, slice):
            self.grad_k_TJ[chunk.keys] += grad_products.flatten(0, 1).t() @ q_nGJ.flatten(0, 1)
            best_nK = best_keys(scores_nM, min(top_k, scores_nM.shape[1]))
            self.losses[1] += (target_nM.gather(1, best_nK).sum(1) * is_real_n).sum()
        else:
            self.grad_k_TJ.index_add_(0, chunk.keys.flatten(), (grad_products.mT @ q_nGJ).flatten(0, 1))


def _sum_over_heads(target_nM: Tensor, group_name: str) -> Tensor:
    return sum_over_named_group(target_nM, group_name) if group_name else target_nM


@torch.library.custom_op("glm46::index_loss", mutates_args=())
def index_loss_operator(
    q_NGJ: Tensor,
    k_TJ: Tensor,
    weights_NG: Tensor,
    attention_inputs: Sequence[Tensor],
    queries: Sequence[Tensor],
    chosen_NK: Tensor | None,
    counts: Sequence[int],
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `index_loss`, and its derivatives by the index tensors.

    A custom operator, chunk by chunk, so that no tensor of queries times keys is kept for backward, activation
    checkpointing can keep its results, and compiled layers can contain it.

    Args:
        attention_inputs: `AttentionInputs`.
        queries: first key, end, and ``is_real`` of each query.
        counts: ``queries_per_row`` of `KeySpans`; ``top_k``; rank and ranks of `HeadShare`.
    """
    q_NHW, rows_TW = attention_inputs
    first_N, end_N, is_real_N = queries
    queries_per_row, top_k, rank, ranks = counts
    index = IndexTensors(q_NGJ, k_TJ, weights_NG)
    attention = AttentionInputs(q_NHW, rows_TW)
    spans = KeySpans(first_N, end_N, queries_per_row)
    totals = _Totals(
        torch.zeros(2, dtype=torch.float32, device=q_NGJ.device),
        torch.zeros_like(q_NGJ),
        torch.zeros_like(k_TJ, dtype=torch.float32),
        torch.zeros_like(weights_NG),
    )
    for whole_chunk in _chunks(attention, index, spans, chosen_NK):
        target_nM = _sum_over_heads(_target(attention, whole_chunk), group_name)
        chunk, part = _share_of(whole_chunk, rank, ranks)
        target_nM = target_nM[part] / target_nM[part].sum(-1, keepdim=True)
        totals.add(index, chunk, target_nM, is_real_N, top_k)
    return totals.losses, totals.grad_q_NGJ, totals.grad_k_TJ.to(k_TJ.dtype), totals.grad_weights_NG


@index_loss_operator.register_fake
def _(q_NGJ: Tensor, k_TJ: Tensor, weights_NG: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses = weights_NG.new_empty(2)
    return losses, torch.empty_like(q_NGJ), torch.empty_like(k_TJ), torch.empty_like(weights_NG)


def _save(ctx: FunctionContext, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])


def _gradients(ctx: FunctionContext, grad_losses: Tensor, *_: object) -> tuple[Tensor | list[None] | None, ...]:
    gradients = [gradient * grad_losses[0].to(gradient.dtype) for gradient in ctx.saved_tensors]
    return *gradients, [None] * 2, [None] * 3, None, None, None  # a list for a list of tensors


index_loss_operator.register_autograd(_gradients, setup_context=_save)
