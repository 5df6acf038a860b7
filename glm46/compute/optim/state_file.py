"""Optimizer states in a file on a local disk, and the host memory between it and the device."""

import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from glm46.compute.distributed.host_memory import host_tensor
from glm46.compute.optim.compact_state import State, copy_states, views_like
from glm46.config.errors import UserError
from glm46.config.optimizer import state_folder_message
from glm46.files.local_disk import local_disk_fault
from glm46.run.sizes import OFFLOAD_SLOTS

_PAGE = mmap.ALLOCATIONGRANULARITY
_THREADS = 2
"""Number of threads: one can read while the other writes."""


class StateFile:
    """Memory-mapped file of one rank for optimizer states.

    The file has no name, so its space is freed when the process ends, however it ends: a run resumes from its
    checkpoints, never from this file. All space is reserved before training starts.

    Args:
        folder: folder on a local disk.

    Raises:
        UserError: no file can be created in the folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._reserved_bytes = 0
        if fault := local_disk_fault(folder):
            raise UserError(state_folder_message(folder, fault))
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="optimizer-states-")  # noqa: SIM115, as long as self
        except OSError as error:
            raise UserError(state_folder_message(folder, f"no file can be made: {error.strerror}")) from error

    def zeros(self, shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Create zeros in the file, see `muon_layout.Zeros`; only used pages of the tensor are in host memory.

        Raises:
            UserError: the disk is full.
        """
        if not prod(shape):
            return torch.zeros(shape, dtype=dtype)
        size = -(-prod(shape) * dtype.itemsize // _PAGE) * _PAGE
        try:
            os.posix_fallocate(self._file.fileno(), self._reserved_bytes, size)
            mapped = mmap.mmap(self._file.fileno(), size, offset=self._reserved_bytes)
        except OSError as error:
            fault = f"no room for {(self._reserved_bytes + size) / 2**30:,.2f} GiB of this rank: {error.strerror}"
            raise UserError(state_folder_message(self._folder, fault)) from error
        self._reserved_bytes += size
        return torch.frombuffer(mapped, dtype=dtype, count=prod(shape)).view(shape)


class StateRing:
    """Host slots, pinned if there is a GPU, that buffer the items of a step: later items are read ahead and earlier
    items written back. Call ``begin``, then `fetch` and `put` once for each item in order, then ``end``."""

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
        """Return the tensors of an item in its slot."""
        return views_like(self._items[number], self._slots[number % OFFLOAD_SLOTS])

    def fetch(self, number: int) -> list[State]:
        """Return `slot` after the item has been read into it."""
        self._reads.pop(number).result()
        return self.slot(number)

    def put(self, number: int, arrival: torch.cuda.Event | None) -> None:
        """Write the slot of an item back to the file, and read the next item that uses this slot.

        Args:
            arrival: event after the copy from the device to the slot; None if the copy is complete.
        """
        work = self._threads.submit(self._write, number, arrival)
        self._writes.append(work)
        if number + OFFLOAD_SLOTS < len(self._items):
            self._reads[number + OFFLOAD_SLOTS] = work  # `_write` reads it after the slot is free

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
