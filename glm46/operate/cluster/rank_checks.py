"""Checks that all ranks make together: clocks, folders, products, copies, collectives, pairs of hosts. All are
collective, and return the same results on every rank."""

import math
import operator
import os
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from glm46 import compat
from glm46.compute.distributed.bandwidth import bus_bandwidth, seconds_of
from glm46.operate.cluster.rank_group import RankGroup
from glm46.operate.cluster.results import FAIL, WARN, Result, describe_error, limited
from glm46.operate.cluster.storage import CHUNK_BYTES, STATES_SECONDS, probe_size, state_bytes, write_synced
from glm46.run.plan import Plan

_CLOCK_ROUNDS = 10
_CLOCK_SECONDS = 0.05
_ROUNDS = 6
_MIN_SHARE = 0.6
"""Minimum part of the median for a rank or a host, in the best of several rounds."""
_MIN_SHARE_GPU = 0.9
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


def clocks(group: RankGroup) -> list[Result]:
    """Compare the clock of each host with the clock of the first: the median over several barriers."""
    stamps = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier(group.gloo)
        stamps.append(time.time())
    gathered = group.gather(stamps)
    limit = f"<= {_CLOCK_SECONDS * 1e3:.0f} ms"
    remedy = "let chrony of all hosts take the time from one server"
    results = []
    for host, host_stamps in group.by_host(gathered)[1:]:
        offset = statistics.median(map(operator.sub, host_stamps[0], gathered[0]))
        value = f"{offset * 1e3:+.1f} ms against the first host"
        is_good = abs(offset) <= _CLOCK_SECONDS
        otherwise = FAIL if abs(offset) > 1 else WARN
        results.append(limited("clock offset", is_good, value, limit, remedy, otherwise=otherwise, host=host))
    return results


def shared_folder(group: RankGroup, folder: Path) -> list[Result]:
    """Check that each host sees the files that the others write into a folder."""
    is_first = group.process.rank % group.local_ranks == 0
    probe = folder / f".preflight-{uuid.uuid4().hex}"
    error = None
    try:
        if is_first:
            probe.write_text("here")
    except OSError as reason:
        error = describe_error(reason)  # a result of this host, after which the ranks go through the other checks
    try:
        names = [values[0] for _, values in group.by_host(group.gather(None if error else probe.name))]
        seen = group.gather((sum((folder / name).is_file() for name in names if name), error))
    finally:
        if is_first and error is None:
            probe.unlink(missing_ok=True)
    remedy = "mount the same storage at this path on all hosts"
    results = []
    for host, answers in group.by_host(seen):
        count, error = answers[0]
        value = f"{folder}: {count} of {len(names)} hosts' files seen" + (f"; {error}" if error else "")
        results.append(limited("shared folder", count == len(names), value, "all", remedy, host=host))
    return results


def states_folder(group: RankGroup, plan: Plan, folder: Path) -> list[Result]:
    """Check the speed at which the ranks of a host write optimizer states, all at once, to its local disk."""
    path = folder / f".preflight-{uuid.uuid4().hex}"
    chunk = os.urandom(CHUNK_BYTES)
    size = max(probe_size(is_full=group.is_full) // group.local_ranks // CHUNK_BYTES, 1) * CHUNK_BYTES
    group.meet()
    error = None
    seconds = math.inf
    try:
        seconds = write_synced(path, chunk, size)
    except OSError as reason:
        error = describe_error(reason)
    finally:
        path.unlink(missing_ok=True)
    # Each step reads and writes the states of all ranks of a host.
    min_speed = 2 * state_bytes(plan) * group.local_ranks / STATES_SECONDS / 1e9
    limit = f">= {min_speed:.2f} GB/s"
    remedy = f"a step waits for it; look at the load of {folder}, or set another folder"
    results = []
    for host, answers in group.by_host(group.gather((seconds, error))):
        errors = [error for _, error in answers if error is not None]
        if errors:
            results.append(Result("speed for states", FAIL, f"{folder}: {errors[0]}", limit, remedy, host))
            continue
        speed = size * group.local_ranks / max(seconds for seconds, _ in answers) / 1e9
        value = f"{folder}: {speed:.2f} GB/s written and synced by all ranks"
        is_good = speed >= min_speed
        results.append(limited("speed for states", is_good, value, limit, remedy, otherwise=WARN, host=host))
    return results


def products(group: RankGroup) -> list[Result]:
    """Check speed and sums of products of small integers, which are exact in any order, on all ranks at once."""
    size = 8192 if group.is_gpu else 384
    dtype = torch.bfloat16 if group.is_gpu else torch.float32
    device = group.process.device
    generator = torch.Generator().manual_seed(0)
    left_factor = torch.randint(-1, 2, (size, size), generator=generator).to(device, dtype)
    right_factor = torch.randint(-1, 2, (size, size), generator=generator).to(device, dtype)
    out = left_factor @ right_factor
    best = float("inf")
    # A CPU's own time: other programs on the same cores do not make it slow.
    now = group.now if group.is_gpu else time.thread_time
    group.meet()
    end = time.perf_counter() + (2.0 if group.is_full else 0.7)
    while time.perf_counter() < end:
        began = now()
        out = left_factor @ right_factor
        best = min(best, now() - began)
    ones = torch.ones(size, dtype=torch.float64, device=device)
    # Exact in FP32, and in FP64 here. BF16 rounds entries above 256 by one: 4.3 standard deviations of 8192 terms.
    error = _largest(out.double() @ ones - left_factor.double() @ (right_factor.double() @ ones))
    allowed = 8.0 if group.is_gpu else 0.0
    speeds = group.gather(2.0 * size**3 / best / 1e12)
    peak = group.accelerator()
    min_speed = (_MIN_SHARE_GPU if group.is_gpu else _MIN_SHARE) * statistics.median_high(speeds)
    min_speed = max(min_speed, _MIN_PEAK_SHARE * peak.bf16_flops / 1e12 if peak else 0.0)
    remedy = "look for throttling and other processes there; ISOLATE the host if it stays slow"
    results = group.judge_speeds("product speed", speeds, "TFLOP/s", min_speed, remedy)
    remedy = "ISOLATE the host: this device computes wrongly"
    for host, errors in group.by_host(group.gather(error)):
        value = f"largest error {max(errors):g}"
        results.append(limited("product sums", max(errors) <= allowed, value, f"<= {allowed:g}", remedy, host=host))
    return results


def _largest(differences: Tensor) -> float:
    """Return the largest absolute value; infinity if one is NaN, which `max` and comparisons would miss."""
    largest = differences.abs().max().item()
    return math.inf if math.isnan(largest) else largest


def host_copies(group: RankGroup) -> list[Result]:
    """Check the speed of copies between the memory of the host and its GPUs, in both directions."""
    if not group.is_gpu:
        return []
    block = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device_block = block.to(group.process.device)
    to_device = []
    to_host = []
    for _ in range(_ROUNDS):
        began = group.now()
        device_block.copy_(block, non_blocking=True)
        middle = group.now()
        block.copy_(device_block, non_blocking=True)
        to_device.append(middle - began)
        to_host.append(group.now() - middle)
    speeds = group.gather(len(block) / max(min(to_device), min(to_host)) / 1e9)
    accelerator = group.accelerator()
    min_speed = min_copy_speed(speeds, accelerator.name.split()[0] if accelerator else "")
    return group.judge_speeds("host copies", speeds, "GB/s", min_speed, "ISOLATE the host: PCIe link of this GPU")


def min_copy_speed(speeds: Sequence[float], gpu: str) -> float:
    """Return the GB/s that copies between host and GPU must reach: most of the median of all ranks, and the usual speed
    of this GPU's link, so that slow hosts are found even if all hosts are slow.

    Args:
        gpu: name of the GPU in `_HOST_COPIES`; a GPU without an entry has only the limit from the median.
    """
    return max(_MIN_SHARE_GPU * statistics.median_high(speeds), _ALL_AT_ONCE * _HOST_COPIES.get(gpu, 0))


def collectives(group: RankGroup) -> list[Result]:
    """Check sums and bus bandwidth of the four collectives of a run."""
    world = group.process.world_size
    rank = group.process.rank
    device = group.process.device
    quick_size = 2**28 if group.is_gpu else 2**22
    count = (4 * quick_size if group.is_full else quick_size) // 4 // world * world
    local = torch.full((count,), float(rank + 1), device=device)
    whole = torch.empty_like(local)
    part = torch.empty(count // world, device=device)
    total = torch.tensor(world * (world + 1) / 2, device=device)
    numbers = torch.arange(1.0, world + 1, device=device).repeat_interleave(count // world)

    world_group = dist.group.WORLD
    assert world_group is not None
    calls: dict[str, tuple[Callable[[], object], Tensor, Tensor]] = {
        "all-reduce": (lambda: dist.all_reduce(whole), whole, total),
        "all-gather": (lambda: compat.gather_rows(whole, local[: count // world], world_group), whole, numbers),
        "reduce-scatter": (lambda: compat.scatter_row_sums(part, local, world_group), part, total),
        "all-to-all": (lambda: dist.all_to_all_single(whole, local), whole, numbers),
    }
    results = []
    for name, (call, output, expected) in calls.items():
        times = []
        error = 0.0
        group.meet()
        for _ in range(_ROUNDS):
            whole.copy_(local)
            dist.barrier()
            times.append(seconds_of(call, device))
            error = max(error, _largest(output - expected))
        wrong = [f"rank {number}" for number, rank_error in enumerate(group.gather(error)) if rank_error]
        value = f"wrong on {', '.join(wrong)}" if wrong else f"right on {world} ranks"
        remedy = "memory or link of these ranks: preflight their hosts alone, then ISOLATE those that fail"
        results.append(limited(f"{name} sums", not wrong, value, "exact", remedy))
        seconds = min(map(max, zip(*group.gather(times), strict=True)))  # the quickest round, by its slowest rank
        if world > 1:
            bus = bus_bandwidth(name, count * 4, seconds, world)
            min_bus = _min_bus(group) if name == "all-reduce" else _MIN_GB_PER_SECOND
            value = f"{bus:.3g} GB/s bus bandwidth with {count * 4 / 2**20:.0f} MiB"
            remedy = "docs/nccl.md: look at the links, tune nothing first"
            results.append(limited(name, bus >= min_bus, value, f">= {min_bus:g} GB/s", remedy))
    return results


def _min_bus(group: RankGroup) -> float:
    accelerator = group.accelerator()
    if accelerator is not None and group.is_full and group.process.world_size == group.local_ranks == 8:
        return _NODE_BUS.get(accelerator.name, _MIN_GB_PER_SECOND)
    return _MIN_GB_PER_SECOND


def pairs(group: RankGroup) -> list[Result]:
    """Check two rounds of pairs of hosts: (0, 1), (2, 3) and (1, 2), (3, 4). On one host, pairs of ranks.

    Each host is in two pairs, and a host whose pairs are both slow has a slow link. All ranks of a host send at once,
    each to the rank with its number on the other host.
    """
    stride = group.local_ranks if len(group.hosts) > 1 else 1
    units = group.process.world_size // stride
    unit = group.process.rank // stride
    if units == 1:
        return []
    block = torch.empty(2**26 if group.is_gpu else 2**20, device=group.process.device)
    best = 0.0
    for shift in (0, 1):
        other = ((unit + shift) ^ 1) - shift
        group.meet()
        if 0 <= other < units:
            peer = other * stride + group.process.rank % stride
            best = max(best, _speed_to(group, peer, block, is_first=unit < other))
    speeds = group.gather(best)
    min_speed = max((_MIN_SHARE / 2) * statistics.median_high(speeds), _MIN_GB_PER_SECOND)
    remedy = "cable, port or route of this host: preflight it with another neighbour, then ISOLATE it"
    return group.judge_speeds("pairs", speeds, "GB/s", min_speed, remedy)


def _speed_to(group: RankGroup, peer: int, block: Tensor, *, is_first: bool) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = group.now()
        for is_sender in (is_first, not is_first):
            if is_sender:
                dist.send(block, peer)
            else:
                dist.recv(block, peer)
        times.append(group.now() - began)
    return 2 * block.nbytes / min(times) / 1e9
