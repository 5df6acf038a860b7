"""The tokens that each token of a batch sees, in memory that grows with the number of documents: no mask of queries
and keys exists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm46.run.context_keys import kernel_runs


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """The way in which a rank gets the keys of its runs, where these are not its tokens as they lie.

    No NamedTuple: a compiled layer would be compiled again for every number of keys, though it only hands this on.
    """

    keys: Tensor
    """int64 [keys]: for each key of the runs, its place among the keys that this rank gets: without context parallelism
    its own, flattened [B, S]; with it all of them, flattened [ranks, B, S / ranks]; or those that the other fields
    say."""
    tokens: Tensor | None = None
    """int64 [sum(send)]: this rank's tokens [B, S / ranks], flattened: those that the first rank needs, then those of
    the second. None: every rank needs most keys and gets all of them."""
    send: list[int] = field(default_factory=list)
    """Tokens that each rank needs of this one."""
    receive: list[int] = field(default_factory=list)
    """Tokens that this rank needs of each, ascending."""

    def apply(self, copy: Callable[[Tensor], Tensor]) -> "KeyExchange":
        """The same with copies of its tensors."""
        return replace(self, keys=copy(self.keys), tokens=None if self.tokens is None else copy(self.tokens))


class RingPart(NamedTuple):
    """The part of the keys of one rank that the queries of a context-parallel rank see."""

    queries: Tensor
    """int64 [queries]: those that see any, by their number on this rank."""
    keys: Tensor
    """int64 [keys]: for each key of the runs, its number on the other rank."""
    layout: "AttentionLayout"
    """Of these queries and keys. Only the own part is causal: of other ranks, a query sees all keys of its run."""

    def apply(self, copy: Callable[[Tensor], Tensor]) -> "RingPart":
        """The same with copies of its tensors."""
        return RingPart(copy(self.queries), copy(self.keys), self.layout._with(copy))


@dataclass(frozen=True, eq=False)
class KeyRing:
    """The ring in which keys pass between context-parallel ranks, where all together would take too much memory."""

    parts: list[RingPart]
    """Of the own keys, then of those of the rank before, and so on around the ring."""

    def apply(self, copy: Callable[[Tensor], Tensor]) -> "KeyRing":
        """The same with copies of its tensors."""
        return KeyRing([part.apply(copy) for part in self.parts])


class AttentionLayout(NamedTuple):
    """Runs of consecutive queries, each with its own run of keys, as `torch.nn.attention.varlen` takes them.

    Queries are the tokens [B, S] of this rank behind each other, row by row. The last query of a run sees all keys of
    the run, each query before it one key fewer. A run is a document, or the part of a document that a context-parallel
    rank holds; its keys then start with the document, or with the window of its first query. Or it is a document that
    goes on after a prefix which other documents share: its keys are those of the prefix and its own.
    """

    cu_seq_q: Tensor
    """int32 [runs + 1]: first query of each run, and the number of queries."""
    cu_seq_k: Tensor
    """int32 [runs + 1]: the same for keys. The same object as cu_seq_q if each run has as many keys as queries: cuDNN
    takes causal attention only then."""
    max_q: int
    """Queries of the longest run, rounded up by `longest`."""
    max_k: int
    """Keys of the run with most keys, rounded up likewise."""
    window: int | None
    """Most keys that a query sees, its own included; None for all."""
    exchange: KeyExchange | KeyRing | None = None
    """None if keys lie as their runs do: without context parallelism and shared prefixes."""

    def pin_memory(self) -> "AttentionLayout":
        """A copy in page-locked memory."""
        return self._with(Tensor.pin_memory)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "AttentionLayout":
        """A copy on a device."""
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
    """The layout of whole rows, or of the part of them that a context-parallel rank holds, on the CPU.

    Args:
        document_ids: integer [B, S], equal inside a document and different in neighbours; None if each row is one.
        size: B and S.
        window: most keys that a query sees, its own included; None for all.
        places: int64 [B, ranks, S / ranks], the tokens of each rank, ascending; None without context parallelism.
        rank: of the context-parallel group.
        ring: pass keys from rank to rank instead of gathering them; not with a window.
        prefix_ids: integer [B, S]: the id of the document in the same row that comes before a token's document, -1 for
            none; not with ``places`` or a window. None: for none.

    Returns:
        None for rows that are plainly causal, which have a kernel of their own.
    """
    if document_ids is None and window is None and places is None:
        return None
    B, S = size
    ids_BS = np.zeros(size, np.int64) if document_ids is None else document_ids.cpu().numpy()
    places_BRS = np.broadcast_to(np.arange(S), (B, 1, S)) if places is None else places.numpy()
    start, end, first_key = _runs(ids_BS, places_BRS[:, rank], window)
    cu_seq_q, cu_seq_k = cumulative(end - start), cumulative(end - first_key)
    max_q, max_k = longest(end - start), longest(end - first_key)
    if prefix_ids is not None and bool((prefix_ids >= 0).any()):
        assert places is None and window is None
        return _after_prefixes(start, end, ids_BS, prefix_ids.cpu().numpy())
    if places is None:
        return AttentionLayout(cu_seq_q, cu_seq_q, max_q, max_k, window)
    tokens_RN = (places_BRS + np.arange(B)[:, None, None] * S).swapaxes(0, 1).reshape(places_BRS.shape[1], -1)
    if ring:
        return AttentionLayout(cu_seq_q, cu_seq_k, max_q, max_k, window, _ring(start, end, first_key, tokens_RN, rank))
    sent, received = ([], tokens_RN) if window is None else _exchange(ids_BS, places_BRS, tokens_RN, window, rank)
    gathered = np.concatenate(received)
    place_of_token = np.empty(B * S, np.int64)
    place_of_token[gathered] = np.arange(len(gathered))
    keys = torch.from_numpy(place_of_token[_ranges(first_key, end)])
    if window is None:
        exchange = KeyExchange(keys)
    else:
        tokens = torch.from_numpy(np.concatenate(sent))
        exchange = KeyExchange(keys, tokens, [len(x) for x in sent], [len(x) for x in received])
    return AttentionLayout(cu_seq_q, cu_seq_k, max_q, max_k, window, exchange)


def _runs(ids_BS: np.ndarray, place_BS: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First token and end of each run of queries at these places, and its first key, in tokens of the whole batch."""
    S = ids_BS.shape[1]
    starts, ends, first_keys = [], [], []
    for b, (ids, place) in enumerate(zip(ids_BS, place_BS, strict=True)):
        of_document = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
        document = np.searchsorted(of_document, place, side="right") - 1
        is_first = np.diff(place, prepend=-2) != 1
        is_first |= np.diff(document, prepend=-1) != 0
        index = np.flatnonzero(is_first)
        start = place[index]
        starts.append(b * S + start)
        ends.append(starts[-1] + np.diff(index, append=len(place)))
        first = of_document[document[index]]
        first_keys.append(b * S + (first if window is None else np.maximum(first, start - window + 1)))
    return np.concatenate(starts), np.concatenate(ends), np.concatenate(first_keys)


def _after_prefixes(start: np.ndarray, end: np.ndarray, ids_BS: np.ndarray, prefix_BS: np.ndarray) -> AttentionLayout:
    """The layout of documents, some of which go on after another one."""
    row = (start // ids_BS.shape[1]).tolist()
    own, other = (ids.reshape(-1)[start].tolist() for ids in (ids_BS, prefix_BS))
    number_of = {document: number for number, document in enumerate(zip(row, own, strict=True))}
    none = len(start)  # an empty range
    before = [none if place[1] < 0 else number_of[place] for place in zip(row, other, strict=True)]
    starts, ends = (np.append(bounds, 0) for bounds in (start, end))
    pairs = [np.stack([bounds[before], bounds[:-1]], 1) for bounds in (starts, ends)]
    lengths, keys = end - start, (pairs[1] - pairs[0]).sum(1)
    exchange = KeyExchange(_ranges(*(bounds.reshape(-1) for bounds in pairs)))
    return AttentionLayout(cumulative(lengths), cumulative(keys), longest(lengths), longest(keys), None, exchange)


def _ring(start: np.ndarray, end: np.ndarray, first_key: np.ndarray, tokens_RN: np.ndarray, rank: int) -> KeyRing:
    """The parts of a rank's runs, which begin with the tokens ``start``."""
    own = tokens_RN[rank]
    first_query, parts = np.searchsorted(own, start), []
    for distance in range(len(tokens_RN)):
        tokens = tokens_RN[rank - distance]
        # Of its own keys a run sees those up to its end, of others those before it: no chunk of a rank splits a run.
        first, stop = np.searchsorted(tokens, first_key), np.searchsorted(tokens, start if distance else end)
        sees = stop > first
        lengths, keys = (end - start)[sees], (stop - first)[sees]
        cu_seq_q, cu_seq_k = cumulative(lengths), cumulative(keys)
        parts.append(RingPart(
            _ranges(first_query[sees], first_query[sees] + lengths), _ranges(first[sees], stop[sees]),
            AttentionLayout(cu_seq_q, cu_seq_k, longest(lengths), longest(keys), None),
        ))  # fmt: skip
    return KeyRing(parts)


def _ranges(start: np.ndarray, end: np.ndarray) -> Tensor:
    """The numbers of several ranges behind each other, int64."""
    lengths = np.maximum(end - start, 0)
    before = lengths.cumsum() - lengths
    return torch.from_numpy(np.arange(lengths.sum()) + (start - before).repeat(lengths))


def _exchange(
    ids_BS: np.ndarray, places_BRS: np.ndarray, tokens_RN: np.ndarray, window: int, rank: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each rank the own tokens that it needs, by their number on this rank, and its tokens that this rank needs."""
    sent, received = [], []
    for other in range(len(tokens_RN)):
        _, end, first_key = _runs(ids_BS, places_BRS[:, other], window)
        change = np.bincount(first_key, minlength=ids_BS.size + 1) - np.bincount(end, minlength=ids_BS.size + 1)
        is_needed = change.cumsum() > 0
        sent.append(np.flatnonzero(is_needed[tokens_RN[rank]]))
        if other == rank:
            received = [tokens[is_needed[tokens]] for tokens in tokens_RN]
    return sent, received


def cumulative(lengths: np.ndarray) -> Tensor:
    """int32 [runs + 1], with empty runs at the end (`kernel_runs`)."""
    ends = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return torch.from_numpy(np.pad(ends, (0, kernel_runs(len(lengths)) - len(lengths)), mode="edge"))


def longest(lengths: np.ndarray) -> int:
    """The next power of two after the largest length, at least 256.

    Kernels only take their number of blocks from it, and skip blocks without tokens. cuDNN makes a plan for each number
    that it meets. 256 at least: `varlen_attn` asks whether it is above 128, and a compiled layer would be compiled for
    both answers.
    """
    return max(256, 1 << (int(lengths.max(initial=1)) - 1).bit_length())
