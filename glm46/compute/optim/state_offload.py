"""Offload of optimizer states to host memory or a file; they are on the device only while they are used.

A step uses its states in a fixed order of items. While one item is updated, the next one is copied to the device and
the previous one to the host, in three slots of device memory and one stream per direction; a file adds a ring of host
buffers. States that stay on the device pass through the same class without a copy, so all kinds of run do the same
arithmetic.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from glm46.compute.optim.compact_state import State, copy_states, packed_bytes, views_like
from glm46.compute.optim.muon_layout import Zeros, zeros_in_host_memory, zeros_on_device
from glm46.compute.optim.state_file import StateFile, StateRing
from glm46.run.sizes import OFFLOAD_SLOTS

StatePlace = Literal["none", "cpu"] | StateFile
"""Location of states between steps: the device, host memory, or a file."""


def zeros_at(place: StatePlace) -> Zeros:
    """Return the function that creates states at a place."""
    if isinstance(place, StateFile):
        return place.zeros
    return zeros_on_device if place == "none" else zeros_in_host_memory


class StateStream:
    """States of one optimizer, item by item: call ``begin``, then ``take`` once per item in order, then ``end``."""

    def __init__(self, items: Sequence[Sequence[State]], device: torch.device, place: StatePlace):
        """``items`` are this rank's views of the states, disjoint; ``device`` updates them."""
        self._items = items
        self._device = device
        self._is_offloaded = place != "none"
        self._slot_bytes = max(map(packed_bytes, items), default=0)
        self._next = 0
        self._staged: Sequence[State] = ()
        self._on_gpu = self._is_offloaded and device.type == "cuda"
        self._ring = StateRing(items, self._slot_bytes, pin=self._on_gpu) if isinstance(place, StateFile) else None
        if self._on_gpu:
            self._inward_stream = torch.cuda.Stream(device)
            self._outward_stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Allocate the slots and start to copy the first item."""
        self._next = 0
        if not self._is_offloaded or not self._items:
            return
        self._slots = torch.empty(OFFLOAD_SLOTS, self._slot_bytes, dtype=torch.uint8, device=self._device)
        self._stored_events = [None] * OFFLOAD_SLOTS
        if self._ring is not None:
            self._ring.begin()
        if self._on_gpu:
            # Earlier work on the memory of the slots may still be queued.
            self._inward_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._load(0)

    @contextmanager
    def take(self) -> Iterator[Sequence[State]]:
        """Context with the states of the next item on the device. Leaving it stores their changes."""
        number = self._next
        self._next += 1
        if not self._is_offloaded:
            yield self._items[number]
            return
        staged = self._staged
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._inward_stream)
        if self._next < len(self._items):
            self._load(self._next)
        yield staged
        self._store(number, staged)

    def end(self) -> None:
        """Wait until all states are stored, so that checkpoints can read them without waiting for streams."""
        assert self._next == len(self._items), "a step must take every item"
        if self._on_gpu:
            self._outward_stream.synchronize()
        if self._ring is not None:
            self._ring.end()
        self._slots = torch.empty(0)
        self._staged = ()

    def _load(self, number: int) -> None:
        source = self._items[number] if self._ring is None else self._ring.fetch(number)
        self._staged = views_like(source, self._slots[number % OFFLOAD_SLOTS])
        if not self._on_gpu:
            copy_states(self._staged, source)
            return
        if (stored := self._stored_events[number % OFFLOAD_SLOTS]) is not None:
            self._inward_stream.wait_event(stored)
        with torch.cuda.stream(self._inward_stream):
            copy_states(self._staged, source)

    def _store(self, number: int, staged: Sequence[State]) -> None:
        target = self._items[number] if self._ring is None else self._ring.slot(number)
        if not self._on_gpu:
            copy_states(target, staged)
        else:
            self._outward_stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._outward_stream):
                copy_states(target, staged)
                self._stored_events[number % OFFLOAD_SLOTS] = self._outward_stream.record_event()
        if self._ring is not None:
            self._ring.put(number, self._stored_events[number % OFFLOAD_SLOTS])
