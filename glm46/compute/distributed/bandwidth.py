"""Bandwidth of collectives: device time, the formula of nccl-tests, and a probe of the groups of a running job."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from glm46.compute.distributed.mesh import Cluster
from glm46.run.sizes import PROBE_BYTES

_ROUNDS = 4
"""Measured rounds. The first one connects and synchronises the ranks; it does not count."""
_PARTS_SENT = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""How often each of N ranks sends N - 1 parts of a tensor of N parts."""


def bus_bandwidth(collective: str, size: int, seconds: float, ranks: int) -> float:
    """Compute GB/s (10^9 bytes) through the slowest link, comparable between numbers of ranks. Source: nccl-tests.

    Args:
        size: bytes of the whole tensor.
    """
    return _PARTS_SENT[collective] * (ranks - 1) / ranks * size / max(seconds, 1e-9) / 1e9


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds of work: on a GPU with events on its stream, on a CPU with the clock. Waits for its end."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()  # sync: waits until the measured work has ended
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


class BandwidthProbe:
    """Times an all-reduce in the groups of each axis of the mesh. All groups of an axis send at once, as in a step.

    It uses the groups of training: new groups would take GPU memory and differ from the groups in use. A group is named
    after its axis, with ``@node`` if all ranks of this rank's group are on one node, else ``@nodes``.

    Args:
        interval: steps between two measurements; 0: never.
        ranks_per_node: number of ranks of each node; ranks are numbered node by node.
    """

    def __init__(self, cluster: Cluster, interval: int, ranks_per_node: int):
        self._device = cluster.device
        self._groups = {}
        groups_by_axis = cluster.meshes.groups() if interval else {}
        for axis, group in groups_by_axis.items():
            ranks = dist.get_process_group_ranks(group)
            reach = "node" if len({rank // ranks_per_node for rank in ranks}) == 1 else "nodes"
            if len(ranks) > 1:
                self._groups[f"{axis}@{reach}"] = group
        self._interval = interval if self._groups else 0
        # Allocated now: a run without memory for it must fail at the start, not in the middle.
        size = PROBE_BYTES["cpu" if self._device.type == "cpu" else "gpu"]
        entries = size // torch.float32.itemsize if self._interval else 0
        self._tensor = torch.zeros(entries, dtype=torch.float32, device=self._device)

    def is_due(self, step: int) -> bool:
        """Return whether to measure after this step; equal on all ranks."""
        return bool(self._interval) and step % self._interval == 0

    def measure(self) -> dict[str, float]:
        """Measure the columns of metrics.jsonl: the slowest rank of the fastest round. Collective."""
        began = time.perf_counter()
        size = self._tensor.nbytes
        calls = [partial(dist.all_reduce, self._tensor, group=group) for group in self._groups.values()]
        times = [[seconds_of(call, self._device) for _ in range(_ROUNDS)] for call in calls]
        seconds_of_slowest = torch.tensor(times, dtype=torch.float64)  # [groups, rounds]
        dist.all_reduce(seconds_of_slowest, dist.ReduceOp.MAX)
        fastest_rounds = seconds_of_slowest[:, 1:].amin(1).tolist()
        columns: dict[str, float] = {}
        for (name, group), seconds in zip(self._groups.items(), fastest_rounds, strict=True):
            bus = bus_bandwidth("all-reduce", size, seconds, group.size())
            values = {"allreduce_ms": seconds * 1e3, "allreduce_bandwidth": size / seconds / 1e9, "bus_bandwidth": bus}
            columns |= {f"{column}/{name}": value for column, value in values.items()}
        return columns | {"bandwidth_probe_seconds": time.perf_counter() - began}
