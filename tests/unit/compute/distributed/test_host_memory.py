"""Pinned memory, with a stand-in for CUDA."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from glm46.compute.distributed.host_memory import host_tensor
from glm46.compute.optim.muon_layout import zeros_in_host_memory
from glm46.compute.optim.state_file import StateRing
from glm46.run.sizes import OFFLOAD_SLOTS
from glm46.storage.checkpoint import background

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
