"""Numbers of all ranks, combined along a tree: their result on any number of ranks, and the rounds that it takes."""

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from glm46.compute.distributed import agreement
from glm46.operate.estimate.plan_sizes import tree_rounds
from glm46.run.tree import neighbours
from tests.processes import HANG_SECONDS


class Threads:
    """`torch.distributed` of ranks that are threads. A message carries the number of messages before it."""

    def __init__(self, ranks: int):
        self.ranks, self.own, self.sent = ranks, threading.local(), 0
        self._queues = defaultdict(queue.Queue)

    def get_rank(self) -> int:
        return self.own.rank

    def get_world_size(self) -> int:
        return self.ranks

    def isend(self, tensor, peer):
        self.sent += 1
        self._queues[self.own.rank, peer].put((tensor.clone(), self.own.clock + 1))
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor, peer):
        arrived = self._queues[peer, self.own.rank]

        def wait():
            found, clock = arrived.get(timeout=HANG_SECONDS)
            tensor.copy_(found)
            self.own.clock = max(self.own.clock, clock)

        return SimpleNamespace(wait=wait)


def run(ranks: int, work, monkeypatch):
    """Results of the ranks, the most messages that follow each other, and the number of messages."""
    world, results, clocks = Threads(ranks), [None] * ranks, [0] * ranks
    monkeypatch.setattr(agreement, "dist", world)

    def of_rank(rank: int) -> None:
        world.own.rank, world.own.clock = rank, 0
        results[rank] = work(rank)
        clocks[rank] = world.own.clock

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, max(clocks), world.sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 32, 65])
def test_all_ranks_get_the_bits_of_one_sum_in_few_rounds(ranks, monkeypatch):
    parts = torch.randn(ranks, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(ranks))
    results, longest, sent = run(ranks, lambda rank: agreement.combine_on_host(parts[rank]), monkeypatch)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], parts.sum(0), rtol=1e-12, atol=1e-12)
    assert longest <= tree_rounds(ranks) and sent == 2 * (ranks - 1)


def test_low_ranks_stand_before_high_ones(monkeypatch):
    """So that of equal values the last rank can be taken."""

    def joined(low, high):
        return torch.stack([low[0], high[1]]) if low[1] + 1 == high[0] else torch.full((2,), -1)

    results, _, _ = run(21, lambda rank: agreement.combine_on_host(torch.tensor([rank, rank]), joined), monkeypatch)
    assert [result.tolist() for result in results] == [[0, 20]] * 21


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0), (4, 2), (8, 4), (32, 6), (64, 6), (8192, 14)])
def test_rounds_grow_with_the_logarithm_of_the_ranks(ranks, expected):
    assert tree_rounds(ranks) == expected
    parents = {child: rank for rank in range(ranks) for child in neighbours(rank, ranks)[1]}
    assert parents == {rank: neighbours(rank, ranks)[0] for rank in range(1, ranks)}  # each has one parent
    assert max(len(neighbours(rank, ranks)[1]) for rank in range(ranks)) <= 3 * expected // 2
