"""Attention of runs of queries to runs of keys: a flash kernel on a GPU, blocks of queries elsewhere.

Both take the same arguments, so that everything but the kernel itself is proved on a CPU. Neither holds a tensor that
grows with queries times keys.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from glm46 import compat
from glm46.model.attention_layout import AttentionLayout

_BLOCK = 128
"""Queries of a block. Fewer: more calls. More: a block of several short documents computes more pairs for nothing."""


def has_flash_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the flash kernel takes tensors of this kind; on the meta device it has no values."""
    return device.type in ("cuda", "meta") and dtype in (torch.bfloat16, torch.float16)


def describe_core(device: torch.device, dtype: torch.dtype) -> str:
    """What computes the attention of runs, for the first message of a run."""
    if has_flash_kernel(device, dtype):
        return "variable-length flash attention"
    return f"blocks of {_BLOCK} queries by " + ("torch's CPU kernel" if device.type == "cpu" else "matrix products")


def attend_in_runs(q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, layout: AttentionLayout) -> Tensor:
    """Causal attention with scale C**-0.5 within the runs of a layout.

    Args:
        q_NHC: [queries, H, C].
        k_MKC, v_MKC: [keys, K, C], those of the runs behind each other.

    Returns:
        [queries, H, C].
    """
    cu_seq_q, cu_seq_k, window = layout.cu_seq_q, layout.cu_seq_k, layout.window
    if has_flash_kernel(q_NHC.device, q_NHC.dtype):
        left = -1 if window is None else window - 1
        return compat.varlen_attention(q_NHC, k_MKC, v_MKC, cu_seq_q, cu_seq_k, layout.max_q, layout.max_k, (left, 0))
    return block_attention(q_NHC, k_MKC, v_MKC, cu_seq_q, cu_seq_k, window, True)[0]


def part_attention(
    q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, layout: AttentionLayout, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of runs to a part of their keys, without gradient and without a window.

    Args:
        causal: as `attend_in_runs`; False: each query of a run sees all keys of the run.

    Returns:
        [queries, H, C], and the log-sum-exp of the scores, FP32 or FP64 [H, queries].
    """
    cu_seqs = layout.cu_seq_q, layout.cu_seq_k
    if has_flash_kernel(q_NHC.device, q_NHC.dtype):
        return compat.flash_attention(q_NHC, k_MKC, v_MKC, *cu_seqs, layout.max_q, layout.max_k, causal)
    return _block_attention_part(q_NHC, k_MKC, v_MKC, *cu_seqs, None, causal)


def part_attention_backward(
    grad_NHC: Tensor, q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, out_NHC: Tensor, log_sum_HN: Tensor,
    layout: AttentionLayout, *, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v of a part of the keys, from result and log-sum-exp over all keys."""
    tensors = grad_NHC, q_NHC, k_MKC, v_MKC, out_NHC, log_sum_HN, layout.cu_seq_q, layout.cu_seq_k
    if has_flash_kernel(q_NHC.device, q_NHC.dtype):
        return compat.flash_attention_backward(*tensors, layout.max_q, layout.max_k, causal)
    return _block_attention_backward(*tensors, None, causal)


def _blocks(cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool) -> Iterator[tuple[slice, Tensor]]:
    """For each block of queries the keys that some of them sees, and a mask [queries, keys], true = sees.

    A query sees consecutive keys, and the first and the last of them never move back from one query to the next.
    """
    lengths = (cu_seq_q[1:] - cu_seq_q[:-1]).long()
    ahead = (cu_seq_k[1:] - cu_seq_q[1:]).repeat_interleave(lengths)
    if causal:
        end_N = torch.arange(1, ahead.numel() + 1, device=ahead.device) + ahead
    else:
        end_N = cu_seq_k[1:].long().repeat_interleave(lengths)
    first_N = cu_seq_k[:-1].repeat_interleave(lengths)
    if window is not None:
        first_N = torch.maximum(first_N, end_N - window)
    for first, end in zip(first_N.split(_BLOCK), end_N.split(_BLOCK), strict=True):
        keys = slice(int(first[0]), int(end[-1]))
        key = torch.arange(keys.start, keys.stop, device=end.device)
        yield keys, (key >= first.unsqueeze(1)).logical_and_(key < end.unsqueeze(1))


def _attend_in_blocks(
    q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of runs, block by block of queries, on any device: the operator `block_attention`.

    An operator of its own, because `torch.compile` cannot trace blocks whose sizes depend on the documents, and because
    backward makes the masks again instead of keeping them.

    Returns:
        [N, H, C], and the log-sum-exp of the scores, FP32 or FP64 [H, N].
    """
    out, log_sum = torch.empty_like(q_NHC), _empty_log_sum(q_NHC)
    forward = compat.cpu_attention if q_NHC.device.type == "cpu" else plain_attention
    start = 0
    for keys, mask in _blocks(cu_seq_q, cu_seq_k, window, causal):
        rows = slice(start, start := start + mask.shape[0])
        out[rows], log_sum[:, rows] = forward(q_NHC[rows], k_MKC[keys], v_MKC[keys], mask)
    return out, log_sum


block_attention = torch.library.custom_op("glm46::block_attention", _attend_in_blocks, mutates_args=())
# The same under another name: selective activation checkpointing, which saves the results of `block_attention`, would
# save those of every part.
_block_attention_part = torch.library.custom_op("glm46::block_attention_part", _attend_in_blocks, mutates_args=())


@block_attention.register_fake
def _(q_NHC, k_MKC, v_MKC, cu_seq_q, cu_seq_k, window, causal):
    return torch.empty_like(q_NHC), _empty_log_sum(q_NHC)


def _empty_log_sum(q_NHC: Tensor) -> Tensor:
    dtype = torch.promote_types(q_NHC.dtype, torch.float32)
    return q_NHC.new_empty(q_NHC.shape[1], q_NHC.shape[0], dtype=dtype)


@torch.library.custom_op("glm46::block_attention_backward", mutates_args=())
def _block_attention_backward(
    grad_NHC: Tensor, q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, out_NHC: Tensor, log_sum_HN: Tensor,
    cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    # A key gets a part of its gradient from every block; the sum of many parts needs FP32.
    wide = log_sum_HN.dtype
    grad_q = torch.empty_like(q_NHC)
    grad_k, grad_v = torch.zeros_like(k_MKC, dtype=wide), torch.zeros_like(v_MKC, dtype=wide)
    backward = compat.cpu_attention_backward if q_NHC.device.type == "cpu" else plain_attention_backward
    start = 0
    for keys, mask in _blocks(cu_seq_q, cu_seq_k, window, causal):
        rows = slice(start, start := start + mask.shape[0])
        grad_q[rows], of_k, of_v = backward(
            grad_NHC[rows], q_NHC[rows], k_MKC[keys], v_MKC[keys], out_NHC[rows], log_sum_HN[:, rows], mask
        )
        grad_k[keys] += of_k
        grad_v[keys] += of_v
    return grad_q, grad_k.to(k_MKC.dtype), grad_v.to(v_MKC.dtype)


@_block_attention_backward.register_fake
def _(grad_NHC, q_NHC, k_MKC, v_MKC, out_NHC, log_sum_HN, cu_seq_q, cu_seq_k, window, causal):
    return torch.empty_like(q_NHC), torch.empty_like(k_MKC), torch.empty_like(v_MKC)


def _save(ctx, inputs, output) -> None:
    q, k, v, cu_seq_q, cu_seq_k, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seq_q, cu_seq_k)


def _gradients(ctx, grad_NHC: Tensor, _):
    gradients = _block_attention_backward(grad_NHC.contiguous(), *ctx.saved_tensors, ctx.window, ctx.causal)
    return *gradients, None, None, None, None


block_attention.register_autograd(_gradients, setup_context=_save)


def plain_attention(q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, mask_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one block by products, on any device; the form that the kernels are held to.

    Returns:
        [N, H, C], and the log-sum-exp of the scores, [H, N].
    """
    scores_KGNM = _scores(q_NHC, k_MKC, mask_NM)
    log_sum_KGN = scores_KGNM.logsumexp(-1)
    weights = scores_KGNM.sub_(log_sum_KGN.unsqueeze(-1)).exp_().to(v_MKC.dtype)
    out_KGNC = weights @ v_MKC.transpose(0, 1).unsqueeze(1)
    return out_KGNC.flatten(0, 1).transpose(0, 1), log_sum_KGN.flatten(0, 1)


def plain_attention_backward(
    grad_NHC: Tensor, q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, out_NHC: Tensor, log_sum_HN: Tensor, mask_NM: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query, key and value of `plain_attention`."""
    heads = k_MKC.shape[1]
    grad_KGNC = _grouped(grad_NHC, heads)
    weights = _scores(q_NHC, k_MKC, mask_NM).sub_(log_sum_HN.unflatten(0, (heads, -1)).unsqueeze(-1)).exp_()
    grad_v = (weights.to(grad_NHC.dtype).mT @ grad_KGNC).sum(1).transpose(0, 1)
    grad_weights = grad_KGNC @ v_MKC.transpose(0, 1).unsqueeze(1).mT
    # The derivative of softmax subtracts the mean of the gradient under the weights, which is grad * out.
    mean = (grad_NHC * out_NHC).sum(-1, dtype=weights.dtype).t().unflatten(0, (heads, -1)).unsqueeze(-1)
    grad_scores = weights.mul_(grad_weights - mean).mul_(q_NHC.shape[-1] ** -0.5).to(q_NHC.dtype)
    grad_q = (grad_scores @ k_MKC.transpose(0, 1).unsqueeze(1)).flatten(0, 1).transpose(0, 1)
    grad_k = (grad_scores.mT @ _grouped(q_NHC, heads)).sum(1).transpose(0, 1)
    return grad_q, grad_k, grad_v


def _grouped(x_NHC: Tensor, heads: int) -> Tensor:
    """[K, G, N, C]: the query heads that share a key beside each other."""
    return x_NHC.transpose(0, 1).unflatten(0, (heads, -1))


def _scores(q_NHC: Tensor, k_MKC: Tensor, mask_NM: Tensor) -> Tensor:
    """Scaled scores [K, G, N, M] in FP32 or FP64, -inf where the mask is false."""
    scores = _grouped(q_NHC, k_MKC.shape[1]) @ k_MKC.transpose(0, 1).unsqueeze(1).mT
    wide = torch.promote_types(q_NHC.dtype, torch.float32)
    return (scores.to(wide) * q_NHC.shape[-1] ** -0.5).masked_fill_(~mask_NM, -math.inf)
