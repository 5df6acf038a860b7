"""Process groups, and what their ranks share: one error, one sum, the rows of a sequence.

Pinned memory, with a stand-in for CUDA.
"""

import gc
import mmap
import queue
import threading
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from glm46 import compat
from glm46.compute.distributed import agreement, groups, mesh
from glm46.compute.distributed.collective_errors import raise_on_all_ranks
from glm46.compute.distributed.host_memory import host_tensor
from glm46.compute.distributed.process import join, leave
from glm46.compute.distributed.sequence import balanced_places
from glm46.compute.optim.muon_layout import zeros_in_host_memory
from glm46.compute.optim.state_file import StateRing
from glm46.config.errors import UnreadableError, UserError
from glm46.config.loader import load_config
from glm46.operate.estimate.plan_sizes import tree_rounds
from glm46.run.layout import Layout, resolve_layout
from glm46.run.sizes import OFFLOAD_SLOTS
from glm46.run.tree import neighbours
from glm46.storage.checkpoint import background
from tests.gpu import one_rank
from tests.gpu.one_rank import CASES
from tests.processes import HANG_SECONDS

TIMEOUT = timedelta(seconds=77)


@pytest.fixture
def world():
    """Begins a job of one rank of many, whose other ranks do nothing."""

    def begin(size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    yield begin
    dist.destroy_process_group()


@pytest.fixture
def made(monkeypatch):
    """The divisions of the ranks for which groups were made, each as the ranks of its parts."""
    found, real = [], mesh.group_of_partition

    def recorded(parts):
        found.append(tuple(map(tuple, parts.tolist())))
        return real(parts) if len(parts) <= 64 else dist.new_group(list(found[-1][0]))  # those of rank 0 are enough

    monkeypatch.setattr(mesh, "group_of_partition", recorded)
    monkeypatch.setattr(groups.compat, "group_timeout", lambda group: TIMEOUT)
    monkeypatch.setattr(groups.compat, "set_group_timeout", lambda timeout, group: None)
    return found


def layout_of(size, **degrees):
    neutral = {"dp_replicate": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    degrees = neutral | degrees
    shard = size // (degrees["pp"] * degrees["dp_replicate"] * degrees["cp"] * degrees["tp"])
    return Layout(dp_shard=shard, **degrees)


@pytest.mark.parametrize(
    ("size", "degrees", "most"),
    [
        (64, {"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 2, "ep": 4}, 7),  # pp, replicas, shards, tp; cp; efsdp, ep
        (64, {"dp_replicate": 2, "ep": 32}, 3),  # shards have the same ranks as experts, of which each rank has some
        (64, {"cp": 64}, 1),  # all ranks
        (64, {"tp": 8, "ep": 8}, 2),  # a node is both
    ],
)
def test_no_group_is_made_twice_and_none_without_use(world, made, size, degrees, most):
    layout = layout_of(size, **degrees)
    world(size)
    meshes = mesh.build_meshes(layout, "cpu")
    assert len(made) == len(set(made)) <= most + (("ep" in degrees or "tp" in degrees) and layout.expert_shards == 1)
    used = {dist.get_process_group_ranks(group)[-1] for group in meshes.groups().values()}
    assert used <= {parts[0][-1] for parts in made}
    assert meshes.dense.mesh_dim_names[-1] == "shard" and meshes.dense.size(-1) == layout.dense_shards


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_run_on_8192_ranks_makes_at_most_eight_groups(world, made, phase):
    config = load_config(Path("train_configs", f"glm46_phase{phase}.toml"))
    layout = resolve_layout(config.parallelism, 8192)
    world(8192)
    mesh.build_meshes(layout, "cpu")
    assert len(made) <= 7  # and the group of all ranks


def test_a_group_has_the_timeout_of_the_job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    try:
        of_torch = dist.new_group([0])
        assert compat.group_timeout(of_torch) != TIMEOUT, "the reason for this file"
        assert compat.group_timeout(groups.new_group([0])) == TIMEOUT
        compat.set_group_timeout(TIMEOUT, of_torch)
        assert compat.group_timeout(of_torch) == TIMEOUT
    finally:
        dist.destroy_process_group()


def test_all_ranks_are_the_group_that_exists(world):
    world(4)
    assert groups.group_of_partition(torch.arange(4).view(1, 4)) is dist.group.WORLD


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


IN_WORKER = 'Caught {0} in DataLoader worker process 0.\nTraceback:\n  File "x"\n{0}: a.bin: bytes 4 to 7\n'
"""As torch's loader words the error of a worker."""


@pytest.fixture
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (UnreadableError, 1)])
def test_the_error_of_a_rank_keeps_its_exit_code_and_loses_the_traceback_of_a_worker(group, kind, code):
    text = IN_WORKER.format(f"{kind.__module__}.{kind.__qualname__}")
    with pytest.raises(kind) as raised:
        raise_on_all_ranks(kind(text))
    assert (raised.value.faults, raised.value.exit_code) == (("a.bin: bytes 4 to 7",), code)


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield join(60)
    leave()


@pytest.mark.parametrize("case", CASES)
def test_a_path_between_ranks_works_by_gloo(case, process):
    CASES[case](process)
    assert one_rank.still_work(process)


def keys_seen(document_ids: np.ndarray, window: int | None) -> np.ndarray:
    """Number of keys that each token sees."""
    starts = np.flatnonzero(np.diff(document_ids, prepend=document_ids[0] - 1))
    lengths = np.diff(starts, append=len(document_ids))
    seen = np.concatenate([np.arange(1, length + 1) for length in lengths])
    return seen if window is None else np.minimum(seen, window)


def row(lengths, size: int) -> np.ndarray:
    """Document ids of documents in this order, cut at the end of the row; -1 where there are none."""
    ids = np.repeat(np.arange(len(lengths)), lengths)[:size]
    return np.concatenate([ids, np.full(size - len(ids), -1)])


def costs(document_ids: np.ndarray, ranks: int, window: int | None) -> np.ndarray:
    places = balanced_places(document_ids, ranks, window)
    assert places.shape == (ranks, len(document_ids) // ranks)
    assert np.array_equal(np.sort(places, axis=None), np.arange(len(document_ids)))
    assert (np.diff(places, axis=1) > 0).all()
    return keys_seen(document_ids, window)[places].sum(1)


SIZE = 4096
PACKINGS = {
    "one document": lambda ranks: [SIZE],
    "one long, then single tokens": lambda ranks: [SIZE // 2] + [1] * SIZE,
    "single tokens, then one long": lambda ranks: [1] * (SIZE // 2) + [SIZE],
    "the long one comes after a short one": lambda ranks: [2 * ranks + 1, SIZE],
    "too short to be cut": lambda ranks: [2 * ranks - 1] * SIZE,
    "growing": lambda ranks: range(1, 200),
    "half the row is padding": lambda ranks: [300, 1000, SIZE // 2 - 1300],
    "as of text": lambda ranks: np.random.default_rng(0).lognormal(5.0, 1.5, SIZE).astype(int) + 1,
}


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_busiest_rank_has_hardly_more_to_do_than_the_mean(packing, ranks, window):
    found = costs(row(PACKINGS[packing](ranks), SIZE), ranks, window)
    # What cannot be cut evenly are documents shorter than two tokens per rank: 0.34 % where there is nothing else.
    assert found.max() / found.mean() < 1.005


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    window=st.sampled_from([None, 1, 7, 64]),
)
def test_no_rank_has_more_than_a_few_keys_per_token_more(lengths, ranks, window):
    size = 24 * ranks * 2
    found = costs(row(lengths, size), ranks, window)
    # Only first tokens of documents are dealt unevenly, and each of them sees fewer than 3 keys per rank.
    assert found.max() - found.min() <= 3 * ranks * size / ranks


def test_a_document_is_cut_into_two_runs_per_rank_and_three_with_a_window():
    for window, runs in ((None, 2), (96, 3)):
        places = balanced_places(np.zeros(SIZE, np.int64), 4, window)
        assert ((np.diff(places, axis=1) != 1).sum(1) + 1).max() <= runs


def test_head_and_tail_of_each_document_go_to_one_rank():
    places = balanced_places(np.repeat([0, 1], [8, 16]), 2, None)
    assert places[0].tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert places[1].tolist() == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]


SIZES = ((3, 7), (1000, 333), (5,))


@pytest.fixture
def pinned(monkeypatch) -> dict[int, int]:
    """Bytes that are pinned now, by address."""
    ranges: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        pages = {a // mmap.PAGESIZE: -(-(a + n) // mmap.PAGESIZE) for a, n in [*ranges.items(), (address, size)]}
        bounds = [bound for first in sorted(pages) for bound in (first, pages[first])]
        if len(pages) == len(ranges) or bounds != sorted(bounds):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        ranges[address] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=ranges.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return ranges


def test_states_and_their_ring_pin_exactly_their_bytes_and_release_them(pinned):
    beside_gpu = SimpleNamespace(is_cuda=True)
    states = [zeros_in_host_memory(torch.Size(size), torch.float32, beside_gpu) for size in (*SIZES, (0, 4))]
    assert [*pinned.values()] == [4 * torch.Size(size).numel() for size in SIZES]
    assert all(tuple(pinned)[n] == states[n].data_ptr() for n in range(len(SIZES)))
    assert all(not state.any() and state.is_contiguous() for state in states) and states[-1].shape == (0, 4)
    ring = StateRing([states], 12345, pin=True)
    assert [*pinned.values()][-1] == OFFLOAD_SLOTS * 12345
    part = states[1][5:7]  # a view keeps the memory
    del ring, states
    gc.collect()
    assert list(pinned.values()) == [4 * 1000 * 333]
    del part
    gc.collect()
    assert not pinned


def test_staging_pins_one_range(pinned):
    like = {str(size): SimpleNamespace(is_cuda=True, shape=torch.Size(size), dtype=torch.float32,
                                       nbytes=4 * torch.Size(size).numel()) for size in SIZES}  # fmt: skip
    copies = background._allocate(like)
    # Each tensor begins at a multiple of 64 bytes.
    assert [*pinned.values()] == [128 + 1_332_032 + 64]
    assert [tuple(copy.shape) for copy in copies.values()] == [*SIZES]


def test_what_cuda_refuses_is_an_error(monkeypatch):
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(MemoryError, match=r"cannot pin 84 bytes of host memory \(error 2\); see ulimit -l"):
        host_tensor((3, 7), torch.float32, pin=True)


def test_without_a_gpu_nothing_is_pinned(pinned):
    state = zeros_in_host_memory(torch.Size((3, 7)), torch.bfloat16, torch.zeros(1))
    assert state.dtype == torch.bfloat16 and state.shape == (3, 7) and not state.any() and not pinned
