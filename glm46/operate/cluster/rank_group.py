"""The ranks of a preflight: values that they gather, and results for each of their hosts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from glm46.compute.distributed.process import Process
from glm46.engine.observe.peaks import Accelerator, find_accelerator
from glm46.operate.cluster.results import Result, limited

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """All ranks of a preflight, and the hosts that they are on."""

    process: Process
    gloo: dist.ProcessGroup
    """Group for values that are gathered, apart from the collectives that are measured."""
    wait_seconds: float
    """Time that ranks wait for the slowest of them."""
    is_full: bool = False
    hosts: Sequence[str] = ("",)
    """Names of the hosts, in the order of their ranks."""

    @property
    def local_ranks(self) -> int:
        """Ranks of each host."""
        return self.process.world_size // len(self.hosts)

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

    def by_host(self, values: Sequence[T]) -> list[tuple[str, Sequence[T]]]:
        """Return the name of each host with the values of its ranks."""
        count = self.local_ranks
        return [(host, values[i * count : (i + 1) * count]) for i, host in enumerate(self.hosts)]

    def judge_speeds(
        self, check: str, speeds: Sequence[float], unit: str, min_speed: float, remedy: str
    ) -> list[Result]:
        """Return a result for each host from a speed of each rank."""
        results = []
        for number, (host, host_speeds) in enumerate(self.by_host(speeds)):
            first_rank = number * self.local_ranks
            slow = [f"rank {rank}: {v:.3g}" for rank, v in enumerate(host_speeds, first_rank) if v < min_speed]
            value = f"{', '.join(slow) or f'{min(host_speeds):.3g} to {max(host_speeds):.3g}'} {unit}"
            results.append(limited(check, not slow, value, f">= {min_speed:.3g} {unit}", remedy, host=host))
        return results

    def accelerator(self) -> Accelerator | None:
        """Return the row of the table of peaks for this rank's GPU."""
        return find_accelerator(torch.cuda.get_device_name()) if self.is_gpu else None

    def now(self) -> float:
        """Return the seconds of a clock, after the work of the device."""
        if self.is_gpu:
            torch.cuda.synchronize()  # sync: the timed work has ended
        return time.perf_counter()
