"""Pinned memory and events of a device, with stand-ins for CUDA."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from glm46.compute.distributed.device_time import OwnDeviceTime, waiting_for_ranks
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


class Device:
    """A stream that does its work at once, unless it lags behind its host."""

    def __init__(self):
        self.milliseconds, self.events, self.is_done = 0.0, 0, True

    def event(self) -> "Event":
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device, self.at = device, None

    def record(self) -> None:
        self.at = self.device.milliseconds

    def query(self) -> bool:
        return self.device.is_done

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.device.is_done, "a host that asks would wait"
        return end_event.at - self.at


class Layer(nn.Module):
    """Works, waits for others, works."""

    def __init__(self, device: Device, work: float, wait: float):
        super().__init__()
        self.device, self.work, self.wait = device, work, wait

    def forward(self, x: float) -> float:
        self.device.milliseconds += self.work
        with waiting_for_ranks():
            self.device.milliseconds += self.wait
        if x < 0:
            raise ValueError("not this one")
        self.device.milliseconds += self.work
        return x


def test_own_time_is_the_first_forward_of_each_layer_without_waits():
    device = Device()
    layers = [Layer(device, 10.0, 500.0), Layer(device, 20.0, 0.0)]
    own = OwnDeviceTime(layers, device.event)
    layers[0](0.0)  # a validation before the first step
    assert own.seconds() == 0.0 and device.events == 0
    for factor in (1.0, 2.0, 3.0):
        own.step_begins()
        for micro_batch in range(3):
            for layer in layers:
                device.milliseconds += 1000.0  # between layers the stream waits for FSDP2's gather
                layer.work *= factor if micro_batch == 0 else 1.0
                layer(0.0)
    # The step before the last one: 2 * (10 + 20) ms, times 1, times 2.
    assert own.seconds() == pytest.approx(0.12)
    assert device.events == 3 * 2 * 4  # begin and end of a layer and of its wait; other micro-batches cost nothing


def test_the_host_never_waits_for_the_device():
    device = Device()
    layer = Layer(device, 10.0, 0.0)
    own = OwnDeviceTime([layer], device.event)
    for _ in range(2):
        own.step_begins()
        layer(0.0)
    assert own.seconds() == pytest.approx(0.02)
    layer.work = 50.0
    for _ in range(2):
        own.step_begins()
        layer(0.0)
    device.is_done = False
    assert own.seconds() == pytest.approx(0.02)  # what was known before
    device.is_done = True
    assert own.seconds() == pytest.approx(0.1)


def test_a_layer_that_fails_ends_its_measurement():
    device = Device()
    layer = Layer(device, 10.0, 0.0)
    own = OwnDeviceTime([layer], device.event)
    own.step_begins()
    with pytest.raises(ValueError):
        layer(-1.0)
    events = device.events
    with waiting_for_ranks():
        pass
    assert device.events == events
