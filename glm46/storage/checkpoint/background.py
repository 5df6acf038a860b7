"""Saves in the background, one writer thread each: a failed or hung save does not stop training."""

import atexit
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from glm46.compute.distributed.host_memory import host_bytes
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.ranks import CheckpointError, RankLostError, Ranks, describe_fault
from glm46.storage.checkpoint.save import SaveOutcome, SaveTarget, Snapshot, save_now

_EXIT_SECONDS = 10.0
"""How long the exit of the process waits for a save. A thread that is killed while it holds the GIL aborts the
process."""

_ALIGNMENT_BYTES = 64
"""The copy of each tensor starts at a multiple of this."""


class _Save(threading.Thread):
    """The thread of one save. ``result`` is set before ``ended``."""

    def __init__(self, step: int, rank: int, work: Callable[[], int], stall_seconds: float):
        # A daemon, because the exit of the process must not wait without limit for storage that hangs.
        super().__init__(name="checkpoint", daemon=True)
        self._step = step
        self._rank = rank
        self._work = work
        self._stall_seconds = stall_seconds
        self._started_at = time.perf_counter() - stall_seconds  # the save began with the copy to host memory
        self.result: SaveOutcome | CheckpointError | RankLostError | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            size = self._work()
            self.result = SaveOutcome(self._step, size, time.perf_counter() - self._started_at, self._stall_seconds)
        except (CheckpointError, RankLostError) as error:
            self.result = error
        except BaseException as error:  # such as SystemExit; `Ranks.stage` has reported it to the other ranks
            self.result = CheckpointError(describe_fault(self._rank, f"saving step {self._step}", error))
            raise  # prints the traceback of a bug; callers wait on `ended`, not on the thread
        finally:
            self.ended.set()


@atexit.register
def _wait_for_saves() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for thread in threading.enumerate():
        if isinstance(thread, _Save):
            thread.join(max(end - time.monotonic(), 0.0))


class BackgroundSaver:
    """Saves staged copies in a thread, one save at a time, over its own process group.

    The thread makes the same collectives in the same order on all ranks, so a save succeeds or fails on all of them. It
    is a thread because a process would need the tensors in shared memory and a second set of ranks.
    """

    def __init__(self) -> None:
        """Collective."""
        self._ranks = Ranks.of_this_run()
        self._staging = Staging()
        self._staged: dict[str, Tensor] = {}
        self._stage_seconds = 0.0
        self._save: _Save | None = None
        self._ended: list[SaveOutcome | CheckpointError | RankLostError] = []

    @property
    def is_busy(self) -> bool:
        """True if a save is running on this rank."""
        return self._save is not None and not self._save.ended.is_set()

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the tensors to host memory. Not while a save is running."""
        started = time.perf_counter()
        self._staged = {}  # or the memory of another layout would not be freed
        self._staged = self._staging.copy(tensors)
        self._stage_seconds = time.perf_counter() - started

    def start(self, target: SaveTarget, snapshot: Snapshot, in_use: Collection[int]) -> None:
        """Save the staged copies in a thread. Not while a save is running."""
        self._collect()
        work = partial(save_now, target, snapshot, self._ranks, in_use, self._staged)
        self._save = _Save(snapshot.step, self._ranks.rank, work, self._stage_seconds)
        self._save.start()

    def wait(self, seconds: float) -> None:
        """Wait until no save is running on this rank, at most this many seconds."""
        if self._save is not None:
            self._save.ended.wait(seconds)

    def take_ended(self) -> list[SaveOutcome]:
        """Return the outcomes of finished saves, each once.

        Raises:
            CheckpointError: a save failed. The other outcomes stay for the next call.
            RankLostError: a rank has ended or does not answer; training's collectives fail too.
        """
        self._collect()
        outcomes = [result for result in self._ended if isinstance(result, SaveOutcome)]
        errors = [result for result in self._ended if not isinstance(result, SaveOutcome)]
        self._ended = [*outcomes, *errors[1:]] if errors else []
        if errors:
            raise errors[0]
        return outcomes

    def forget_ended(self) -> None:
        """Drop the outcomes that were not taken."""
        self._collect()
        self._ended = []

    def _collect(self) -> None:
        if self._save is not None and self._save.result is not None:
            self._ended.append(self._save.result)
            self._save = None


class Staging:
    """Host memory for one copy of this rank's tensors, reused by every save because allocating it is slow.

    It is one allocation, pinned when any tensor is on a GPU.
    """

    def __init__(self) -> None:
        self._layout: list[tuple[str, torch.Size, torch.dtype, bool]] = []
        self._copies: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's part of each tensor; the copies are complete on return.

        Returns:
            CPU tensors of the local shape, by name. The next call overwrites them.
        """
        local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        layout = [(name, tensor.shape, tensor.dtype, tensor.is_cuda) for name, tensor in local.items()]
        if layout != self._layout:
            self._copies = {}  # free the old memory before the new is allocated
            self._copies = _allocate(local)
            self._layout = layout
        for name, tensor in local.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in local.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # sync: from here on the optimizer may change the originals
        return self._copies


def _allocate(local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in local.values()]
    slab = host_bytes(sum(sizes), pin=any(tensor.is_cuda for tensor in local.values()))
    copies = {}
    start = 0
    for (name, tensor), size in zip(local.items(), sizes, strict=True):
        if tensor.nbytes == 0:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            continue
        # Each tensor has a separate storage: DCP would copy a view before it writes it.
        flat = torch.frombuffer(slab[start : start + tensor.nbytes], dtype=torch.uint8)
        copies[name] = flat.view(tensor.dtype).view(tensor.shape)
        start += size
    return copies
