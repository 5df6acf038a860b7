"""Attention to chosen keys with a mask: each query is compared with all keys of its document, and only the chosen ones
count.

It needs no gathered rows. Up to some length of the longest document it also needs fewer FLOPs than
`sparse_attention.chosen_attention`. Shape letters: N queries, T keys, H heads, C head width, K chosen keys of a query.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from glm46 import compat
from glm46.compat import FunctionContext
from glm46.compute.model.attention_runs import plain_attention, plain_attention_backward
from glm46.compute.model.indexer import query_chunks

_MAX_QUERIES = 128
"""Maximum number of queries of a chunk. Keys after its last query are not computed, so small chunks waste little."""

_MAX_SCORES = 2**26
"""Maximum number of scores of a chunk, over all heads: 256 MB in FP32 where no fused kernel takes a mask."""


def _chunks(chosen_NK: Tensor, num_keys: int, heads: int, limits: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Divide the queries into chunks. Yields the queries and the range of their chosen keys."""
    N = len(chosen_NK)
    queries_per_row, longest_run = limits
    most_keys = min(longest_run + _MAX_QUERIES, queries_per_row or num_keys)
    size = max(1, min(_MAX_QUERIES, _MAX_SCORES // (heads * most_keys)))
    if queries_per_row:  # keys are in the order of queries, so the range needs no wait for the device
        for queries, keys in query_chunks(N, num_keys, queries_per_row, size):
            yield queries, slice(max(keys.start, queries.start + 1 - longest_run), keys.stop)
        return
    first_N = chosen_NK.masked_fill(chosen_NK < 0, num_keys).amin(1).cpu().numpy()
    last_N = chosen_NK.amax(1).cpu().numpy()
    for queries, _ in query_chunks(N, num_keys, 0, size):
        yield queries, slice(int(first_N[queries].min()), int(last_N[queries].max()) + 1)


def _mask(chosen_NK: Tensor, keys: slice) -> Tensor:
    """Return the mask of a chunk, bool [1, N, keys], true for chosen keys."""
    num_keys = keys.stop - keys.start
    # Absent keys are written into one more column, which is cut off.
    column = (chosen_NK - keys.start).where(chosen_NK >= 0, num_keys)
    mask = torch.zeros(len(chosen_NK), num_keys + 1, dtype=torch.bool, device=chosen_NK.device)
    return mask.scatter_(1, column.long(), True)[:, :-1].unsqueeze(0)


def _kernels(device: torch.device) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]:
    """Return `plain_attention` and its backward, or what computes them on this device."""
    if device.type == "cpu":
        return compat.cpu_attention, compat.cpu_attention_backward
    return plain_attention, plain_attention_backward


def _heads_first(x_NHC: Tensor) -> Tensor:
    return x_NHC.transpose(0, 1).unsqueeze(0)


@torch.library.custom_op("glm46::masked_attention", mutates_args=())
def masked_attention(
    q_NHC: Tensor, k_THC: Tensor, v_THC: Tensor, chosen_NK: Tensor, limits: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Attend from each query to its chosen keys, with scale C**-0.5.

    A custom operator, because backward makes the masks again: no tensor grows with queries times keys.

    Args:
        chosen_NK: int32, see `choose_keys`; at least one key per query.
        limits: ``queries_per_row`` of `KeySpans`, and the keys of the longest document. If the first is not 0, a query
            attends to no key further away than the longest document reaches.

    Returns:
        [N, H, C], and the log-sum-exp of the scores, FP32 or FP64 [N, H].
    """
    N, H, _ = q_NHC.shape
    out_NHC = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
    log_sum_NH = q_NHC.new_empty(N, H, dtype=torch.promote_types(q_NHC.dtype, torch.float32))
    attend, _ = _kernels(q_NHC.device)
    for queries, keys in _chunks(chosen_NK, len(k_THC), H, limits):
        operands = (_heads_first(x) for x in (q_NHC[queries], k_THC[keys], v_THC[keys]))
        out, log_sum = attend(*operands, _mask(chosen_NK[queries], keys))
        out_NHC[queries] = out[0].transpose(0, 1)
        log_sum_NH[queries] = log_sum[0].t()
    return out_NHC, log_sum_NH


@masked_attention.register_fake
def _(q_NHC: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    log_sum_NH = q_NHC.new_empty(q_NHC.shape[:2], dtype=torch.promote_types(q_NHC.dtype, torch.float32))
    return torch.empty_like(q_NHC, memory_format=torch.contiguous_format), log_sum_NH


@torch.library.custom_op("glm46::masked_attention_backward", mutates_args=())
def _masked_attention_backward(
    grad_NHC: Tensor,
    q_NHC: Tensor,
    k_THC: Tensor,
    v_THC: Tensor,
    chosen_NK: Tensor,
    out_NHC: Tensor,
    log_sum_NH: Tensor,
    limits: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
    # A key gets a part of its gradient from every chunk; the sum needs FP32.
    grad_k = torch.zeros_like(k_THC, dtype=log_sum_NH.dtype, memory_format=torch.contiguous_format)
    grad_v = torch.zeros_like(v_THC, dtype=log_sum_NH.dtype, memory_format=torch.contiguous_format)
    _, backward = _kernels(q_NHC.device)
    for queries, keys in _chunks(chosen_NK, len(k_THC), q_NHC.shape[1], limits):
        grad, q, out = (_heads_first(x[queries]) for x in (grad_NHC, q_NHC, out_NHC))
        k = _heads_first(k_THC[keys])
        v = _heads_first(v_THC[keys])
        log_sum = log_sum_NH[queries].t().contiguous().unsqueeze(0)
        chunk_grads = backward(grad, q, k, v, out, log_sum, _mask(chosen_NK[queries], keys))
        chunk_grad_q, chunk_grad_k, chunk_grad_v = (x[0].transpose(0, 1) for x in chunk_grads)
        grad_q[queries] = chunk_grad_q
        grad_k[keys] += chunk_grad_k
        grad_v[keys] += chunk_grad_v
    return grad_q, grad_k.to(k_THC.dtype), grad_v.to(v_THC.dtype)


@_masked_attention_backward.register_fake
def _(grad_NHC: Tensor, q_NHC: Tensor, k_THC: Tensor, v_THC: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_NHC, k_THC, v_THC))


class _MaskContext(FunctionContext, Protocol):
    limits: Sequence[int]


def _save(ctx: _MaskContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_NHC, k_THC, v_THC, chosen_NK, ctx.limits = inputs
    ctx.save_for_backward(q_NHC, k_THC, v_THC, chosen_NK, *output)


def _gradients(ctx: _MaskContext, grad_NHC: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_masked_attention_backward(grad_NHC.contiguous(), *ctx.saved_tensors, ctx.limits), None, None


masked_attention.register_autograd(_gradients, setup_context=_save)
