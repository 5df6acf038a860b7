"""Optimizer states in host memory, on the device only while they are used.

A step uses its states in a fixed order of items. While one item is updated, the next one is copied to the device and
the previous one to the host, in three slots of device memory and one stream per direction. States that stay on the
device pass through the same class without a copy, so both kinds of run do the same arithmetic.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from glm46.optim.compact_state import Quantized, state_parts

State = Tensor | Quantized

# One is copied in, one is updated, one is copied out.
SLOTS = 3

# Enough for every type and every copy engine.
_ALIGNMENT = 256


class StateStream:
    """The states of one optimizer, item by item: ``begin``, then ``take`` once per item in order, then ``end``."""

    def __init__(self, items: Sequence[Sequence[State]], device: torch.device, *, is_offloaded: bool):
        """``items`` are this rank's views of the states, disjoint; ``device`` updates them."""
        self._items, self._device, self._is_offloaded = items, device, is_offloaded
        sizes = [sum(_aligned(tensor) for state in item for tensor in state_parts(state)) for item in items]
        self._slot_bytes = max(sizes, default=0)
        self._next = 0
        self._on_gpu = is_offloaded and device.type == "cuda"
        if self._on_gpu:
            self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def begin(self) -> None:
        """Make the slots and start to copy the first item."""
        self._next = 0
        if not self._is_offloaded or not self._items:
            return
        self._slots = torch.empty(SLOTS, self._slot_bytes, dtype=torch.uint8, device=self._device)
        self._left = [None] * SLOTS
        if self._on_gpu:
            # Work that used the memory of the slots before may still be queued.
            self._inward.wait_stream(torch.cuda.current_stream(self._device))
        self._load(0)

    @contextmanager
    def take(self) -> Iterator[Sequence[State]]:
        """The states of the next item on the device. Leaving the block stores what was written to them."""
        number, self._next = self._next, self._next + 1
        if not self._is_offloaded:
            yield self._items[number]
            return
        staged = self._staged
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._inward)
        if self._next < len(self._items):
            self._load(self._next)
        yield staged
        self._store(number, staged)

    def end(self) -> None:
        """Wait until all states are back, so that checkpoints can read them without waiting for streams."""
        assert self._next == len(self._items), "a step must take every item"
        if self._on_gpu:
            self._outward.synchronize()
        self._slots, self._staged = None, ()

    def _load(self, number: int) -> None:
        self._staged = _views_like(self._items[number], self._slots[number % SLOTS])
        if not self._on_gpu:
            _copy(self._staged, self._items[number])
            return
        if (left := self._left[number % SLOTS]) is not None:
            self._inward.wait_event(left)
        with torch.cuda.stream(self._inward):
            _copy(self._staged, self._items[number])

    def _store(self, number: int, staged: Sequence[State]) -> None:
        if not self._on_gpu:
            _copy(self._items[number], staged)
            return
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            _copy(self._items[number], staged)
            self._left[number % SLOTS] = self._outward.record_event()


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _views_like(item: Sequence[State], slot: Tensor) -> list[State]:
    """Contiguous tensors within ``slot`` with the types and shapes of an item."""
    views: list[State] = []
    start = 0
    for state in item:
        parts = []
        for tensor in state_parts(state):
            size = tensor.numel() * tensor.element_size()
            parts.append(slot[start : start + size].view(tensor.dtype).view(tensor.shape))
            start += _aligned(tensor)
        views.append(Quantized(*parts, state.signed) if isinstance(state, Quantized) else parts[0])
    return views


def _copy(targets: Sequence[State], sources: Sequence[State]) -> None:
    for target, source in zip(targets, sources, strict=True):
        for to, of in zip(state_parts(target), state_parts(source), strict=True):
            _copy_tensor(to, of)


def _copy_tensor(target: Tensor, source: Tensor) -> None:
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    # torch would copy a non-contiguous view to a new host tensor first and wait. Copy it by rows, which are contiguous.
    for to, of in zip(target, source, strict=True):
        _copy_tensor(to, of)
