"""The ranks of a preflight: they meet, gather values, and know the table of peaks."""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from glm46.compute.distributed.process import Process
from glm46.engine.observe.peaks import Accelerator, find_accelerator

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """All ranks of a preflight, seen from one of them."""

    process: Process
    gloo: dist.ProcessGroup
    """Group for values that are gathered, apart from the collectives that are measured."""
    local_ranks: int
    """Ranks of each host."""
    wait_seconds: float
    """Time that ranks wait for the slowest of them."""
    is_full: bool = False

    @property
    def is_first_of_host(self) -> bool:
        return self.process.rank % self.local_ranks == 0

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.process.world_size // self.local_ranks

    @property
    def is_gpu(self) -> bool:
        return self.process.device.type == "cuda"

    def meet(self) -> None:
        """Wait for all ranks. Collective.

        Raises:
            RuntimeError: ranks do not come in time; on rank 0 it names them.
        """
        dist.monitored_barrier(self.gloo, timedelta(seconds=self.wait_seconds), wait_all_ranks=True)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks. Collective."""
        self.meet()
        values = [value] * self.process.world_size
        dist.all_gather_object(values, value, group=self.gloo)
        return values

    def accelerator(self) -> Accelerator | None:
        """Return the row of the table of peaks for this rank's GPU."""
        return find_accelerator(torch.cuda.get_device_name()) if self.is_gpu else None

    def now(self) -> float:
        """Return the seconds of a clock, after the work of the device."""
        if self.is_gpu:
            torch.cuda.synchronize()  # sync: the timed work has ended
        return time.perf_counter()
