"""Indexer of sparse attention: scores all keys of a query with small heads, and chooses the best of them.

Sources: DeepSeek-V3.2 (technical report, section 2.1); names, shapes and order of the numbers as in `GlmMoeDsa` of
`transformers`. Shape letters: N queries, T keys, D = hidden_size, Q = q_lora_rank, G = index_n_heads, J =
index_head_dim, K = index_topk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm46.compute.model.attention_layout import AttentionLayout
from glm46.compute.model.layers import Linear, local_weight
from glm46.compute.model.rope import rotate_pairs
from glm46.config.model import ModelShape

_NORM_EPS = 1e-6
"""Epsilon of the LayerNorm of index keys: a constant of GLM's code, not `rms_norm_eps`."""

_MAX_SCORES = 2**26
"""Maximum number of products of queries, keys and heads that exist at a time: 256 MB in FP32."""


def is_index_weight(name: str) -> bool:
    """Return whether this is the name of a weight of an indexer."""
    return ".indexer." in name


class IndexTensors(NamedTuple):
    """Output of an indexer for the tokens of a rank."""

    q_NGJ: Tensor
    k_TJ: Tensor
    """Keys of these tokens. Context parallelism and shared prefixes need those of other tokens too."""
    weights_NG: Tensor
    """FP32 weight of each head, which may be negative."""


class KeySpans(NamedTuple):
    """Consecutive keys that each query may attend to."""

    first_N: Tensor
    """int64: first key."""
    end_N: Tensor
    """int64: one past the last key."""
    queries_per_row: int
    """Queries of one row see only keys of this row: query i sees none before ``i - i % queries_per_row``, and none
    after itself. 0: no such bound is known, because keys are in another order than queries."""


def key_spans(layout: AttentionLayout | None, rows: int, length: int, device: torch.device) -> KeySpans:
    """Return the keys of each query of ``rows`` rows of this length, flattened; `AttentionLayout` defines them."""
    query = torch.arange(rows * length, device=device)
    if layout is None:
        return KeySpans(query - query % length, query + 1, length)
    run = torch.searchsorted(layout.cu_seq_q, query, right=True, out_int32=True) - 1
    end_query = layout.cu_seq_q[run + 1].long()
    end = layout.cu_seq_k[run + 1] - (end_query - 1 - query)
    return KeySpans(layout.cu_seq_k[run].long(), end, length if layout.exchange is None else 0)


class LayerNorm(nn.Module):
    """Layer norm over the last dimension, with statistics in FP32 and a bias."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape [..., dim]; same shape and dtype."""
        weight = local_weight(self.weight)
        bias = local_weight(self.bias)
        return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), self.eps).to(x.dtype)


class Indexer(nn.Module):
    """Projections to index queries, one index key per token, and the weights of the index heads.

    The inputs are detached: an indexer learns from a loss of its own, and gives the rest of the model no gradient.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        assert shape.q_lora_rank and shape.qk_rope_head_dim and shape.index_n_heads and shape.index_head_dim
        self.num_heads = shape.index_n_heads
        self.rotated = shape.qk_rope_head_dim
        """Width of the rotated part of an index head, which comes first; in an attention head it comes last."""
        self.wq_b = Linear(shape.q_lora_rank, shape.index_n_heads * shape.index_head_dim, bias=False)
        self.wk = Linear(shape.hidden_size, shape.index_head_dim, bias=False)
        self.k_norm = LayerNorm(shape.index_head_dim, _NORM_EPS)
        self.weights_proj = Linear(shape.hidden_size, shape.index_n_heads, bias=False)

    def forward(self, x_BSD: Tensor, query_latent_BSQ: Tensor, rope: tuple[Tensor, Tensor]) -> IndexTensors:
        """Compute the index tensors of all tokens.

        Args:
            x_BSD: input of the attention.
            query_latent_BSQ: latent of the queries, after its norm.
            rope: see `rotary_tables`.
        """
        x_BSD = x_BSD.detach()
        q_BSGJ = self.wq_b(query_latent_BSQ.detach()).unflatten(-1, (self.num_heads, -1))
        k_BS1J = self.k_norm(self.wk(x_BSD)).unsqueeze(2)
        weights_NG = self.weights_proj(x_BSD).flatten(0, 1).float() * self.num_heads**-0.5
        q_NGJ = self._rotated(q_BSGJ, rope, last_flat_dim=1)
        return IndexTensors(q_NGJ, self._rotated(k_BS1J, rope, last_flat_dim=2), weights_NG)

    def _rotated(self, x: Tensor, rope: tuple[Tensor, Tensor], last_flat_dim: int) -> Tensor:
        # Flattened before they are joined, so that the result is no view: FSDP2 warns if a layer returns one.
        parts = rotate_pairs(x[..., : self.rotated], rope), x[..., self.rotated :]
        return torch.cat([part.flatten(0, last_flat_dim) for part in parts], dim=-1)


def index_scores(q_NGJ: Tensor, k_TJ: Tensor, weights_NG: Tensor) -> Tensor:
    """Compute the score of each key for each query, FP32 [N, T]: the weighted sum over heads of ReLU of the scaled
    products.

    The products are FP32, as in `transformers`: in BF16 other keys would be chosen.
    """
    N, G, J = q_NGJ.shape
    products_NGT = (q_NGJ.float().flatten(0, 1) @ k_TJ.float().t()).view(N, G, -1)
    return torch.bmm(weights_NG.unsqueeze(1), products_NGT.mul_(J**-0.5).relu_()).squeeze(1)


def best_keys(scores_NT: Tensor, count: int) -> Tensor:
    """Return the indices of the best keys of each row, int64 [N, count], ascending.

    Of equal scores at the border, the first keys are chosen. `topk` promises no order of equal scores, and ReLU makes
    many that are 0; but the smallest chosen value is certain. So every device, rank, chunk and recomputation makes the
    same choice.
    """
    border_N1 = scores_NT.topk(count).values[:, -1:]
    is_above = scores_NT > border_N1
    is_border = scores_NT == border_N1
    remaining_N1 = count - is_above.sum(-1, keepdim=True)
    is_chosen = is_above | (is_border & (is_border.cumsum(-1) <= remaining_N1))
    # A stable sort of "is not chosen" begins with the chosen keys in ascending order. Its shape is known without
    # waiting for the device, unlike that of `nonzero`.
    return is_chosen.logical_not().to(torch.uint8).sort(stable=True).indices[:, :count]


def query_chunks(num_queries: int, num_keys: int, queries_per_row: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Divide queries into chunks of at most ``size``. Yields the queries and the keys that they may see.

    Args:
        queries_per_row: see `KeySpans`.
    """
    length = queries_per_row or num_queries
    for row_start in range(0, num_queries, length):
        row_end = row_start + length
        for start in range(row_start, row_end, size):
            end = min(start + size, row_end)
            yield slice(start, end), slice(row_start, end) if queries_per_row else slice(0, num_keys)


@torch.library.custom_op("glm46::choose_keys", mutates_args=())
def choose_keys(
    q_NGJ: Tensor,
    k_TJ: Tensor,
    weights_NG: Tensor,
    first_N: Tensor,
    end_N: Tensor,
    queries_per_row: int,
    top_k: int,
) -> Tensor:
    """Choose the keys of each query.

    A custom operator, so that activation checkpointing can keep its result, and because `torch.compile` cannot trace
    chunks whose number depends on the batch. It has no gradient.

    Args:
        first_N, end_N, queries_per_row: see `KeySpans`.
        top_k: maximum number of keys of a query.

    Returns:
        int32 [N, top_k]: indices of keys, -1 where a query may attend to fewer.
    """
    N, G, _ = q_NGJ.shape
    T = len(k_TJ)
    chosen_NK = torch.full((N, top_k), -1, dtype=torch.int32, device=q_NGJ.device)
    size = max(1, _MAX_SCORES // (G * (queries_per_row or T)))
    for queries, keys in query_chunks(N, T, queries_per_row, size):
        key = torch.arange(keys.start, keys.stop, device=k_TJ.device)
        is_visible = (key >= first_N[queries, None]) & (key < end_N[queries, None])
        scores = index_scores(q_NGJ[queries], k_TJ[keys], weights_NG[queries])
        scores = scores.masked_fill(~is_visible, float("-inf"))
        count = min(top_k, scores.shape[1])
        chosen = best_keys(scores, count)
        is_real = scores.gather(1, chosen) > float("-inf")
        chosen_NK[queries, :count] = (chosen + keys.start).where(is_real, -1).int()
    return chosen_NK


@choose_keys.register_fake
def _(
    q_NGJ: Tensor,
    k_TJ: Tensor,
    weights_NG: Tensor,
    first_N: Tensor,
    end_N: Tensor,
    queries_per_row: int,
    top_k: int,
) -> Tensor:
    return q_NGJ.new_empty(len(q_NGJ), top_k, dtype=torch.int32)
