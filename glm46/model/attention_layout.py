"""Who sees whom in a batch, in memory that grows with the number of documents: no mask of queries and keys exists."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class AttentionLayout(NamedTuple):
    """Runs of consecutive queries, each with its own run of keys, as `torch.nn.attention.varlen` takes them.

    Queries are the tokens [B, S] of this rank behind each other, row by row. The last query of a run sees all keys of
    the run, each query before it one key fewer. A run is a document, or the part of a document that a context-parallel
    rank holds; its keys then start with the document, or with the window of its first query.
    """

    cu_seq_q: Tensor
    """int32 [runs + 1]: first query of each run, and the number of queries."""
    cu_seq_k: Tensor
    """int32 [runs + 1]: the same for keys. The same object as cu_seq_q if each run has as many keys as queries: cuDNN
    takes causal attention only then."""
    max_q: int
    """Queries of the longest run."""
    max_k: int
    """Keys of the run with most keys."""
    window: int | None
    """Most keys that a query sees, its own included; None for all."""
    keys: Tensor | None
    """int64 [keys]: for each key of the runs, its place among the keys [ranks, B, S / ranks] that context parallelism
    gathers, flattened. None: the runs take the keys of this rank's tokens in their order."""

    def pin_memory(self) -> "AttentionLayout":
        """A copy in page-locked memory."""
        return self._with(Tensor.pin_memory)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "AttentionLayout":
        """A copy on a device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _with(self, copy: Callable[[Tensor], Tensor]) -> "AttentionLayout":
        cu_seq_q = copy(self.cu_seq_q)
        cu_seq_k = cu_seq_q if self.cu_seq_k is self.cu_seq_q else copy(self.cu_seq_k)
        return self._replace(cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, keys=None if self.keys is None else copy(self.keys))


def attention_layout(
    document_ids: Tensor | None, size: tuple[int, int], window: int | None, places: Tensor | None = None, rank: int = 0
) -> AttentionLayout | None:
    """The layout of whole rows, or of the part of them that a context-parallel rank holds, on the CPU.

    Args:
        document_ids: integer [B, S], equal inside a document and different in neighbours; None if each row is one.
        size: B and S.
        window: most keys that a query sees, its own included; None for all.
        places: int64 [B, ranks, S / ranks], the tokens of each rank, ascending; None without context parallelism.
        rank: of the context-parallel group.

    Returns:
        None for rows that are plainly causal, which have a kernel of their own.
    """
    if document_ids is None and window is None and places is None:
        return None
    B, S = size
    ids_BS = np.zeros(size, np.int64) if document_ids is None else document_ids.cpu().numpy()
    place_BS = np.broadcast_to(np.arange(S), size) if places is None else places[:, rank].numpy()
    starts, ends, first_keys = [], [], []  # of the runs, in tokens of the whole batch
    for b in range(B):
        of_document = np.flatnonzero(np.diff(ids_BS[b], prepend=ids_BS[b, 0] - 1))
        document = np.searchsorted(of_document, place_BS[b], side="right") - 1
        is_first = np.diff(place_BS[b], prepend=-2) != 1
        is_first |= np.diff(document, prepend=-1) != 0
        index = np.flatnonzero(is_first)
        start = place_BS[b, index]
        starts.append(b * S + start)
        ends.append(starts[-1] + np.diff(index, append=place_BS.shape[1]))
        first = of_document[document[index]]
        first_keys.append(b * S + (first if window is None else np.maximum(first, start - window + 1)))
    start, end, first_key = (np.concatenate(values) for values in (starts, ends, first_keys))
    cu_seq_q, cu_seq_k = _cumulative(end - start), _cumulative(end - first_key)
    max_q, max_k = int((end - start).max()), int((end - first_key).max())
    if places is None:
        return AttentionLayout(cu_seq_q, cu_seq_q, max_q, max_k, window, None)
    # Where each token of the whole batch is among the gathered keys.
    gathered = (places + torch.arange(B).view(B, 1, 1) * S).transpose(0, 1).flatten()
    at = torch.empty_like(gathered).scatter_(0, gathered, torch.arange(B * S))
    tokens = np.concatenate([np.arange(a, b) for a, b in zip(first_key.tolist(), end.tolist(), strict=True)])
    return AttentionLayout(cu_seq_q, cu_seq_k, max_q, max_k, window, at[torch.from_numpy(tokens)])


def _cumulative(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
