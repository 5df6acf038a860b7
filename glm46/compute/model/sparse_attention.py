"""Sparse latent attention of GLM-5: each query attends to the keys that an indexer chose for it.

It has three forms, by the longest document of a batch: the dense core of latent attention where no key can be left
unchosen; `masked_attention` of all keys of a document; and `chosen_attention` of gathered rows.

Source: DeepSeek-V3.2 (technical report, section 2.1) and `GlmMoeDsa` of `transformers`. Shape letters: N queries, T
keys, H heads, K chosen keys of a query, L = kv_lora_rank, W = width of the row of a token: L and the rotated key.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from glm46.compat import FunctionContext
from glm46.compute.model.attention_layout import AttentionLayout, KeyExchange
from glm46.compute.model.index_loss import AttentionInputs, HeadShare, index_loss
from glm46.compute.model.indexer import Indexer, IndexTensors, choose_keys, key_spans
from glm46.compute.model.latent_attention import LatentAttention
from glm46.compute.model.masked_attention import masked_attention
from glm46.config.model import ModelShape
from glm46.run.context_keys import longest_masked

_MAX_GATHERED = 2**25
"""Maximum number of elements of gathered rows that exist at a time."""

MakeIndex = Callable[[], IndexTensors]
"""Computes the index tensors of the tokens of a call; not called where every key is attended to."""

SparseCore = Callable[
    [Tensor, Tensor, MakeIndex | None, AttentionLayout | None, Tensor | None], tuple[Tensor, Tensor | None]
]
"""(q [B, S, H, C], rows [B, S, 1, W], index of a layer with an indexer, layout, the choice of an earlier layer) ->
[B, S, H, C] and the choice."""


class SparseState(NamedTuple):
    """State that layers with sparse attention pass to the following layers."""

    keys: Tensor | None = None
    """int32 [B * S, K], the choice of an indexer, see `choose_keys`; None if all keys are attended to."""
    tensors: IndexTensors | None = None
    """Result of this indexer for the tokens of this rank; only if indexers are trained."""
    losses: Tensor | None = None
    """FP32 [2], sums of `index_loss` over layers; None if indexers are not trained. Each layer adds its own: FSDP2
    frees the weights of a layer in backward when the gradient of an input is there, and while only indexers are
    trained, no other input has one."""

    def followed_by(self, later: "SparseState") -> "SparseState":
        """Return the state after a layer, from its result: a layer without an indexer has no keys and tensors in it."""
        return SparseState(
            self.keys if later.keys is None else later.keys,
            self.tensors if later.tensors is None else later.tensors,
            later.losses,
        )


GatherKeys = Callable[[Tensor, AttentionLayout | None], Tensor]
"""(x [B, S, 1, any width], layout) -> [T, width]: the same values for all keys of the layout, in its order."""


def local_keys(x: Tensor, layout: AttentionLayout | None) -> Tensor:
    """Return the values of all keys on one rank, a `GatherKeys`."""
    x = x.flatten(0, 2)
    if layout is None or layout.exchange is None:
        return x
    assert isinstance(layout.exchange, KeyExchange), "latent attention has no ring"
    return x.index_select(0, layout.exchange.keys)


class SparseLatentAttention(LatentAttention):
    """Latent attention of the chosen keys, with an indexer, or with the choice of an earlier layer.

    A query that may attend to at most ``top_k`` keys attends to all of them: batches whose documents are no longer run
    the dense core of `LatentAttention`.
    """

    def __init__(self, shape: ModelShape, *, has_indexer: bool):
        super().__init__(shape)
        assert shape.index_topk is not None
        self.top_k = shape.index_topk
        self.longest_masked = longest_masked(shape)
        self.indexer = Indexer(shape) if has_indexer else None
        self.gather_keys: GatherKeys = local_keys
        self.cached_core: SparseCore | None = None
        """Replaces `attend` while a decoder uses the module."""
        self.head_share = HeadShare()
        """Division of the heads over ranks, for the index loss."""

    def forward(  # type: ignore[override]  # the state goes in and out
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: AttentionLayout | None,
        state: SparseState,
        is_real: Tensor | None = None,
        *,
        loss: Literal["none", "dense", "sparse"] = "none",
    ) -> tuple[Tensor, SparseState]:
        """Attend over [B, S, D]; further arguments as in `LatentAttention`.

        Args:
            state: state after the layer before. Its choice is not used by a layer with an indexer.
            is_real: bool [B, S], false for padding, which has no index loss. None: there is none.
            loss: loss of the indexer to compute, see `RoutingOptions.index_loss`.

        Returns:
            [B, S, D], and what the layer adds to the state, see `SparseState.followed_by`.
        """
        query_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.rotated_queries(query_latent, rope)
        rows = self.rows(x, rope)
        make_index: MakeIndex | None = None
        if self.indexer is not None:
            make_index = partial(self.indexer, x, query_latent, rope)
        attend = self.cached_core or self.attend
        if loss == "none":
            out, keys = attend(q, rows, make_index, layout, state.keys)
            return self.o_proj(out.flatten(2)), SparseState(keys if self.indexer is not None else None)
        tensors = state.tensors
        if make_index is not None:
            tensors = make_index()
            make_index = partial(_same, tensors)
        assert tensors is not None and state.losses is not None, "the first layer has an indexer"
        if loss == "dense":
            out = self.core(q, rows, self.expand, layout)
            keys = None
        else:
            out, keys = attend(q, rows, make_index, layout, state.keys)
        losses = state.losses + self._index_losses(tensors, q, rows, layout, keys, is_real)
        out = self.o_proj(out.flatten(2))
        return out, SparseState(losses=losses) if self.indexer is None else SparseState(keys, tensors, losses)

    def _index_losses(
        self,
        index: IndexTensors,
        q: Tensor,
        rows: Tensor,
        layout: AttentionLayout | None,
        chosen: Tensor | None,
        is_real: Tensor | None,
    ) -> Tensor:
        """Compute the losses of this layer for the indexer that made the choice, see `index_loss`."""
        B, S, _, _ = q.shape
        index = index._replace(k_TJ=self.gather_keys(index.k_TJ.view(B, S, 1, -1), layout))
        with torch.no_grad():
            q_NHW = self.absorbed_queries(q.flatten(0, 1), self.weight_by_head())
            attention = AttentionInputs(q_NHW * self.head_dim**-0.5, self.gather_keys(rows, layout))
            spans = key_spans(layout, B, S, q.device)
        is_real = None if is_real is None else is_real.flatten()
        return index_loss(index, attention, spans, chosen, is_real, self.top_k, self.head_share)

    def attend(
        self,
        q: Tensor,
        rows: Tensor,
        index: MakeIndex | None,
        layout: AttentionLayout | None,
        chosen: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the chosen keys, or to all if there are no more; a `SparseCore`."""
        B, S, _, _ = q.shape
        longest_run = S if layout is None else layout.max_k
        if longest_run <= self.top_k:
            return self.core(q, rows, self.expand, layout), None
        if index is not None:
            with torch.no_grad():
                tensors = index()
                keys = self.gather_keys(tensors.k_TJ.view(B, S, 1, -1), layout)
                spans = key_spans(layout, B, S, q.device)
                chosen = choose_keys(tensors.q_NGJ, keys, tensors.weights_NG, *spans, self.top_k)
        assert chosen is not None, "the first layer has an indexer"
        rows_TW = self.gather_keys(rows, layout)
        q_NHC = q.flatten(0, 1)
        if longest_run <= self.longest_masked:
            k, v = self.expand(rows_TW.view(1, -1, 1, rows_TW.shape[-1]))
            queries_per_row = S if layout is None or layout.exchange is None else 0
            out, _ = masked_attention(q_NHC, k[0], v[0], chosen, [queries_per_row, longest_run])
        else:
            out = self.attend_to_chosen(q_NHC, rows_TW, chosen, self.weight_by_head())
        return out.view(q.shape), chosen

    def attend_to_chosen(self, q_NHC: Tensor, rows_TW: Tensor, chosen_NK: Tensor, weight_HCL: Tensor) -> Tensor:
        """Attend from each query to its chosen rows; see `chosen_attention` and `weight_by_head`. Returns [N, H, C]."""
        q_NHW = self.absorbed_queries(q_NHC, weight_HCL)
        out_NHL, _ = chosen_attention(q_NHW, rows_TW, chosen_NK, self.rank, self.head_dim**-0.5)
        return torch.einsum("nhl,hcl->nhc", out_NHL, weight_HCL[:, self.key_part :])

    def absorbed_queries(self, q_NHC: Tensor, weight_HCL: Tensor) -> Tensor:
        """Multiply queries with the weights of keys, so that their products with rows are those with keys. Returns
        [N, H, W].

        With the weights of values applied to the result, all heads attend to the rows themselves: keys and values of
        chosen tokens need not be computed for each query.
        """
        absorbed = torch.einsum("nhc,hcl->nhl", q_NHC[..., : self.key_part], weight_HCL[:, : self.key_part])
        return torch.cat([absorbed, q_NHC[..., self.key_part :]], dim=-1)


def _same(index: IndexTensors) -> IndexTensors:
    return index


def _chunks(num_queries: int, num_chosen: int, width: int) -> list[slice]:
    size = max(1, _MAX_GATHERED // (num_chosen * width))
    return [slice(start, start + size) for start in range(0, num_queries, size)]


def _weights(q_NHW: Tensor, gathered_NKW: Tensor, chosen_NK: Tensor, scale: float) -> Tensor:
    """Compute scaled scores [N, H, K] in FP32 or FP64, -inf for absent keys."""
    scores = (q_NHW @ gathered_NKW.mT).to(torch.promote_types(q_NHW.dtype, torch.float32)).mul_(scale)
    return scores.masked_fill_((chosen_NK < 0).unsqueeze(1), float("-inf"))


@torch.library.custom_op("glm46::chosen_attention", mutates_args=())
def chosen_attention(
    q_NHW: Tensor, rows_TW: Tensor, chosen_NK: Tensor, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from each query to its chosen rows, which are keys and, in their first values, values of all heads.

    A custom operator, because backward gathers rows and recomputes scores chunk by chunk: no tensor grows with queries
    times chosen keys times width.

    Args:
        chosen_NK: int32, indices of rows, -1 for none; at least one row per query.
        value_width: number L of leading values of a row.
        scale: factor on the scores.

    Returns:
        [N, H, L], and the log-sum-exp of the scores, FP32 or FP64 [N, H].
    """
    N, H, W = q_NHW.shape
    out_NHL = q_NHW.new_empty(N, H, value_width)
    log_sum_NH = q_NHW.new_empty(N, H, dtype=torch.promote_types(q_NHW.dtype, torch.float32))
    for queries in _chunks(N, chosen_NK.shape[1], W):
        gathered = rows_TW[chosen_NK[queries].clamp(min=0)]
        scores = _weights(q_NHW[queries], gathered, chosen_NK[queries], scale)
        log_sum = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(log_sum).exp_()
        out_NHL[queries] = weights.to(q_NHW.dtype) @ gathered[..., :value_width]
        log_sum_NH[queries] = log_sum.squeeze(-1)
    return out_NHL, log_sum_NH


@chosen_attention.register_fake
def _(q_NHW: Tensor, rows_TW: Tensor, chosen_NK: Tensor, value_width: int, scale: float) -> tuple[Tensor, Tensor]:
    N, H, _ = q_NHW.shape
    return q_NHW.new_empty(N, H, value_width), q_NHW.new_empty(
        N, H, dtype=torch.promote_types(q_NHW.dtype, torch.float32)
    )


@torch.library.custom_op("glm46::chosen_attention_backward", mutates_args=())
def _chosen_attention_backward(
    grad_NHL: Tensor,
    q_NHW: Tensor,
    rows_TW: Tensor,
    chosen_NK: Tensor,
    out_NHL: Tensor,
    log_sum_NH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    value_width = out_NHL.shape[-1]
    grad_q = torch.empty_like(q_NHW)
    # A row gets a part of its gradient from every query that chose it; the sum needs FP32.
    grad_rows = torch.zeros_like(rows_TW, dtype=log_sum_NH.dtype)
    for queries in _chunks(len(q_NHW), chosen_NK.shape[1], q_NHW.shape[2]):
        chosen = chosen_NK[queries].clamp(min=0)
        gathered = rows_TW[chosen]
        q = q_NHW[queries]
        grad = grad_NHL[queries]
        weights = _weights(q, gathered, chosen_NK[queries], scale).sub_(log_sum_NH[queries].unsqueeze(-1)).exp_()
        # The derivative of softmax subtracts the mean of the gradient under the weights, which is grad * out.
        mean = (grad * out_NHL[queries]).sum(-1, keepdim=True, dtype=weights.dtype)
        grad_weights = (grad @ gathered[..., :value_width].mT).to(weights.dtype)
        grad_scores = grad_weights.sub_(mean).mul_(weights).mul_(scale).to(q.dtype)
        grad_q[queries] = grad_scores @ gathered
        grad_gathered = (grad_scores.mT @ q).to(grad_rows.dtype)
        grad_gathered[..., :value_width] += weights.to(q.dtype).mT @ grad
        grad_rows.index_add_(0, chosen.flatten(), grad_gathered.flatten(0, 1))
    return grad_q, grad_rows.to(rows_TW.dtype)


@_chosen_attention_backward.register_fake
def _(
    grad_NHL: Tensor,
    q_NHW: Tensor,
    rows_TW: Tensor,
    chosen_NK: Tensor,
    out_NHL: Tensor,
    log_sum_NH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_NHW), torch.empty_like(rows_TW)


class _AttentionContext(FunctionContext, Protocol):
    scale: float


def _save(ctx: _AttentionContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_NHW, rows_TW, chosen_NK, _, ctx.scale = inputs
    ctx.save_for_backward(q_NHW, rows_TW, chosen_NK, *output)


def _gradients(ctx: _AttentionContext, grad_NHL: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_q, grad_rows = _chosen_attention_backward(grad_NHL.contiguous(), *ctx.saved_tensors, ctx.scale)
    return grad_q, grad_rows, None, None, None


chosen_attention.register_autograd(_gradients, setup_context=_save)
