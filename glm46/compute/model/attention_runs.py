"""Attention of runs of queries to runs of keys: a flash kernel on a GPU, blocks of queries elsewhere.

Both take the same arguments, so that everything except the kernel itself is tested on a CPU. Neither allocates a tensor
that grows with queries times keys.

Shape letters: N queries, M keys, H query heads, K key heads, C = head_dim, P = pieces of a block, G = H / K,
X = G * N.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from glm46 import compat
from glm46.compat import FunctionContext
from glm46.compute.model.attention_layout import AttentionLayout
from glm46.config.errors import UserError

_BLOCK = 128
"""Maximum number of queries of a run in a block."""

_MAX_SCORES = 2**18
"""Maximum number of scores (pairs times heads) of a block of several runs: small enough for a CPU cache, and memory
does not grow with the number of heads."""

_PADDED = 1.25
"""Maximum ratio of pairs with padding to pairs without padding, in a block of several runs."""


_HAS_PACKAGES = hasattr(torch.nn.attention, "list_flash_attention_impls")
"""Whether torch can use kernels of other packages; older releases have only their own."""


def has_flash_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the flash kernel accepts such tensors. On the meta device, it computes shapes only."""
    return device.type in ("cuda", "meta") and dtype in (torch.bfloat16, torch.float16)


def use_attention_kernel(name: str, width: int, window: int | None) -> None:
    """Make torch's flash operators use the kernels named by `model.attention_kernel` in this process, and test them
    once on its device, with heads of this width and this window.

    Raises:
        UserError: no GPU, kernels unknown to torch, or their package is missing or incompatible with this torch.
    """
    if name == "default":
        return
    key = f'model.attention_kernel = "{name}"'
    remedy = 'or set "default"'
    if not torch.cuda.is_available():
        raise UserError(f"{key}: these kernels run on a GPU; remove the key, {remedy}")
    available = torch.nn.attention.list_flash_attention_impls() if _HAS_PACKAGES else []
    if name not in available:
        raise UserError(
            f"{key}: torch {torch.__version__} knows {', '.join(available) or 'none'}; update torch, {remedy}"
        )
    try:
        torch.nn.attention.activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        raise UserError(f"{key}: {error}; install the package, {remedy}") from error
    try:
        _attend_once(width, window)
    except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        torch.nn.attention.restore_flash_attention_impl()
        what = f"torch {torch.__version__} cannot compute with this version of the package"
        raise UserError(f"{key}: {what} ({type(error).__name__}: {error}); install another one, {remedy}") from error


def _attend_once(width: int, window: int | None) -> None:
    """Run one forward and backward. Only a call shows that a package is compatible: torch 2.13 expects two results of
    FA4, whose later versions return more, and the backward of torch 2.11 rejects FA4."""
    q, k, v = (torch.zeros(128, n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (2, 1, 1))
    ends = torch.tensor([0, 128], device="cuda", dtype=torch.int32)
    out = compat.varlen_attention(q, k, v, ends, ends, 128, 128, (-1 if window is None else window - 1, 0))
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))


def flash_package() -> str:
    """Return a comma and the name of the kernels chosen by `use_attention_kernel`; '' for torch's own kernels."""
    package = torch.nn.attention.current_flash_attention_impl() if _HAS_PACKAGES else None
    return f", {package}" if package else ""


def describe_core(device: torch.device, dtype: torch.dtype) -> str:
    """Describe the attention kernel, for the first message of a run."""
    if has_flash_kernel(device, dtype):
        return f"variable-length flash attention{flash_package()}"
    return f"blocks of {_BLOCK} queries by " + ("torch's CPU kernel" if device.type == "cpu" else "matrix products")


def attend_in_runs(q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, layout: AttentionLayout) -> Tensor:
    """Compute causal attention with scale C**-0.5 within the runs of a layout.

    Args:
        q_NHC: [queries, H, C].
        k_MKC, v_MKC: [keys, K, C], concatenated over the runs.

    Returns:
        [queries, H, C].
    """
    cu_seqs = (layout.cu_seq_q, layout.cu_seq_k)
    if has_flash_kernel(q_NHC.device, q_NHC.dtype):
        window_left = -1 if layout.window is None else layout.window - 1
        return compat.varlen_attention(q_NHC, k_MKC, v_MKC, *cu_seqs, layout.max_q, layout.max_k, (window_left, 0))
    out: Tensor = block_attention(q_NHC, k_MKC, v_MKC, *cu_seqs, layout.window, True)[0]
    return out


def part_attention(
    q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, layout: AttentionLayout, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute attention of runs to a part of their keys, without gradient and without a window.

    Args:
        causal: True: as in `attend_in_runs`; False: each query of a run attends to all keys of the run.

    Returns:
        [queries, H, C], and the log-sum-exp of the scores, FP32 or FP64 [H, queries].
    """
    cu_seqs = layout.cu_seq_q, layout.cu_seq_k
    if has_flash_kernel(q_NHC.device, q_NHC.dtype):
        return compat.flash_attention(q_NHC, k_MKC, v_MKC, *cu_seqs, layout.max_q, layout.max_k, causal)
    part: tuple[Tensor, Tensor] = _block_attention_part(q_NHC, k_MKC, v_MKC, *cu_seqs, None, causal)
    return part


def part_attention_backward(
    grad_NHC: Tensor,
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    out_NHC: Tensor,
    log_sum_HN: Tensor,
    layout: AttentionLayout,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v for a part of the keys, from result and log-sum-exp over all keys."""
    tensors = grad_NHC, q_NHC, k_MKC, v_MKC, out_NHC, log_sum_HN, layout.cu_seq_q, layout.cu_seq_k
    if has_flash_kernel(q_NHC.device, q_NHC.dtype):
        return compat.flash_attention_backward(*tensors, layout.max_q, layout.max_k, causal)
    gradients: tuple[Tensor, Tensor, Tensor] = _block_attention_backward(*tensors, None, causal)
    return gradients


class _Tokens(NamedTuple):
    """Tokens of several pieces in a tensor [tokens, heads, ...], whose first two dimensions are flattened."""

    indices: Tensor
    """int64 [P, heads, maximum tokens of a piece], flattened: indices into the tensor with tokens and heads flattened.
    Padding is the token after the last one."""
    readable_indices: Tensor
    """Like `indices`, but padding is the last token, which can be read."""
    pieces: int
    is_real: Tensor | None
    """bool, true for tokens; None without padding."""


class _Block(NamedTuple):
    """Work of one call: a piece, or whole runs of similar sizes."""

    queries: slice | _Tokens
    keys: slice | _Tokens
    mask: Tensor
    """bool [P, queries, keys], true where a query attends to a key. Padded keys are masked; padded queries have the
    mask of the last query of their run."""


def _tokens(first: Tensor, count: Tensor, offset: Tensor, heads: int, all_tokens: int) -> _Tokens:
    """Index the tokens of pieces, from first token and count [P, 1]. ``offset``: 0 to the maximum count, exclusive."""
    token = (first + offset).where(offset < count, all_tokens)
    indices = (token.unsqueeze(1) * heads + torch.arange(heads, device=token.device).unsqueeze(1)).flatten()
    if int(count.min()) == len(offset):  # no padding: all pieces have the maximum count
        return _Tokens(indices, indices, len(count), None)
    readable_indices = indices.clamp(max=all_tokens * heads - 1)
    return _Tokens(indices, readable_indices, len(count), indices < all_tokens * heads)


def _read(x_NHC: Tensor, tokens: slice | _Tokens) -> Tensor:
    """Read the tokens of a block, [P, H, n, C]; padding has the values of an arbitrary row."""
    if isinstance(tokens, slice):
        return x_NHC[tokens].transpose(0, 1).unsqueeze(0)
    _, H, C = x_NHC.shape
    return x_NHC.reshape(-1, C).index_select(0, tokens.readable_indices).view(tokens.pieces, H, -1, C)


def _write(x_PHNC: Tensor, tokens: slice | _Tokens, into_NHC: Tensor, *, has_room: bool = True) -> None:
    """Invert `_read`. Padding is written to the token after the last one if the tensor has room for it."""
    if isinstance(tokens, slice):
        into_NHC[tokens] = x_PHNC[0].transpose(0, 1)
        return
    indices = tokens.indices
    values = x_PHNC.flatten(0, 2)
    if not has_room and tokens.is_real is not None:
        indices = indices[tokens.is_real]
        values = values[tokens.is_real]
    into_NHC.flatten(0, 1).index_copy_(0, indices, values.to(into_NHC.dtype))


def _blocks(
    cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool, heads: int, key_heads: int
) -> Iterator[_Block]:
    """Yield all pairs of queries and keys that attend to each other, in few blocks with little padding."""
    bounds_q = cu_seq_q.cpu().numpy().astype(np.int64)
    bounds_k = cu_seq_k.cpu().numpy().astype(np.int64)
    pieces, is_whole_run = _cut_runs(bounds_q, bounds_k, window, causal)
    # Pieces of one run share keys, so each is a block of its own. Whole runs of similar sizes share a block.
    groups = [pieces[n : n + 1] for n in np.flatnonzero(~is_whole_run)]
    whole_runs = pieces[is_whole_run]
    decreasing = np.lexsort((whole_runs[:, 3], whole_runs[:, 1]))[::-1]  # by number of queries, then of keys
    groups += _similar(whole_runs[decreasing], _MAX_SCORES // heads)
    for group in groups:
        block_pieces = torch.from_numpy(group).to(cu_seq_q.device)
        yield _joined(block_pieces, window, causal, (heads, int(bounds_q[-1])), (key_heads, int(bounds_k[-1])))


def _cut_runs(
    bounds_q: np.ndarray, bounds_k: np.ndarray, window: int | None, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Cut runs into pieces of at most `_BLOCK` queries.

    A query attends to consecutive keys. From one query to the next, neither the first nor the last key moves back.

    Args:
        bounds_q, bounds_k: int64 [runs + 1], where the queries and the keys of each run begin, and the last ones end.

    Returns:
        int64 [pieces, 4]: first query, number of queries, first key, number of keys. And a boolean [pieces]: the piece
        is a whole run.
    """
    pieces_of_run = -(-np.diff(bounds_q) // _BLOCK)
    run = np.arange(len(pieces_of_run)).repeat(pieces_of_run)
    pieces_before_run = pieces_of_run.cumsum() - pieces_of_run
    number_in_run = np.arange(len(run)) - pieces_before_run[run]
    first_query = bounds_q[run] + _BLOCK * number_in_run
    end_query = np.minimum(first_query + _BLOCK, bounds_q[run + 1])
    first_key = bounds_k[run]
    end_key = end_key_of_first = bounds_k[run + 1]
    if causal:
        # The last query of a run attends to the last key of the run, the query before it to one key less, and so on.
        end_key = bounds_k[run + 1] - (bounds_q[run + 1] - end_query)
        end_key_of_first = bounds_k[run + 1] - (bounds_q[run + 1] - 1 - first_query)
    if window is not None:
        first_key = np.maximum(first_key, end_key_of_first - window)
    pieces = np.stack([first_query, end_query - first_query, first_key, end_key - first_key], axis=1)
    return pieces, pieces_of_run[run] == 1


def _similar(pieces: np.ndarray, max_pairs: int) -> Iterator[np.ndarray]:
    """Divide pieces, sorted by decreasing number of queries, into groups of at most ``max_pairs`` pairs, and without
    too much padding, see `_PADDED`."""
    start = pairs = max_keys = max_queries = 0
    for number, (queries, keys) in enumerate(pieces[:, 1::2].tolist()):
        new_max_keys = max(max_keys, keys)
        padded = (number + 1 - start) * max_queries * new_max_keys
        if number > start and padded > min(max_pairs, _PADDED * (pairs + queries * keys)):
            yield pieces[start:number]
            start = number
            pairs = 0
            new_max_keys = keys
        pairs = pairs + queries * keys
        max_keys = new_max_keys
        max_queries = queries if number == start else max_queries
    if len(pieces):
        yield pieces[start:]


def _joined(
    pieces: Tensor, window: int | None, causal: bool, query_size: tuple[int, int], key_size: tuple[int, int]
) -> _Block:
    """Join pieces into a block. ``pieces``: int64 [P, 4]: first query, number of queries, first key, number of keys.

    Args:
        query_size: number of heads, and total number of queries.
        key_size: the same for keys.
    """
    first_query, num_queries, first_key, num_keys = pieces.t().unsqueeze(-1)
    n = torch.arange(int(num_queries.max()), device=pieces.device)
    m = torch.arange(int(num_keys.max()), device=pieces.device)
    # One past the last key of each query, counted from the first key.
    end = num_keys.expand(-1, len(n))
    if causal:
        end = num_keys - num_queries + 1 + n.minimum(num_queries - 1)
    mask = m < end.unsqueeze(-1)
    if window is not None:
        mask &= m >= end.unsqueeze(-1) - window
    if len(pieces) == 1:
        query, queries, key, keys = pieces[0].tolist()
        return _Block(slice(query, query + queries), slice(key, key + keys), mask)
    query_tokens = _tokens(first_query, num_queries, n, *query_size)
    return _Block(query_tokens, _tokens(first_key, num_keys, m, *key_size), mask)


def _attend_in_blocks(
    q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute attention of runs, block by block of queries, on any device: the operator `block_attention`.

    A custom operator, because `torch.compile` cannot trace blocks whose sizes depend on the documents, and because
    backward recomputes the masks instead of keeping them.

    Returns:
        [N, H, C], and the log-sum-exp of the scores, FP32 or FP64 [H, N].
    """
    N, H, C = q_NHC.shape
    out = q_NHC.new_empty(N, H, C)  # exactly N rows, because backward keeps it; `log_sum` has a row for padding
    log_sum = q_NHC.new_empty(N + 1, H, 1, dtype=torch.promote_types(q_NHC.dtype, torch.float32))
    for queries, keys, mask in _blocks(cu_seq_q, cu_seq_k, window, causal, H, k_MKC.shape[1]):
        forward = compat.cpu_attention if _has_cpu_kernel(q_NHC, mask) else plain_attention
        block_out, sums = forward(_read(q_NHC, queries), _read(k_MKC, keys), _read(v_MKC, keys), mask)
        _write(block_out, queries, out, has_room=False)
        _write(sums.unsqueeze(-1), queries, log_sum)
    return out, log_sum[:N, :, 0].t().contiguous()


def _has_cpu_kernel(x: Tensor, mask: Tensor) -> bool:
    """Return whether torch's CPU kernel computes a block. Its overhead per head and run makes short runs three times
    slower than matrix products; but products round scores to the dtype of the operands, so they need FP32."""
    return x.device.type == "cpu" and (len(mask) == 1 or x.dtype.itemsize < 4)


block_attention = torch.library.custom_op("glm46::block_attention", _attend_in_blocks, mutates_args=())
# The same under another name, because selective activation checkpointing saves the results of `block_attention`, and
# would save the results of every part.
_block_attention_part = torch.library.custom_op("glm46::block_attention_part", _attend_in_blocks, mutates_args=())


@block_attention.register_fake
def _(
    q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q_NHC.dtype, torch.float32)
    return torch.empty_like(q_NHC), q_NHC.new_empty(q_NHC.shape[1], q_NHC.shape[0], dtype=dtype)


@torch.library.custom_op("glm46::block_attention_backward", mutates_args=())
def _block_attention_backward(
    grad_NHC: Tensor,
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    out_NHC: Tensor,
    log_sum_HN: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # A key gets a part of its gradient from every block of its run; the sum needs FP32.
    N = len(q_NHC)
    M = len(k_MKC)
    grad_q = q_NHC.new_empty(N + 1, *q_NHC.shape[1:])
    grad_k, grad_v = (x.new_zeros(M + 1, *x.shape[1:], dtype=log_sum_HN.dtype) for x in (k_MKC, v_MKC))
    heads = q_NHC.shape[1], k_MKC.shape[1]
    for queries, keys, mask in _blocks(cu_seq_q, cu_seq_k, window, causal, *heads):
        backward = compat.cpu_attention_backward if _has_cpu_kernel(q_NHC, mask) else plain_attention_backward
        grad, q, out, sums = (_read(x, queries) for x in (grad_NHC, q_NHC, out_NHC, log_sum_HN.t().unsqueeze(-1)))
        if not isinstance(queries, slice) and queries.is_real is not None:  # padding gets weight 0
            sums.masked_fill_(~queries.is_real.view(sums.shape), torch.inf)
        k = _read(k_MKC, keys)
        v = _read(v_MKC, keys)
        block_grad_q, block_grad_k, block_grad_v = backward(grad, q, k, v, out, sums.squeeze(-1), mask)
        _write(block_grad_q, queries, grad_q)
        for block_grad, total in ((block_grad_k, grad_k), (block_grad_v, grad_v)):
            may_share_keys = isinstance(keys, slice)  # with other pieces of its run; whole runs share none
            _write(block_grad + _read(total, keys) if may_share_keys else block_grad, keys, total)
    return grad_q[:N], grad_k[:M].to(k_MKC.dtype), grad_v[:M].to(v_MKC.dtype)


@_block_attention_backward.register_fake
def _(
    grad_NHC: Tensor,
    q_NHC: Tensor,
    k_MKC: Tensor,
    v_MKC: Tensor,
    out_NHC: Tensor,
    log_sum_HN: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_NHC), torch.empty_like(k_MKC), torch.empty_like(v_MKC)


class _AttentionContext(FunctionContext, Protocol):
    window: int | None
    causal: bool


def _save(ctx: _AttentionContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seq_q, cu_seq_k, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seq_q, cu_seq_k)


def _gradients(ctx: _AttentionContext, grad_NHC: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _block_attention_backward(grad_NHC.contiguous(), *ctx.saved_tensors, ctx.window, ctx.causal)
    return *gradients, None, None, None, None


block_attention.register_autograd(_gradients, setup_context=_save)


def plain_attention(q_PHNC: Tensor, k_PKMC: Tensor, v_PKMC: Tensor, mask_PNM: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention of one block by matrix products, on any device; the reference for the kernels.

    Returns:
        [P, H, N, C], and the log-sum-exp of the scores, [P, H, N].
    """
    scores = _scores(_grouped(q_PHNC, k_PKMC), k_PKMC, mask_PNM)
    max_score = scores.amax(-1, keepdim=True)
    weights = scores.sub_(max_score).exp_()
    total = weights.sum(-1, keepdim=True)
    out = weights.div_(total).to(v_PKMC.dtype) @ v_PKMC
    return out.view(q_PHNC.shape), total.log_().add_(max_score).view(q_PHNC.shape[:3])


def plain_attention_backward(
    grad_PHNC: Tensor,
    q_PHNC: Tensor,
    k_PKMC: Tensor,
    v_PKMC: Tensor,
    out_PHNC: Tensor,
    log_sum_PHN: Tensor,
    mask_PNM: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value of `plain_attention`."""
    grad, q, out = (_grouped(x, k_PKMC) for x in (grad_PHNC, q_PHNC, out_PHNC))
    weights = _scores(q, k_PKMC, mask_PNM)
    weights = weights.sub_(log_sum_PHN.reshape(*q.shape[:3], 1)).exp_()
    grad_v = weights.to(grad.dtype).mT @ grad
    # The derivative of softmax subtracts the mean of the gradient under the weights, which is grad * out.
    mean = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
    grad_scores = (grad @ v_PKMC.mT).to(weights.dtype).sub_(mean).mul_(weights).mul_(q.shape[-1] ** -0.5).to(q.dtype)
    return (grad_scores @ k_PKMC).view(q_PHNC.shape), grad_scores.mT @ q, grad_v


def _grouped(x_PHNC: Tensor, k_PKMC: Tensor) -> Tensor:
    """Reshape to [P, K, G * N, C]: query heads that share a key head are concatenated, so that each key is read
    once."""
    return x_PHNC.reshape(*k_PKMC.shape[:2], -1, x_PHNC.shape[3])


def _scores(q_PKXC: Tensor, k_PKMC: Tensor, mask_PNM: Tensor) -> Tensor:
    """Compute scaled scores [P, K, G * N, M] of `_grouped` queries in FP32 or FP64, -inf where the mask is false."""
    P, N, M = mask_PNM.shape
    scores = (q_PKXC @ k_PKMC.mT).view(P, k_PKMC.shape[1], -1, N, M)
    added = compat.added_mask(mask_PNM, torch.promote_types(q_PKXC.dtype, torch.float32))
    return torch.add(added.view(P, 1, 1, N, M), scores, alpha=q_PKXC.shape[-1] ** -0.5).flatten(2, 3)
