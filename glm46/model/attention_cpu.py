"""Causal attention of short sequences on a CPU, block of queries by block of queries.

torch's own CPU kernel works on small tiles; batched products over a block of queries with all heads of a key head at
once run nearer to the peak. For long sequences the scores of a block leave the cache and torch's kernel wins.
"""

import torch
from torch import Tensor

MAX_TOKENS = 1024
"""Longest sequence for which this was measured to be faster; docs/performance.md has the figures."""

_BLOCK_TOKENS = 64


def _by_key_head(x: Tensor, key_heads: int) -> Tensor:
    """[B, S, H, C] to [B * K, S * G, C] with the G heads of a key head beside each other."""
    B, S, H, C = x.shape
    grouped = x.view(B, S, key_heads, H // key_heads, C).permute(0, 2, 1, 3, 4)
    return grouped.reshape(B * key_heads, -1, C)


def _by_head(x: Tensor, batch: int, heads: int, key_heads: int) -> Tensor:
    """The inverse of `_by_key_head`, contiguous: [B, S, H, C]."""
    C = x.shape[-1]
    grouped = x.view(batch, key_heads, -1, heads // key_heads, C).permute(0, 2, 1, 3, 4)
    return grouped.reshape(batch, -1, heads, C).contiguous()


def _blocks(tokens: int, group: int, like: Tensor):
    """For each block: its first and last position, its rows, and what hides later keys inside the block."""
    hidden = torch.full((_BLOCK_TOKENS, _BLOCK_TOKENS), float("-inf"), dtype=like.dtype).triu_(1)
    hidden = hidden.repeat_interleave(group, 0)
    for start in range(0, tokens, _BLOCK_TOKENS):
        end = min(start + _BLOCK_TOKENS, tokens)
        yield start, end, slice(start * group, end * group), hidden[: (end - start) * group, : end - start]


@torch.library.custom_op("glm46::causal_attention", mutates_args=())
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention with scale C**-0.5.

    A custom operator, so that `torch.compile` keeps the blocks as they are written.

    Args:
        q: [B, S, H, C]; k, v: [B, S, K, C].

    Returns:
        Result [B, S, H, C], and the logarithm of each row's softmax sum [B * K, S * H / K, 1].
    """
    B, S, H, C = q.shape
    K = k.shape[2]
    rows_q, rows_k, rows_v = _by_key_head(q * C**-0.5, K), _by_key_head(k, K).transpose(1, 2), _by_key_head(v, K)
    result, log_sum = torch.empty_like(rows_q), rows_q.new_empty(B * K, rows_q.shape[1], 1)
    for start, end, rows, hidden in _blocks(S, H // K, q):
        scores = torch.bmm(rows_q[:, rows], rows_k[:, :, :end])
        scores[:, :, start:].add_(hidden)
        largest = scores.amax(-1, keepdim=True)
        total = scores.sub_(largest).exp_().sum(-1, keepdim=True)
        torch.div(torch.bmm(scores, rows_v[:, :end]), total, out=result[:, rows])
        torch.add(largest, total.log_(), out=log_sum[:, rows])
    return _by_head(result, B, H, K), log_sum


@causal_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q.shape
    K = k.shape[2]
    return q.new_empty(q.shape), q.new_empty(B * K, S * (H // K), 1)


@torch.library.custom_op("glm46::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `causal_attention` to its inputs; scores are computed again. Source: arXiv 2205.14135, alg. 4."""
    B, S, H, C = q.shape
    K, scale = k.shape[2], C**-0.5
    rows_q, rows_k, rows_v = _by_key_head(q * scale, K), _by_key_head(k, K), _by_key_head(v, K)
    rows_grad = _by_key_head(grad, K)
    along = _by_key_head(grad * result, K).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.empty_like(rows_q), torch.zeros_like(rows_k), torch.zeros_like(rows_v)
    for start, end, rows, hidden in _blocks(S, H // K, q):
        probability = torch.bmm(rows_q[:, rows], rows_k[:, :end].transpose(1, 2))
        probability[:, :, start:].add_(hidden)
        probability.sub_(log_sum[:, rows]).exp_()
        grad_v[:, :end].baddbmm_(probability.transpose(1, 2), rows_grad[:, rows])
        grad_scores = torch.bmm(rows_grad[:, rows], rows_v[:, :end].transpose(1, 2))
        grad_scores.sub_(along[:, rows]).mul_(probability)
        torch.mul(torch.bmm(grad_scores, rows_k[:, :end]), scale, out=grad_q[:, rows])
        grad_k[:, :end].baddbmm_(grad_scores.transpose(1, 2), rows_q[:, rows])
    return _by_head(grad_q, B, H, K), _by_head(grad_k, B, K, K), _by_head(grad_v, B, K, K)


@causal_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    return causal_attention_backward(grad.contiguous(), *ctx.saved_tensors)


causal_attention.register_autograd(_backward, setup_context=_save_for_backward)
