"""Attention of runs of queries to runs of keys: a flash kernel on a GPU, blocks of queries elsewhere.

Both take the same arguments, so that everything but the kernel itself is proved on a CPU. Neither holds a tensor that
grows with queries times keys.

Shape letters: N queries, M keys, H query heads, K key heads, C = head_dim, P = pieces of a block, G = H / K.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm46 import compat
from glm46.compute.model.attention_layout import AttentionLayout
from glm46.config.errors import UserError

_BLOCK = 128
"""Queries of a run that a block has, at most."""

_SCORES = 2**18
"""Of the heads of all pairs of a block of several runs, at most: they stay in a cache, and many heads need no more
memory."""

_PADDED = 1.25
"""Pairs of such a block with padding over those without, at most."""


_HAS_PACKAGES = hasattr(torch.nn.attention, "list_flash_attention_impls")
"""Older releases of torch run their own kernels only."""


def has_flash_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the flash kernel takes tensors of this kind; on the meta device it has no values."""
    return device.type in ("cuda", "meta") and dtype in (torch.bfloat16, torch.float16)


def use_attention_kernel(name: str, width: int, window: int | None) -> None:
    """Let torch's flash operators run the kernels that `model.attention_kernel` names, in this process, and compute
    with heads of this width and this window once, on its device.

    Raises:
        UserError: no GPU, torch does not know the kernels, or their package is missing or another one than this torch
            takes.
    """
    if name == "default":
        return
    key, remedy = f'model.attention_kernel = "{name}"', 'or set "default"'
    if not torch.cuda.is_available():
        raise UserError(f"{key}: these kernels run on a GPU; remove the key, {remedy}")
    known = torch.nn.attention.list_flash_attention_impls() if _HAS_PACKAGES else []
    if name not in known:
        raise UserError(f"{key}: torch {torch.__version__} knows {', '.join(known) or 'none'}; update torch, {remedy}")
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
    """One forward and backward. Only a call shows that a package fits: torch 2.13 takes two results of FA4, whose later
    versions return more, and the backward of torch 2.11 refuses FA4."""
    q, k, v = (torch.zeros(128, n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (2, 1, 1))
    ends = torch.tensor([0, 128], device="cuda", dtype=torch.int32)
    out = compat.varlen_attention(q, k, v, ends, ends, 128, 128, (-1 if window is None else window - 1, 0))
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))


def flash_package() -> str:
    """Comma and name of the kernels that `use_attention_kernel` has chosen; '' for those of torch."""
    package = torch.nn.attention.current_flash_attention_impl() if _HAS_PACKAGES else None
    return f", {package}" if package else ""


def describe_core(device: torch.device, dtype: torch.dtype) -> str:
    """A text about the kernel of attention, for the first message of a run."""
    if has_flash_kernel(device, dtype):
        return f"variable-length flash attention{flash_package()}"
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


class _Tokens(NamedTuple):
    """Tokens of several pieces in a tensor [tokens, heads, ...], whose first two dimensions are flattened."""

    rows: Tensor
    """int64 [P, heads, tokens of the longest], flattened. Padding is the token after the last one."""
    places: Tensor
    """The same with the last token as padding, which can be read."""
    pieces: int
    is_real: Tensor | None
    """bool, true for tokens; None without padding."""


class _Block(NamedTuple):
    """The work of one call: a piece, or whole runs of similar sizes."""

    queries: slice | _Tokens
    keys: slice | _Tokens
    mask: Tensor
    """bool [P, queries, keys], true = sees. Padding is not seen, and sees what the last query of its run sees."""


def _tokens(first: Tensor, count: Tensor, longest: Tensor, heads: int, all_tokens: int) -> _Tokens:
    """Those of pieces, by first token and number [P, 1]; ``longest`` counts to the most of a piece."""
    token = (first + longest).where(longest < count, all_tokens)
    rows = (token.unsqueeze(1) * heads + torch.arange(heads, device=token.device).unsqueeze(1)).flatten()
    if int(count.min()) == len(longest):
        return _Tokens(rows, rows, len(count), None)
    return _Tokens(rows, rows.clamp(max=all_tokens * heads - 1), len(count), rows < all_tokens * heads)


def _read(x_NHC: Tensor, tokens: slice | _Tokens) -> Tensor:
    """Tokens of a block, [P, H, n, C]; padding has the values of some row."""
    if isinstance(tokens, slice):
        return x_NHC[tokens].transpose(0, 1).unsqueeze(0)
    _, H, C = x_NHC.shape
    return x_NHC.reshape(-1, C).index_select(0, tokens.places).view(tokens.pieces, H, -1, C)


def _write(x_PHNC: Tensor, tokens: slice | _Tokens, into_NHC: Tensor, *, has_room: bool = True) -> None:
    """The inverse of `_read`. Padding goes to the token after the last one, if there is room for it."""
    if isinstance(tokens, slice):
        into_NHC[tokens] = x_PHNC[0].transpose(0, 1)
        return
    rows, found = tokens.rows, x_PHNC.flatten(0, 2)
    if not has_room and tokens.is_real is not None:
        rows, found = rows[tokens.is_real], found[tokens.is_real]
    into_NHC.flatten(0, 1).index_copy_(0, rows, found.to(into_NHC.dtype))


def _blocks(
    cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool, heads: int, key_heads: int
) -> Iterator[_Block]:
    """All pairs of queries and keys that see each other, in few calls with little padding.

    A query sees consecutive keys, and the first and the last of them never move back from one query to the next.
    """
    end_q, end_k = cu_seq_q.cpu().numpy().astype(np.int64), cu_seq_k.cpu().numpy().astype(np.int64)
    # Pieces: at most `_BLOCK` queries of a run, the last of which sees the last key.
    pieces_of = -(-np.diff(end_q) // _BLOCK)
    run = np.arange(len(pieces_of)).repeat(pieces_of)
    first = end_q[run] + _BLOCK * (np.arange(len(run)) - (pieces_of.cumsum() - pieces_of)[run])
    end = np.minimum(first + _BLOCK, end_q[run + 1])
    seen, seen_of_first = (end_k[run + 1] - (end_q[run + 1] - 1 - query) * causal for query in (end - 1, first))
    begin = end_k[run] if window is None else np.maximum(end_k[run], seen_of_first - window)
    pieces = np.stack([first, end - first, begin, seen - begin], 1)
    is_whole = pieces_of[run] == 1  # shares no key with another piece
    whole = pieces[is_whole]
    whole = whole[np.lexsort((whole[:, 3], whole[:, 1]))[::-1]]
    parts = [slice(n, n + 1) for n in np.flatnonzero(~is_whole).tolist()]
    for of, part in (
        *((pieces, part) for part in parts),
        *((whole, part) for part in _similar(whole, _SCORES // heads)),
    ):
        pieces_here = torch.from_numpy(of[part]).to(cu_seq_q.device)
        yield _joined(pieces_here, window, causal, (heads, int(end_q[-1])), (key_heads, int(end_k[-1])))


def _similar(pieces: np.ndarray, most_pairs: int) -> Iterator[slice]:
    """Divide pieces, those with most queries first, into blocks of so many pairs, at most."""
    start = pairs = widest = most = 0
    for number, (queries, keys) in enumerate(pieces[:, 1::2].tolist()):
        wider = max(widest, keys)
        padded = (number + 1 - start) * most * wider
        if number > start and padded > min(most_pairs, _PADDED * (pairs + queries * keys)):
            yield slice(start, number)
            start, pairs, wider = number, 0, keys
        pairs, widest, most = pairs + queries * keys, wider, queries if number == start else most
    if len(pieces):
        yield slice(start, len(pieces))


def _joined(
    pieces: Tensor, window: int | None, causal: bool, of_queries: tuple[int, int], of_keys: tuple[int, int]
) -> _Block:
    """A block of pieces, int64 [P, 4]: first query, number of queries, first key, number of keys.

    Args:
        of_queries: heads, and the number of all queries.
        of_keys: the same of keys.
    """
    query, queries, key, keys = pieces.t().unsqueeze(-1)
    n, m = (torch.arange(int(size.max()), device=pieces.device) for size in (queries, keys))
    end = keys - queries + 1 + n.minimum(queries - 1) if causal else keys.expand(-1, len(n))
    mask = m < end.unsqueeze(-1)
    if window is not None:
        mask &= m >= end.unsqueeze(-1) - window
    if len(pieces) == 1:
        (first, count, first_key, count_keys) = pieces[0].tolist()
        return _Block(slice(first, first + count), slice(first_key, first_key + count_keys), mask)
    return _Block(_tokens(query, queries, n, *of_queries), _tokens(key, keys, m, *of_keys), mask)


def _attend_in_blocks(
    q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of runs, block by block of queries, on any device: the operator `block_attention`.

    An operator of its own, because `torch.compile` cannot trace blocks whose sizes depend on the documents, and because
    backward makes the masks again instead of keeping them.

    Returns:
        [N, H, C], and the log-sum-exp of the scores, FP32 or FP64 [H, N].
    """
    N, H, C = q_NHC.shape
    out = q_NHC.new_empty(N, H, C)  # no room for padding: backward keeps it
    log_sum = q_NHC.new_empty(N + 1, H, 1, dtype=torch.promote_types(q_NHC.dtype, torch.float32))
    for queries, keys, mask in _blocks(cu_seq_q, cu_seq_k, window, causal, H, k_MKC.shape[1]):
        forward = compat.cpu_attention if _has_cpu_kernel(q_NHC, mask) else plain_attention
        found, sums = forward(_read(q_NHC, queries), _read(k_MKC, keys), _read(v_MKC, keys), mask)
        _write(found, queries, out, has_room=False)
        _write(sums.unsqueeze(-1), queries, log_sum)
    return out, log_sum[:N, :, 0].t().contiguous()


def _has_cpu_kernel(x: Tensor, mask: Tensor) -> bool:
    """True if torch's CPU kernel computes a block. It starts anew for each head of each run: short runs take three
    times as long as products, which however round scores to the type of the operands."""
    return x.device.type == "cpu" and (len(mask) == 1 or x.dtype.itemsize < 4)


block_attention = torch.library.custom_op("glm46::block_attention", _attend_in_blocks, mutates_args=())
# The same under another name: selective activation checkpointing, which saves the results of `block_attention`, would
# save those of every part.
_block_attention_part = torch.library.custom_op("glm46::block_attention_part", _attend_in_blocks, mutates_args=())


@block_attention.register_fake
def _(q_NHC, k_MKC, v_MKC, cu_seq_q, cu_seq_k, window, causal):
    dtype = torch.promote_types(q_NHC.dtype, torch.float32)
    return torch.empty_like(q_NHC), q_NHC.new_empty(q_NHC.shape[1], q_NHC.shape[0], dtype=dtype)


@torch.library.custom_op("glm46::block_attention_backward", mutates_args=())
def _block_attention_backward(
    grad_NHC: Tensor, q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, out_NHC: Tensor, log_sum_HN: Tensor,
    cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    # A key gets a part of its gradient from every block of its run; their sum needs FP32.
    N, M = len(q_NHC), len(k_MKC)
    grad_q = q_NHC.new_empty(N + 1, *q_NHC.shape[1:])
    grad_k, grad_v = (x.new_zeros(M + 1, *x.shape[1:], dtype=log_sum_HN.dtype) for x in (k_MKC, v_MKC))
    heads = q_NHC.shape[1], k_MKC.shape[1]
    for queries, keys, mask in _blocks(cu_seq_q, cu_seq_k, window, causal, *heads):
        backward = compat.cpu_attention_backward if _has_cpu_kernel(q_NHC, mask) else plain_attention_backward
        grad, q, out, sums = (_read(x, queries) for x in (grad_NHC, q_NHC, out_NHC, log_sum_HN.t().unsqueeze(-1)))
        if not isinstance(queries, slice) and queries.is_real is not None:  # padding weighs nothing
            sums.masked_fill_(~queries.is_real.view(sums.shape), torch.inf)
        k, v = _read(k_MKC, keys), _read(v_MKC, keys)
        of_q, of_k, of_v = backward(grad, q, k, v, out, sums.squeeze(-1), mask)
        _write(of_q, queries, grad_q)
        for found, total in ((of_k, grad_k), (of_v, grad_v)):
            _write(found if not isinstance(keys, slice) else found + _read(total, keys), keys, total)
    return grad_q[:N], grad_k[:M].to(k_MKC.dtype), grad_v[:M].to(v_MKC.dtype)


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


def plain_attention(q_PHNC: Tensor, k_PKMC: Tensor, v_PKMC: Tensor, mask_PNM: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one block by products, on any device; the form that the kernels are held to.

    Returns:
        [P, H, N, C], and the log-sum-exp of the scores, [P, H, N].
    """
    weights = _scores(_grouped(q_PHNC, k_PKMC), k_PKMC, mask_PNM)
    largest = weights.amax(-1, keepdim=True)
    total = weights.sub_(largest).exp_().sum(-1, keepdim=True)
    out = weights.div_(total).to(v_PKMC.dtype) @ v_PKMC
    return out.view(q_PHNC.shape), total.log_().add_(largest).view(q_PHNC.shape[:3])


def plain_attention_backward(
    grad_PHNC: Tensor, q_PHNC: Tensor, k_PKMC: Tensor, v_PKMC: Tensor, out_PHNC: Tensor, log_sum_PHN: Tensor,
    mask_PNM: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the query, key and value of `plain_attention`."""
    grad, q, out = (_grouped(x, k_PKMC) for x in (grad_PHNC, q_PHNC, out_PHNC))
    weights = _scores(q, k_PKMC, mask_PNM)
    weights = weights.sub_(log_sum_PHN.reshape(*q.shape[:3], 1)).exp_()
    grad_v = weights.to(grad.dtype).mT @ grad
    # The derivative of softmax subtracts the mean of the gradient under the weights, which is grad * out.
    mean = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
    grad_scores = (grad @ v_PKMC.mT).to(weights.dtype).sub_(mean).mul_(weights).mul_(q.shape[-1] ** -0.5).to(q.dtype)
    return (grad_scores @ k_PKMC).view(q_PHNC.shape), grad_scores.mT @ q, grad_v


def _grouped(x_PHNC: Tensor, of_keys_PKMC: Tensor) -> Tensor:
    """[P, K, G * N, C]: the query heads that share a key behind each other, so that each key is read once."""
    return x_PHNC.reshape(*of_keys_PKMC.shape[:2], -1, x_PHNC.shape[3])


def _scores(q_PKXC: Tensor, k_PKMC: Tensor, mask_PNM: Tensor) -> Tensor:
    """Scaled scores [P, K, G * N, M] of `_grouped` queries in FP32 or FP64, -inf where the mask is false."""
    P, N, M = mask_PNM.shape
    scores = (q_PKXC @ k_PKMC.mT).view(P, k_PKMC.shape[1], -1, N, M)
    added = compat.added_mask(mask_PNM, torch.promote_types(q_PKXC.dtype, torch.float32))
    return torch.add(added.view(P, 1, 1, N, M), scores, alpha=q_PKXC.shape[-1] ** -0.5).flatten(2, 3)
