"""The work of the ranks of a preflight: products, copies, collectives, pairs of hosts, clocks, a shared folder and
a few steps of a small model. Each rank writes where it is into a file, so that a rank that hangs can be named."""

import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46 import compat
from glm46.compute.distributed.bandwidth import bus_bandwidth, seconds_of
from glm46.compute.distributed.process import Process
from glm46.engine.observe.peaks import find_accelerator
from glm46.operate.cluster.rank_files import DONE, WAITS, Rows, write_rows, write_stage
from glm46.operate.cluster.results import FAIL, SKIP, WARN, Result, limited
from glm46.operate.cluster.small_steps import small_steps
from glm46.run.plan import Plan

_CLOCK_ROUNDS = 10
_CLOCK_SECONDS = 0.05
_ROUNDS = 6
_SLOWEST = 0.6
"""Least part of the median that a rank or a host reaches, in the best of several rounds."""
_SLOWEST_GPU = 0.9
_LEAST_SHARE = 0.7
_LEAST_PEAK = 0.65
"""Of the vendor's peak, for large products in BF16."""
_LEAST_GB_PER_SECOND = 0.02
"""A link below this is a fault of itself: 1 Gb/s gives 0.1."""
_NODE_BUS = {"B200": 780, "H200": 430, "H100": 440, "H800": 150, "A100": 220}
"""GB/s that an all-reduce of 1 GiB or more over the eight GPUs of a host reaches at least, as clouds and vendors state
it for their health checks; H800 from its link of 200 GB/s."""

_HOST_COPIES = {"B200": 48, "H200": 48, "H100": 48, "H800": 48, "A100": 21, "A800": 21}
"""GB/s between host and GPU over PCIe 5 and 4 with 16 lanes, as clouds state it for their health checks of one GPU."""
_ALL_AT_ONCE = 0.8
"""Of it, where all GPUs of a host copy at once and share its memory."""


class Examination:
    """The examination of a group, on one of its ranks. All methods but `stage` are collective.

    Args:
        folder: of this host, for the stages of its ranks.
        local_ranks: ranks of each host.
    """

    def __init__(self, process: Process, folder: Path, local_ranks: int, *, is_full: bool):
        self._process, self._folder, self._is_full = process, folder, is_full
        self._local, self._hosts = local_ranks, process.world_size // local_ranks
        self._host, self._device = process.rank // local_ranks, process.device
        self._is_gpu = process.device.type == "cuda"
        self._stage = "start"
        self.rows: Rows = {number: [] for number in range(-1, self._hosts)}

    def stage(self, name: str) -> None:
        """Note what this rank does from now on."""
        self._stage = name
        write_stage(self._folder, self._process.rank, name)

    def run(self, shared: Path | None, plan: Plan) -> None:
        """All parts. Rank 0 writes the results after each part. Collective.

        Args:
            shared: a folder that all hosts must see.
            plan: of the small steps.
        """
        parts: dict[str, Callable[[], None]] = {
            "clocks": self._clocks,
            "shared folder": lambda: self._shared_folder(shared),
            "products": self._products,
            "copies": self._copies,
            "collectives": self._collectives,
            "pairs": self._pairs,
            "small steps": lambda: self.rows[-1].append(small_steps(plan, self._process)),
        }
        for name, part in parts.items():
            self.stage(name)
            part()
            if self._process.is_main:
                write_rows(self._folder, self.rows)
        self.stage(DONE)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._process.world_size
        stage = self._stage
        self.stage(f"{stage}{WAITS}")
        dist.all_gather_object(values, value)
        self.stage(stage)
        return values

    def _sync(self) -> float:
        if self._is_gpu:
            torch.cuda.synchronize()  # sync: what is timed has ended
        return time.perf_counter()

    def _by_host(
        self, check: str, values: list[float], unit: str, least: float, limit: str, remedy: str, otherwise: str = FAIL
    ) -> None:
        """A result for each host from a value of each rank."""
        for host in range(self._hosts):
            mine = values[host * self._local : (host + 1) * self._local]
            slow = [f"rank {host * self._local + i}: {v:.3g}" for i, v in enumerate(mine) if v < least]
            value = f"{', '.join(slow) or f'{min(mine):.3g} to {max(mine):.3g}'} {unit}"
            self.rows[host].append(limited(check, not slow, value, limit, remedy, otherwise=otherwise))

    def _clocks(self) -> None:
        offsets = []
        for rank in range(0, self._process.world_size, self._local):
            offsets.append(self._offset_to(rank) if rank else 0.0)
        for host, offset in enumerate(offsets[1:], start=1):
            value, limit = f"{offset * 1e3:+.1f} ms against the first host", f"<= {_CLOCK_SECONDS * 1e3:.0f} ms"
            remedy = "let chrony of all hosts take the time from one server"
            is_good, otherwise = abs(offset) <= _CLOCK_SECONDS, FAIL if abs(offset) > 1 else WARN
            self.rows[host].append(limited("clock offset", is_good, value, limit, remedy, otherwise=otherwise))

    def _offset_to(self, rank: int) -> float:
        """Seconds by which the clock of a rank is ahead of rank 0's, on rank 0, from the quickest answer."""
        stamp, best = torch.zeros(1, dtype=torch.float64), (float("inf"), 0.0)
        for _ in range(_CLOCK_ROUNDS):
            if self._process.rank == 0:
                sent = time.time()
                dist.send(stamp, rank)
                dist.recv(stamp, rank)
                took = time.time() - sent
                best = min(best, (took, stamp.item() - sent - took / 2))
            elif self._process.rank == rank:
                dist.recv(stamp, 0)
                stamp.fill_(time.time())
                dist.send(stamp, 0)
        return best[1]

    def _shared_folder(self, shared: Path | None) -> None:
        if shared is None or self._hosts == 1:
            value = "only with --config, whose folders are tried" if shared is None else "one host"
            self.rows[-1].append(Result("shared folder", SKIP, value))
            return
        is_first, mine = self._process.rank % self._local == 0, shared / f".preflight-{uuid.uuid4().hex}"
        if is_first:
            mine.write_text("here")
        names = [name for name in self._gather(mine.name if is_first else None) if name]
        unseen = sum(not (shared / name).is_file() for name in names) if is_first else 0
        counts = self._gather(unseen)
        if is_first:
            mine.unlink(missing_ok=True)
        for host, count in enumerate(counts[:: self._local]):
            value = f"{shared}: {len(names) - count} of {len(names)} hosts' files seen"
            remedy = "mount the same storage at this path on all hosts"
            self.rows[host].append(limited("shared folder", not count, value, "all", remedy))

    def _products(self) -> None:
        """Products of small integers, which are exact in any order, on all ranks at once: speed and right sums."""
        size, dtype = (8192, torch.bfloat16) if self._is_gpu else (384, torch.float32)
        generator = torch.Generator().manual_seed(0)
        left, right = (
            torch.randint(-1, 2, (size, size), generator=generator).to(self._device, dtype) for _ in range(2)
        )
        best, out = float("inf"), left @ right
        dist.barrier()
        # A CPU's own time: other programs on the same cores do not make it slow.
        now = self._sync if self._is_gpu else time.thread_time
        computed, first = time.thread_time(), self._sync()
        while self._sync() - first < (2.0 if self._is_full else 0.7):
            began = now()
            out = left @ right
            best = min(best, now() - began)
        share = (time.thread_time() - computed) / (self._sync() - first)
        ones = torch.ones(size, dtype=torch.float64, device=self._device)
        # Exact in FP32, and in FP64 here. BF16 rounds entries above 256 by one: 4.3 standard deviations of 8192 terms.
        wrong = (out.double() @ ones - left.double() @ (right.double() @ ones)).abs().max().item()
        allowed = 8.0 if self._is_gpu else 0.0
        speeds = self._gather(2.0 * size**3 / best / 1e12)
        errors = self._gather(wrong)
        peak = find_accelerator(torch.cuda.get_device_name()) if self._is_gpu else None
        least = (_SLOWEST_GPU if self._is_gpu else _SLOWEST) * statistics.median_high(speeds)
        least = max(least, _LEAST_PEAK * peak.bf16_flops / 1e12 if peak else 0.0)
        remedy = "look for throttling and other processes there; ISOLATE the host if it stays slow"
        self._by_host("product speed", speeds, "TFLOP/s", least, f">= {least:.3g} TFLOP/s", remedy)
        if not self._is_gpu:
            limit, remedy = f">= {_LEAST_SHARE:g} of the time", "other programs take the cores: ps aux --sort=-pcpu"
            self._by_host("share of a core", self._gather(share), "of the time", _LEAST_SHARE, limit, remedy, WARN)
        remedy = "ISOLATE the host: this device computes wrongly"
        for host in range(self._hosts):
            worst = max(errors[host * self._local : (host + 1) * self._local])
            value = f"largest error {worst:g}"
            self.rows[host].append(limited("product sums", worst <= allowed, value, f"<= {allowed:g}", remedy))

    def _copies(self) -> None:
        if not self._is_gpu:
            return
        block = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        there, best = block.to(self._device), [float("inf")] * 2
        for _ in range(_ROUNDS):
            began = self._sync()
            there.copy_(block, non_blocking=True)
            middle = self._sync()
            block.copy_(there, non_blocking=True)
            best = [min(best[0], middle - began), min(best[1], self._sync() - middle)]
        speeds = self._gather(len(block) / max(best) / 1e9)
        known = find_accelerator(torch.cuda.get_device_name())
        least = least_copy_speed(speeds, known.name.split()[0] if known else "")
        limit, remedy = f">= {least:.3g} GB/s", "ISOLATE the host: PCIe link of this GPU"
        self._by_host("host copies", speeds, "GB/s", least, limit, remedy)

    def _collectives(self) -> None:
        world, rank = self._process.world_size, self._process.rank
        size = (2**30 if self._is_full else 2**28) if self._is_gpu else (2**24 if self._is_full else 2**22)
        count = size // 4 // world * world
        mine = torch.full((count,), float(rank + 1), device=self._device)
        whole, part = torch.empty_like(mine), torch.empty(count // world, device=self._device)
        total = world * (world + 1) / 2
        numbers = torch.arange(1.0, world + 1, device=self._device).repeat_interleave(count // world)

        group = dist.group.WORLD
        assert group is not None
        calls: dict[str, tuple[Callable[[], object], Tensor, Tensor | float]] = {
            "all-reduce": (lambda: dist.all_reduce(whole), whole, total),
            "all-gather": (lambda: compat.gather_rows(whole, mine[: count // world], group), whole, numbers),
            "reduce-scatter": (lambda: compat.scatter_row_sums(part, mine, group), part, total),
            "all-to-all": (lambda: dist.all_to_all_single(whole, mine), whole, numbers),
        }
        for name, (call, result, expected) in calls.items():
            self.stage(name)
            times, wrong = [], 0.0
            for _ in range(_ROUNDS):
                whole.copy_(mine)
                dist.barrier()
                times.append(seconds_of(call, self._device))
                wrong = max(wrong, (result - expected).abs().max().item())
            every, errors = self._gather(times), self._gather(wrong)
            seconds = min(map(max, zip(*every, strict=True)))  # of the quickest round, the last rank's
            bus = bus_bandwidth(name, count * 4, seconds, world)
            bad = [f"rank {number}" for number, error in enumerate(errors) if error]
            self.rows[-1].append(limited(
                f"{name} sums", not bad, f"wrong on {', '.join(bad)}" if bad else f"right on {world} ranks", "exact",
                "memory or link of these ranks: preflight their hosts alone, then ISOLATE those that fail",
            ))  # fmt: skip
            if world > 1:
                self.rows[-1].append(self._judged_bus(name, bus, count * 4))

    def _judged_bus(self, name: str, bus: float, size: int) -> Result:
        least = _LEAST_GB_PER_SECOND
        if self._is_gpu and self._is_full and self._hosts == 1 and self._local == 8 and name == "all-reduce":
            known = find_accelerator(torch.cuda.get_device_name())
            least = _NODE_BUS.get(known.name if known else "", least)
        value, limit = f"{bus:.3g} GB/s bus bandwidth with {size / 2**20:.0f} MiB", f">= {least:g} GB/s"
        return limited(name, bus >= least, value, limit, "docs/nccl.md: look at the links, tune nothing first")

    def _pairs(self) -> None:
        """Two rounds of pairs of hosts, (0, 1), (2, 3) and (1, 2), (3, 4): each host is in two of them, and one whose
        pairs are both slow has a slow link. All ranks of a host send at once, each to its own number on the other."""
        stride = self._local if self._hosts > 1 else 1
        units, unit = self._process.world_size // stride, self._process.rank // stride
        if units == 1:
            return
        block = torch.empty(2**26 if self._is_gpu else 2**20, device=self._device)
        speeds = []
        for shift in (0, 1):
            other = ((unit + shift) ^ 1) - shift
            dist.barrier()
            speeds.append(self._speed_to(other, unit, stride, block) if 0 <= other < units else 0.0)
        every = [max(pair) for pair in self._gather(speeds)]
        median = statistics.median_high(every)
        least = max((_SLOWEST / 2) * median, _LEAST_GB_PER_SECOND)
        remedy = "cable, port or route of this host: preflight it with another neighbour, then ISOLATE it"
        self._by_host("pairs", every, "GB/s", least, f">= {least:.3g} GB/s", remedy)

    def _speed_to(self, other: int, unit: int, stride: int, block: Tensor) -> float:
        peer, best = other * stride + self._process.rank % stride, float("inf")
        for _ in range(_ROUNDS):
            began = self._sync()
            for is_sender in (unit < other, unit > other):
                if is_sender:
                    dist.send(block, peer)
                else:
                    dist.recv(block, peer)
            best = min(best, self._sync() - began)
        return 2 * block.nbytes / best / 1e9


def least_copy_speed(speeds: list[float], gpu: str) -> float:
    """GB/s that copies between host and GPU must reach: most of the median of all ranks, and what this GPU's link gives
    anywhere, so that a run of slow hosts alone is found, too.

    Args:
        gpu: its name in `_HOST_COPIES`; others have no limit of their own.
    """
    return max(_SLOWEST_GPU * statistics.median_high(speeds), _ALL_AT_ONCE * _HOST_COPIES.get(gpu, 0))
