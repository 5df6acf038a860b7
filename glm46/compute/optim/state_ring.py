"""Host memory between a file of optimizer states and the device: items are read ahead and written back behind."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from glm46.compute.distributed.host_memory import host_tensor
from glm46.compute.optim.compact_state import State, copy_states, views_like
from glm46.run.sizes import OFFLOAD_SLOTS

_THREADS = 2
"""One may read while the other writes."""


class StateRing:
    """Host slots, pinned beside a GPU, through which the items of a step pass: ``begin``, then `fetch` and `put` once
    for each item in order, then ``end``."""

    def __init__(self, items: Sequence[Sequence[State]], slot_bytes: int, *, pin: bool):
        """``items`` are views of the states in the file, disjoint."""
        self._items = items
        self._slots = host_tensor((OFFLOAD_SLOTS, slot_bytes), torch.uint8, pin=pin)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="optimizer-states")
        self._reads: dict[int, Future[None]] = {}
        self._writes: list[Future[None]] = []

    def begin(self) -> None:
        """Start to read the first items."""
        self._writes = []
        self._reads = {n: self._threads.submit(self._read, n) for n in range(min(OFFLOAD_SLOTS, len(self._items)))}

    def slot(self, number: int) -> list[State]:
        """The tensors of an item in its slot."""
        return views_like(self._items[number], self._slots[number % OFFLOAD_SLOTS])

    def fetch(self, number: int) -> list[State]:
        """`slot`, once the item is read into it."""
        self._reads.pop(number).result()
        return self.slot(number)

    def put(self, number: int, arrival: torch.cuda.Event | None) -> None:
        """Write the slot of an item back to the file, and read the next item that uses this slot.

        Args:
            arrival: when the copy from the device to the slot is done; None if it is.
        """
        work = self._threads.submit(self._write, number, arrival)
        self._writes.append(work)
        if number + OFFLOAD_SLOTS < len(self._items):
            self._reads[number + OFFLOAD_SLOTS] = work

    def end(self) -> None:
        """Wait until all items are in the file."""
        for work in self._writes:
            work.result()

    def _read(self, number: int) -> None:
        copy_states(self.slot(number), self._items[number])

    def _write(self, number: int, arrival: torch.cuda.Event | None) -> None:
        if arrival is not None:
            arrival.synchronize()
        copy_states(self._items[number], self.slot(number))
        if number + OFFLOAD_SLOTS < len(self._items):
            self._read(number + OFFLOAD_SLOTS)
