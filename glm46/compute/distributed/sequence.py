"""Division of the tokens of a row among the ranks of a context-parallel group, with equal attention cost for each.

Under causal attention the cost of a token is the number of keys that it attends to: its position in its document,
limited by the window. Every rank gets the same number of tokens of every row, because shapes must not depend on the
text.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.local_tensor import copy_to_device


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of every row, divided by `balanced_places`."""

    group: dist.ProcessGroup
    ranks: int
    rank: int

    def places(self, document_ids: Tensor | None, size: Sequence[int], window: int | None) -> Tensor:
        """Compute the positions of each rank's tokens in every row, ascending: int64 [B, ranks, S / ranks].

        Args:
            document_ids: [B, S] on the CPU, by which each row is divided; None divides all rows equally.
            size: B and S.
            window: maximum number of keys that a token attends to; None for no limit.
        """
        B, S = size
        if document_ids is None:
            return torch.from_numpy(balanced_places(np.zeros(S, np.int64), self.ranks, window)).expand(B, -1, -1)
        return torch.from_numpy(np.stack([balanced_places(row, self.ranks, window) for row in document_ids.numpy()]))

    def cut(self, rows: dict[str, Tensor], places_BRS: Tensor) -> dict[str, Tensor]:
        """Return this rank's part of tensors [B, S], [B, K, S] or [B, S, L, A] on the CPU, by the result of
        `places`."""
        return {name: _pick(tensor, places_BRS[:, self.rank]) for name, tensor in rows.items()}

    def restore(self, part: Tensor, places_BRS: Tensor) -> Tensor:
        """Restore full rows [N, B, S] from every rank's part [N, B, S / ranks]; without gradient. Collective."""
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        gathered = torch.cat(parts, dim=-1)
        order = copy_to_device(places_BRS.flatten(1), part.device).expand_as(gathered)
        return torch.empty_like(gathered).scatter_(-1, order, gathered)


def _pick(tensor: Tensor, places_BS: Tensor) -> Tensor:
    if tensor.ndim == 4:  # [B, S, L, A], see `SequenceShard.cut`
        return tensor[torch.arange(len(tensor)).unsqueeze(1), places_BS]
    if tensor.ndim == 3:
        places_BS = places_BS.unsqueeze(1).expand(-1, tensor.shape[1], -1)
    return tensor.gather(-1, places_BS)


def balanced_places(document_ids: np.ndarray, ranks: int, window: int | None) -> np.ndarray:
    """Compute the positions of each rank's tokens in a row, ascending: int64 [ranks, S / ranks].

    The part of a document where cost grows is cut into two chunks per rank: the first rank gets the first and the last
    chunk, the second rank the second and the second-to-last, and so on, so that the sums are equal. The part where the
    window is full has constant cost and is cut into one chunk per rank. The remainder is a few first tokens of the
    document, the cheapest ones; these runs are distributed so that all ranks get equal numbers, of similar lengths.

    Args:
        document_ids: integers [S], equal inside a document and different between neighbours; `ranks` divides S.
        window: maximum number of keys that a token attends to; None for all earlier ones in its document.
    """
    starts = np.flatnonzero(np.diff(document_ids, prepend=document_ids[0] - 1))
    lengths = np.diff(starts, append=len(document_ids))
    mirrored_ranks = np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]])
    owner = np.empty(len(document_ids), np.int64)
    remainders = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        flat_chunk = 0 if window is None else max(length - window, 0) // ranks
        chunk = (length - ranks * flat_chunk) // (2 * ranks)
        remainder = length - ranks * (flat_chunk + 2 * chunk)
        if remainder:
            remainders.append((remainder, start))
        growing_start = start + remainder
        flat_start = start + remainder + 2 * ranks * chunk
        owner[growing_start:flat_start] = mirrored_ranks.repeat(chunk)
        owner[flat_start : start + length] = np.arange(ranks).repeat(flat_chunk)
    if remainders:
        tokens = _deal(remainders, ranks)
        owner[tokens] = np.arange(len(tokens)) // (len(tokens) // ranks)
    return owner.argsort(kind="stable").reshape(ranks, -1)


def _deal(runs: list[tuple[int, int]], ranks: int) -> np.ndarray:
    """Order the tokens of runs (length, start) so that equal parts consist of runs of similar lengths."""
    runs_of_rank: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for length, start in sorted(runs, key=lambda run: (-run[0], run[1])):
        rank_tokens, rank = heap[0]  # the rank with the fewest tokens so far
        runs_of_rank[rank].append(np.arange(start, start + length))
        heapq.heapreplace(heap, (rank_tokens + length, rank))
    return np.concatenate([run for rank_runs in runs_of_rank for run in rank_runs])
