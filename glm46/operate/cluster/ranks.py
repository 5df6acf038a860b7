"""The work of the ranks of a preflight: products, copies, collectives, pairs of hosts, clocks, a shared folder and
a few steps of a small model. Each rank writes its stage into a file, so that a rank that hangs can be named."""

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
"""Minimum part of the median for a rank or a host, in the best of several rounds."""
_SLOWEST_GPU = 0.9
_MIN_CORE_SHARE = 0.7
_MIN_PEAK_SHARE = 0.65
"""Minimum part of the vendor's peak, for large products in BF16."""
_MIN_GB_PER_SECOND = 0.02
"""Minimum speed of any link: 1 Gb/s gives 0.1."""
_NODE_BUS = {"B200": 780, "H200": 430, "H100": 440, "H800": 150, "A100": 220}
"""Minimum GB/s of an all-reduce of 1 GiB or more over the eight GPUs of a host, as clouds and vendors state it for
their health checks; H800 from its link of 200 GB/s."""

_HOST_COPIES = {"B200": 48, "H200": 48, "H100": 48, "H800": 48, "A100": 21, "A800": 21}
"""GB/s between host and GPU over PCIe 5 and 4 with 16 lanes, as clouds state it for their health checks of one GPU."""
_ALL_AT_ONCE = 0.8
"""Part of `_HOST_COPIES` that remains when all GPUs of a host copy at once and share its memory."""


class Examination:
    """The examination of a group, on one of its ranks. All methods but `stage` are collective.

    Args:
        folder: folder of this host, for the stages of its ranks.
        local_ranks: ranks of each host.
    """

    def __init__(self, process: Process, folder: Path, local_ranks: int, *, is_full: bool):
        self._process = process
        self._folder = folder
        self._is_full = is_full
        self._local = local_ranks
        self._hosts = process.world_size // local_ranks
        self._host = process.rank // local_ranks
        self._device = process.device
        self._is_gpu = process.device.type == "cuda"
        self._stage = "start"
        self.rows: Rows = {number: [] for number in range(-1, self._hosts)}

    def stage(self, name: str) -> None:
        """Note the stage that this rank begins."""
        self._stage = name
        write_stage(self._folder, self._process.rank, name)

    def run(self, shared: Path | None, plan: Plan) -> None:
        """Run all parts. Rank 0 writes the results after each part. Collective.

        Args:
            shared: a folder that all hosts must see.
            plan: plan of the small steps.
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
            torch.cuda.synchronize()  # sync: the timed work has ended
        return time.perf_counter()

    def _by_host(
        self,
        check: str,
        values: list[float],
        unit: str,
        min_value: float,
        limit: str,
        remedy: str,
        otherwise: str = FAIL,
    ) -> None:
        """Add a result for each host from a value of each rank."""
        for host in range(self._hosts):
            first_rank = host * self._local
            host_values = values[first_rank : first_rank + self._local]
            slow = [f"rank {first_rank + i}: {v:.3g}" for i, v in enumerate(host_values) if v < min_value]
            value = f"{', '.join(slow) or f'{min(host_values):.3g} to {max(host_values):.3g}'} {unit}"
            self.rows[host].append(limited(check, not slow, value, limit, remedy, otherwise=otherwise))

    def _clocks(self) -> None:
        offsets = []
        for rank in range(0, self._process.world_size, self._local):
            offsets.append(self._offset_to(rank) if rank else 0.0)
        for host, offset in enumerate(offsets[1:], start=1):
            value = f"{offset * 1e3:+.1f} ms against the first host"
            limit = f"<= {_CLOCK_SECONDS * 1e3:.0f} ms"
            remedy = "let chrony of all hosts take the time from one server"
            is_good = abs(offset) <= _CLOCK_SECONDS
            otherwise = FAIL if abs(offset) > 1 else WARN
            self.rows[host].append(limited("clock offset", is_good, value, limit, remedy, otherwise=otherwise))

    def _offset_to(self, rank: int) -> float:
        """Return on rank 0 the seconds by which the clock of a rank is ahead, from the quickest answer."""
        stamp = torch.zeros(1, dtype=torch.float64)
        best = (float("inf"), 0.0)
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
        is_first = self._process.rank % self._local == 0
        probe = shared / f".preflight-{uuid.uuid4().hex}"
        if is_first:
            probe.write_text("here")
        names = [name for name in self._gather(probe.name if is_first else None) if name]
        unseen = sum(not (shared / name).is_file() for name in names) if is_first else 0
        counts = self._gather(unseen)
        if is_first:
            probe.unlink(missing_ok=True)
        for host, count in enumerate(counts[:: self._local]):
            value = f"{shared}: {len(names) - count} of {len(names)} hosts' files seen"
            remedy = "mount the same storage at this path on all hosts"
            self.rows[host].append(limited("shared folder", not count, value, "all", remedy))

    def _products(self) -> None:
        """Check speed and sums of products of small integers, which are exact in any order, on all ranks at once."""
        size = 8192 if self._is_gpu else 384
        dtype = torch.bfloat16 if self._is_gpu else torch.float32
        generator = torch.Generator().manual_seed(0)
        left_factor, right_factor = (
            torch.randint(-1, 2, (size, size), generator=generator).to(self._device, dtype) for _ in range(2)
        )
        best = float("inf")
        out = left_factor @ right_factor
        dist.barrier()
        # A CPU's own time: other programs on the same cores do not make it slow.
        now = self._sync if self._is_gpu else time.thread_time
        computed = time.thread_time()
        started = self._sync()
        while self._sync() - started < (2.0 if self._is_full else 0.7):
            began = now()
            out = left_factor @ right_factor
            best = min(best, now() - began)
        share = (time.thread_time() - computed) / (self._sync() - started)
        ones = torch.ones(size, dtype=torch.float64, device=self._device)
        # Exact in FP32, and in FP64 here. BF16 rounds entries above 256 by one: 4.3 standard deviations of 8192 terms.
        wrong = (out.double() @ ones - left_factor.double() @ (right_factor.double() @ ones)).abs().max().item()
        allowed = 8.0 if self._is_gpu else 0.0
        speeds = self._gather(2.0 * size**3 / best / 1e12)
        errors = self._gather(wrong)
        peak = find_accelerator(torch.cuda.get_device_name()) if self._is_gpu else None
        min_speed = (_SLOWEST_GPU if self._is_gpu else _SLOWEST) * statistics.median_high(speeds)
        min_speed = max(min_speed, _MIN_PEAK_SHARE * peak.bf16_flops / 1e12 if peak else 0.0)
        remedy = "look for throttling and other processes there; ISOLATE the host if it stays slow"
        self._by_host("product speed", speeds, "TFLOP/s", min_speed, f">= {min_speed:.3g} TFLOP/s", remedy)
        if not self._is_gpu:
            limit = f">= {_MIN_CORE_SHARE:g} of the time"
            remedy = "other programs take the cores: ps aux --sort=-pcpu"
            self._by_host("share of a core", self._gather(share), "of the time", _MIN_CORE_SHARE, limit, remedy, WARN)
        remedy = "ISOLATE the host: this device computes wrongly"
        for host in range(self._hosts):
            worst = max(errors[host * self._local : (host + 1) * self._local])
            value = f"largest error {worst:g}"
            self.rows[host].append(limited("product sums", worst <= allowed, value, f"<= {allowed:g}", remedy))

    def _copies(self) -> None:
        if not self._is_gpu:
            return
        block = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        device_block = block.to(self._device)
        best = [float("inf")] * 2
        for _ in range(_ROUNDS):
            began = self._sync()
            device_block.copy_(block, non_blocking=True)
            middle = self._sync()
            block.copy_(device_block, non_blocking=True)
            best = [min(best[0], middle - began), min(best[1], self._sync() - middle)]
        speeds = self._gather(len(block) / max(best) / 1e9)
        accelerator = find_accelerator(torch.cuda.get_device_name())
        min_speed = min_copy_speed(speeds, accelerator.name.split()[0] if accelerator else "")
        limit = f">= {min_speed:.3g} GB/s"
        remedy = "ISOLATE the host: PCIe link of this GPU"
        self._by_host("host copies", speeds, "GB/s", min_speed, limit, remedy)

    def _collectives(self) -> None:
        world = self._process.world_size
        rank = self._process.rank
        size = (2**30 if self._is_full else 2**28) if self._is_gpu else (2**24 if self._is_full else 2**22)
        count = size // 4 // world * world
        local = torch.full((count,), float(rank + 1), device=self._device)
        whole = torch.empty_like(local)
        part = torch.empty(count // world, device=self._device)
        total = world * (world + 1) / 2
        numbers = torch.arange(1.0, world + 1, device=self._device).repeat_interleave(count // world)

        group = dist.group.WORLD
        assert group is not None
        calls: dict[str, tuple[Callable[[], object], Tensor, Tensor | float]] = {
            "all-reduce": (lambda: dist.all_reduce(whole), whole, total),
            "all-gather": (lambda: compat.gather_rows(whole, local[: count // world], group), whole, numbers),
            "reduce-scatter": (lambda: compat.scatter_row_sums(part, local, group), part, total),
            "all-to-all": (lambda: dist.all_to_all_single(whole, local), whole, numbers),
        }
        for name, (call, result, expected) in calls.items():
            self.stage(name)
            times = []
            wrong = 0.0
            for _ in range(_ROUNDS):
                whole.copy_(local)
                dist.barrier()
                times.append(seconds_of(call, self._device))
                wrong = max(wrong, (result - expected).abs().max().item())
            rank_times = self._gather(times)
            errors = self._gather(wrong)
            seconds = min(map(max, zip(*rank_times, strict=True)))  # the quickest round, by its slowest rank
            bus = bus_bandwidth(name, count * 4, seconds, world)
            bad = [f"rank {number}" for number, error in enumerate(errors) if error]
            self.rows[-1].append(
                limited(
                    f"{name} sums",
                    not bad,
                    f"wrong on {', '.join(bad)}" if bad else f"right on {world} ranks",
                    "exact",
                    "memory or link of these ranks: preflight their hosts alone, then ISOLATE those that fail",
                )
            )
            if world > 1:
                self.rows[-1].append(self._judged_bus(name, bus, count * 4))

    def _judged_bus(self, name: str, bus: float, size: int) -> Result:
        min_bus = _MIN_GB_PER_SECOND
        if self._is_gpu and self._is_full and self._hosts == 1 and self._local == 8 and name == "all-reduce":
            accelerator = find_accelerator(torch.cuda.get_device_name())
            min_bus = _NODE_BUS.get(accelerator.name if accelerator else "", min_bus)
        value = f"{bus:.3g} GB/s bus bandwidth with {size / 2**20:.0f} MiB"
        limit = f">= {min_bus:g} GB/s"
        return limited(name, bus >= min_bus, value, limit, "docs/nccl.md: look at the links, tune nothing first")

    def _pairs(self) -> None:
        """Check two rounds of pairs of hosts: (0, 1), (2, 3) and (1, 2), (3, 4).

        Each host is in two pairs, and a host whose pairs are both slow has a slow link. All ranks of a host send at
        once, each to the rank with its number on the other host.
        """
        stride = self._local if self._hosts > 1 else 1
        units = self._process.world_size // stride
        unit = self._process.rank // stride
        if units == 1:
            return
        block = torch.empty(2**26 if self._is_gpu else 2**20, device=self._device)
        speeds = []
        for shift in (0, 1):
            other = ((unit + shift) ^ 1) - shift
            dist.barrier()
            speeds.append(self._speed_to(other, unit, stride, block) if 0 <= other < units else 0.0)
        unit_speeds = [max(pair) for pair in self._gather(speeds)]
        median = statistics.median_high(unit_speeds)
        min_speed = max((_SLOWEST / 2) * median, _MIN_GB_PER_SECOND)
        remedy = "cable, port or route of this host: preflight it with another neighbour, then ISOLATE it"
        self._by_host("pairs", unit_speeds, "GB/s", min_speed, f">= {min_speed:.3g} GB/s", remedy)

    def _speed_to(self, other: int, unit: int, stride: int, block: Tensor) -> float:
        peer = other * stride + self._process.rank % stride
        best = float("inf")
        for _ in range(_ROUNDS):
            began = self._sync()
            for is_sender in (unit < other, unit > other):
                if is_sender:
                    dist.send(block, peer)
                else:
                    dist.recv(block, peer)
            best = min(best, self._sync() - began)
        return 2 * block.nbytes / best / 1e9


def min_copy_speed(speeds: list[float], gpu: str) -> float:
    """Return the GB/s that copies between host and GPU must reach: most of the median of all ranks, and the usual speed
    of this GPU's link, so that slow hosts are found even if all hosts are slow.

    Args:
        gpu: name of the GPU in `_HOST_COPIES`; a GPU without an entry has only the limit from the median.
    """
    return max(_SLOWEST_GPU * statistics.median_high(speeds), _ALL_AT_ONCE * _HOST_COPIES.get(gpu, 0))
