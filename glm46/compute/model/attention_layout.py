"""Attention layout: which tokens each token of a batch attends to. Its memory grows with the number of documents; no
mask of queries times keys exists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm46.run.context_keys import kernel_runs, rounded_run


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """Way in which a rank gets the keys of its runs when they are not simply its own tokens in order.

    Not a NamedTuple: a compiled layer would be recompiled for every number of keys, although it only passes this on.
    """

    keys: Tensor
    """int64 [keys]: for each key of the runs, its index among the keys that this rank has. These are flattened [B, S]
    without context parallelism, flattened [ranks, B, S / ranks] with it, or the keys exchanged according to the other
    fields."""
    tokens: Tensor | None = None
    """int64 [sum(send)]: indices into this rank's flattened tokens [B, S / ranks]: the tokens that the first rank
    needs, then the tokens for the second, and so on. None: every rank needs most keys and gets all of them."""
    send: list[int] = field(default_factory=list)
    """Number of tokens that each rank needs from this one."""
    receive: list[int] = field(default_factory=list)
    """Number of tokens that this rank needs from each rank; they arrive in ascending order."""

    def apply(self, copy: Callable[[Tensor], Tensor]) -> "KeyExchange":
        """Return the same exchange with copies of its tensors."""
        return replace(self, keys=copy(self.keys), tokens=None if self.tokens is None else copy(self.tokens))


class RingPart(NamedTuple):
    """Keys of one rank that the queries of another context-parallel rank attend to."""

    queries: Tensor
    """int64 [queries]: indices, on this rank, of the queries that attend to any of these keys."""
    keys: Tensor
    """int64 [keys]: for each key of the runs, its index on the other rank."""
    layout: "AttentionLayout"
    """Layout of these queries and keys. Only this rank's own part is causal: in other parts, a query attends to all
    keys of its run."""

    def apply(self, copy: Callable[[Tensor], Tensor]) -> "RingPart":
        """Return the same part with copies of its tensors."""
        return RingPart(copy(self.queries), copy(self.keys), self.layout._with(copy))


@dataclass(frozen=True, eq=False)
class KeyRing:
    """Ring in which keys pass between context-parallel ranks, where gathering all keys would take too much memory."""

    parts: list[RingPart]
    """Part for this rank's own keys, then for the keys of the previous rank, and so on around the ring."""

    def apply(self, copy: Callable[[Tensor], Tensor]) -> "KeyRing":
        """Return the same ring with copies of its tensors."""
        return KeyRing([part.apply(copy) for part in self.parts])


class AttentionLayout(NamedTuple):
    """Runs of consecutive queries, each with its own run of keys, as `torch.nn.attention.varlen` takes them.

    Queries are the tokens [B, S] of this rank, flattened row by row. The last query of a run attends to all keys of the
    run, each earlier query to one key fewer. A run is a document, or the part of a document that a context-parallel
    rank holds; its keys then start with the document, or with the window of its first query. Or it is a document that
    continues a prefix shared with other documents: its keys are the keys of the prefix, then its own.
    """

    cu_seq_q: Tensor
    """int32 [runs + 1]: first query of each run, and the number of queries."""
    cu_seq_k: Tensor
    """int32 [runs + 1]: the same for keys. The same object as cu_seq_q if each run has as many keys as queries: cuDNN
    supports causal attention only then."""
    max_q: int
    """Queries of the longest run, rounded up by `longest`."""
    max_k: int
    """Maximum number of keys of a run, rounded up by `longest`; under context parallelism the maximum over all ranks,
    which sparse attention needs: ranks must agree on what they exchange."""
    window: int | None
    """Maximum number of keys that a query attends to, its own included; None for all."""
    exchange: KeyExchange | KeyRing | None = None
    """None if keys are already in the order of their runs: without context parallelism and shared prefixes."""

    def pin_memory(self) -> "AttentionLayout":
        """Return a copy in page-locked memory."""
        return self._with(Tensor.pin_memory)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "AttentionLayout":
        """Return a copy on a device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _with(self, copy: Callable[[Tensor], Tensor]) -> "AttentionLayout":
        cu_seq_q = copy(self.cu_seq_q)
        cu_seq_k = cu_seq_q if self.cu_seq_k is self.cu_seq_q else copy(self.cu_seq_k)
        exchange = None if self.exchange is None else self.exchange.apply(copy)
        return self._replace(cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, exchange=exchange)


def attention_layout(
    document_ids: Tensor | None,
    size: Sequence[int],
    window: int | None,
    places: Tensor | None = None,
    rank: int = 0,
    *,
    ring: bool = False,
    prefix_ids: Tensor | None = None,
) -> AttentionLayout | None:
    """Build the layout of whole rows, or of the part that a context-parallel rank holds, on the CPU.

    Args:
        document_ids: integer [B, S], equal inside a document and different between neighbours; None if each row is one
            document.
        size: B and S.
        window: maximum number of keys that a query attends to, its own included; None for all.
        places: int64 [B, ranks, S / ranks], the tokens of each rank, ascending; None without context parallelism.
        rank: rank in the context-parallel group.
        ring: pass keys from rank to rank instead of gathering them; not with a window.
        prefix_ids: integer [B, S]: the id of the document in the same row that precedes a token's document, -1 without
            a prefix; not with ``places`` or a window. None: no prefixes.

    Returns:
        None for rows with plain causal attention, for which there is a separate kernel.
    """
    if document_ids is None and window is None and places is None:
        return None
    B, S = size
    ids_BS = np.zeros(size, np.int64) if document_ids is None else document_ids.cpu().numpy()
    places_BRS = np.broadcast_to(np.arange(S), (B, 1, S)) if places is None else places.numpy()
    start, end, first_key = _runs(ids_BS, places_BRS[:, rank], window)
    cu_seq_q = cumulative(end - start)
    cu_seq_k = cumulative(end - first_key)
    max_q = longest(end - start)
    max_k = longest(end - first_key) if places is None else _longest_of_ranks(ids_BS, places_BRS, window)
    if prefix_ids is not None and bool((prefix_ids >= 0).any()):
        assert places is None and window is None
        return _after_prefixes(start, end, ids_BS, prefix_ids.cpu().numpy())
    if places is None:
        return AttentionLayout(cu_seq_q, cu_seq_q, max_q, max_k, window)  # each run begins with its document
    # Tokens of each rank, as indices of the whole batch.
    tokens_RN = (places_BRS + np.arange(B)[:, None, None] * S).swapaxes(0, 1).reshape(places_BRS.shape[1], -1)
    if ring:
        return AttentionLayout(cu_seq_q, cu_seq_k, max_q, max_k, window, _ring(start, end, first_key, tokens_RN, rank))
    sent: list[np.ndarray] = []
    received = list(tokens_RN)  # without a window, this rank gets the tokens of all ranks
    if window is not None:
        sent, received = _exchange(ids_BS, places_BRS, tokens_RN, window, rank)
    gathered = np.concatenate(received)
    index_of_token = np.empty(B * S, np.int64)
    index_of_token[gathered] = np.arange(len(gathered))
    keys = torch.from_numpy(index_of_token[_ranges(first_key, end)])
    if window is None:
        exchange = KeyExchange(keys)
    else:
        tokens = torch.from_numpy(np.concatenate(sent))
        exchange = KeyExchange(keys, tokens, [len(x) for x in sent], [len(x) for x in received])
    return AttentionLayout(cu_seq_q, cu_seq_k, max_q, max_k, window, exchange)


def _runs(ids_BS: np.ndarray, place_BS: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return first token, end and first key of each run of queries at these places, as indices of the whole batch."""
    S = ids_BS.shape[1]
    starts = []
    ends = []
    first_keys = []
    for b, (ids, place) in enumerate(zip(ids_BS, place_BS, strict=True)):
        document_starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
        document = np.searchsorted(document_starts, place, side="right") - 1
        is_first = np.diff(place, prepend=-2) != 1
        is_first |= np.diff(document, prepend=-1) != 0
        index_of_first = np.flatnonzero(is_first)
        start = place[index_of_first]
        starts.append(b * S + start)
        ends.append(starts[-1] + np.diff(index_of_first, append=len(place)))
        first_key = document_starts[document[index_of_first]]
        if window is not None:
            first_key = np.maximum(first_key, start - window + 1)
        first_keys.append(b * S + first_key)
    return np.concatenate(starts), np.concatenate(ends), np.concatenate(first_keys)


def _longest_of_ranks(ids_BS: np.ndarray, places_BRS: np.ndarray, window: int | None) -> int:
    """Return the maximum number of keys of a run over all context-parallel ranks, rounded up."""
    runs_of_ranks = [_runs(ids_BS, places_BRS[:, rank], window) for rank in range(places_BRS.shape[1])]
    return max(longest(end - first_key) for _, end, first_key in runs_of_ranks)


def _after_prefixes(start: np.ndarray, end: np.ndarray, ids_BS: np.ndarray, prefix_BS: np.ndarray) -> AttentionLayout:
    """Build the layout of documents, some of which continue another document."""
    rows = (start // ids_BS.shape[1]).tolist()
    run_ids, prefix_ids = (ids.reshape(-1)[start].tolist() for ids in (ids_BS, prefix_BS))
    run_of = {row_and_id: run for run, row_and_id in enumerate(zip(rows, run_ids, strict=True))}
    empty_run = len(start)  # index of the empty range appended below
    prefix_runs = [
        empty_run if prefix_id < 0 else run_of[row, prefix_id] for row, prefix_id in zip(rows, prefix_ids, strict=True)
    ]
    starts, ends = (np.append(bounds, 0) for bounds in (start, end))
    # Two ranges of keys for each run: its prefix, then the run itself.
    range_starts, range_ends = (np.stack([bounds[prefix_runs], bounds[:-1]], 1) for bounds in (starts, ends))
    lengths = end - start
    keys = (range_ends - range_starts).sum(1)
    exchange = KeyExchange(_ranges(range_starts.reshape(-1), range_ends.reshape(-1)))
    return AttentionLayout(cumulative(lengths), cumulative(keys), longest(lengths), longest(keys), None, exchange)


def _ring(start: np.ndarray, end: np.ndarray, first_key: np.ndarray, tokens_RN: np.ndarray, rank: int) -> KeyRing:
    """Build the ring parts of a rank's runs, which begin at the tokens ``start``."""
    local_tokens = tokens_RN[rank]
    first_query = np.searchsorted(local_tokens, start)
    parts = []
    for distance in range(len(tokens_RN)):
        tokens = tokens_RN[rank - distance]
        # Of this rank's keys, a run attends to those before its end. Of other ranks' keys, to those before its start:
        # its tokens are consecutive, so other ranks have none between them.
        first_index = np.searchsorted(tokens, first_key)
        end_index = np.searchsorted(tokens, start if distance else end)
        has_keys = end_index > first_index
        lengths = (end - start)[has_keys]
        keys = (end_index - first_index)[has_keys]
        cu_seq_q = cumulative(lengths)
        cu_seq_k = cumulative(keys)
        parts.append(
            RingPart(
                _ranges(first_query[has_keys], first_query[has_keys] + lengths),
                _ranges(first_index[has_keys], end_index[has_keys]),
                AttentionLayout(cu_seq_q, cu_seq_k, longest(lengths), longest(keys), None),
            )
        )
    return KeyRing(parts)


def _ranges(start: np.ndarray, end: np.ndarray) -> Tensor:
    """Concatenate the integers of several ranges, int64."""
    lengths = np.maximum(end - start, 0)
    offsets = lengths.cumsum() - lengths
    return torch.from_numpy(np.arange(lengths.sum()) + (start - offsets).repeat(lengths))


def _exchange(
    ids_BS: np.ndarray, places_BRS: np.ndarray, tokens_RN: np.ndarray, window: int, rank: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return, for each rank, the indices of the local tokens that it needs, and its tokens that this rank needs."""
    sent = []
    received = []
    for other in range(len(tokens_RN)):
        _, end, first_key = _runs(ids_BS, places_BRS[:, other], window)
        # Mark the tokens inside the ranges of keys: +1 at each first key, -1 at each end.
        change = np.bincount(first_key, minlength=ids_BS.size + 1) - np.bincount(end, minlength=ids_BS.size + 1)
        is_needed = change.cumsum() > 0
        sent.append(np.flatnonzero(is_needed[tokens_RN[rank]]))
        if other == rank:
            received = [tokens[is_needed[tokens]] for tokens in tokens_RN]
    return sent, received


def cumulative(lengths: np.ndarray) -> Tensor:
    """Compute cumulative lengths, int32 [runs + 1], with empty runs at the end (`kernel_runs`)."""
    ends = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return torch.from_numpy(np.pad(ends, (0, kernel_runs(len(lengths)) - len(lengths)), mode="edge"))


def longest(lengths: np.ndarray) -> int:
    """Round the maximum length up to a power of two, at least 256.

    Kernels only derive their number of blocks from it, and skip blocks without tokens. Rounding keeps the number of
    distinct values small: cuDNN builds a plan for each. At least 256, because `varlen_attn` branches on values above
    128, and a compiled layer would be compiled for both branches.
    """
    return rounded_run(int(lengths.max(initial=1)))
