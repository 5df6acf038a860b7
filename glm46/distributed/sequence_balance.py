"""Which rank of a context-parallel group computes which tokens of a row, so that attention costs each the same.

Under causal attention a token costs as many keys as it sees: its place in its document, at most the window. Every rank
gets the same number of tokens of every row, because shapes must not depend on the text.
"""

import heapq

import numpy as np


def balanced_places(document_ids: np.ndarray, ranks: int, window: int | None) -> np.ndarray:
    """Places of each rank's tokens in a row, ascending: int64 [ranks, S / ranks].

    Of each document the part where cost grows is cut into two chunks per rank, of which one rank gets the first and the
    last, the next the second and the last but one, and so on: the sums are equal. The part where the window is full
    costs the same everywhere and is cut into one chunk per rank. What such cuts leave over are a few of the document's
    first tokens, its cheapest; these runs are dealt out so that all ranks get as many, of like lengths.

    Args:
        document_ids: integers [S], equal inside a document and different in neighbours; `ranks` divides S.
        window: most keys that a token sees; None for all before it in its document.
    """
    starts = np.flatnonzero(np.diff(document_ids, prepend=document_ids[0] - 1))
    lengths = np.diff(starts, append=len(document_ids))
    mirrored = np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]])
    owner = np.empty(len(document_ids), np.int64)
    left_over = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        flat = 0 if window is None else max(length - window, 0) // ranks
        chunk = (length - ranks * flat) // (2 * ranks)
        rest = length - ranks * (flat + 2 * chunk)
        if rest:
            left_over.append((rest, start))
        grows, stays = start + rest, start + rest + 2 * ranks * chunk
        owner[grows:stays] = mirrored.repeat(chunk)
        owner[stays : start + length] = np.arange(ranks).repeat(flat)
    if left_over:
        tokens = _deal(left_over, ranks)
        owner[tokens] = np.arange(len(tokens)) // (len(tokens) // ranks)
    return owner.argsort(kind="stable").reshape(ranks, -1)


def _deal(runs: list[tuple[int, int]], ranks: int) -> np.ndarray:
    """Tokens of runs (length, start) in an order whose equal parts are made of runs of like lengths."""
    hands: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    held = [(0, rank) for rank in range(ranks)]
    for length, start in sorted(runs, key=lambda run: (-run[0], run[1])):
        tokens, rank = held[0]
        hands[rank].append(np.arange(start, start + length))
        heapq.heapreplace(held, (tokens + length, rank))
    return np.concatenate([run for hand in hands for run in hand])
