"""Checks of all devices at once: products, collectives and pairs of hosts. All are collective, and return the result of
this rank."""

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from glm46 import compat
from glm46.compute.distributed.bandwidth import bus_bandwidth, seconds_of
from glm46.operate.cluster.rank_group import RankGroup
from glm46.operate.cluster.results import FAIL, SKIP, Defect, Result, judge

_ROUNDS = 6
"""Repetitions of a collective or of an exchange; the quickest one counts."""
_MIN_SHARE = 0.6
"""Minimum speed of a CPU's products, relative to the median of all ranks."""
_MIN_SHARE_GPU = 0.9
"""The same for a GPU."""
_MIN_PEAK_SHARE = 0.65
"""Minimum speed of a GPU's products in BF16, relative to the vendor's peak."""
_MIN_PAIR_SHARE = 0.3
"""Minimum speed between two hosts, relative to the median of all ranks."""
_MIN_GB_PER_SECOND = 0.02
"""Minimum speed of any link: 1 Gb/s gives 0.1."""
_HOST_BUS = {"B200": 780, "H200": 430, "H100": 440, "H800": 150, "A100": 220}
"""Minimum GB/s of an all-reduce of 1 GiB or more over the eight GPUs of a host, as clouds and vendors state it for
their health checks; H800 from its link of 200 GB/s."""


def products(ranks: RankGroup) -> Result:
    """Check speed and sums of products of small integers, which are exact in any order, on all ranks at once."""
    size = 8192 if ranks.is_gpu else 384
    dtype = torch.bfloat16 if ranks.is_gpu else torch.float32
    device = ranks.process.device
    generator = torch.Generator().manual_seed(0)
    left_factor = torch.randint(-1, 2, (size, size), generator=generator).to(device, dtype)
    right_factor = torch.randint(-1, 2, (size, size), generator=generator).to(device, dtype)
    out = left_factor @ right_factor
    best = math.inf
    # A CPU's own time: other programs on the same cores do not make it slow.
    now = ranks.now if ranks.is_gpu else time.thread_time
    ranks.meet()
    end = time.perf_counter() + (2.0 if ranks.is_full else 0.7)
    while time.perf_counter() < end:
        began = now()
        out = left_factor @ right_factor
        best = min(best, now() - began)
    speed = 2.0 * size**3 / best / 1e12
    peak = ranks.accelerator()
    least = (_MIN_SHARE_GPU if ranks.is_gpu else _MIN_SHARE) * statistics.median_high(ranks.gather(speed))
    least = max(least, _MIN_PEAK_SHARE * peak.bf16_flops / 1e12 if peak else 0.0)
    ones = torch.ones(size, dtype=torch.float64, device=device)
    # Row sums, exact in FP64, find a wrong entry in O(n^2). Products in FP32 are exact. BF16 changes odd entries above
    # 256 by one: at most three of a row with this seed. Eight leave room for kernels that add rounded parts.
    error = largest(out.double() @ ones - left_factor.double() @ (right_factor.double() @ ones))
    allowed = 8.0 if ranks.is_gpu else 0.0
    faults = []
    if error > allowed:
        faults.append(Defect(FAIL, f"largest error {error:g}", "ISOLATE the host: this device computes wrongly"))
    if speed < least:
        remedy = "look for throttling and other processes there; ISOLATE the host if it stays slow"
        faults.append(Defect(FAIL, f"{speed:.3g} TFLOP/s", remedy))
    requirement = f">= {least:.3g} TFLOP/s, errors <= {allowed:g}"
    return judge("products", faults, f"{speed:.3g} TFLOP/s, largest error {error:g}", requirement)


def largest(differences: Tensor) -> float:
    """Return the largest absolute value; infinity if one is NaN, which `max` and comparisons would miss."""
    value = differences.abs().max().item()
    return math.inf if math.isnan(value) else value


def collectives(ranks: RankGroup) -> Result:
    """Check the sums of the four collectives of a run, and their bus bandwidth."""
    world = ranks.process.world_size
    rank = ranks.process.rank
    device = ranks.process.device
    least_bytes = 2**28 if ranks.is_gpu else 2**22
    tensor_bytes = 4 * least_bytes if ranks.is_full else least_bytes
    count = tensor_bytes // 4 // world * world  # FP32, the same number for each rank
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
    faults = []
    values = []
    for name, (call, output, expected) in calls.items():
        times = []
        error = 0.0
        ranks.meet()
        for _ in range(_ROUNDS):
            whole.copy_(local)
            dist.barrier()
            times.append(seconds_of(call, device))
            error = max(error, largest(output - expected))
        if error:
            remedy = "memory or link of these ranks: preflight their hosts alone, then ISOLATE the hosts that fail"
            faults.append(Defect(FAIL, f"{name}: sums wrong by {error:g}", remedy))
        seconds = min(map(max, zip(*ranks.gather(times), strict=True)))  # the quickest round, by its slowest rank
        bus = bus_bandwidth(name, count * 4, seconds, world)
        values.append(f"{name} {bus:.3g}")
        least = _least_bus(ranks) if name == "all-reduce" else _MIN_GB_PER_SECOND
        if world > 1 and bus < least:
            remedy = "docs/nccl.md: look at the links before you tune anything"
            faults.append(Defect(FAIL, f"{name} {bus:.3g} GB/s < {least:g} GB/s", remedy))
    value = f"right; {', '.join(values)} GB/s bus bandwidth with {count * 4 / 2**20:.0f} MiB"
    requirement = f"exact; all-reduce >= {_least_bus(ranks):g} GB/s, the others >= {_MIN_GB_PER_SECOND:g} GB/s"
    return judge("collectives", faults, value, requirement)


def _least_bus(ranks: RankGroup) -> float:
    accelerator = ranks.accelerator()
    if accelerator is not None and ranks.is_full and ranks.process.world_size == ranks.local_ranks == 8:
        return _HOST_BUS.get(accelerator.name, _MIN_GB_PER_SECOND)
    return _MIN_GB_PER_SECOND


def pairs(ranks: RankGroup) -> Result:
    """Check two rounds of pairs of hosts: (0, 1), (2, 3) and (1, 2), (3, 4). On one host, pairs of ranks.

    Each host but the first and the last is in two pairs. The better one counts, so a host that is slow in all its pairs
    has a slow link; for the first and the last it may also be their only partner's. All ranks of a host send at once,
    each to the rank with its number on the other host.
    """
    world = ranks.process.world_size
    stride = ranks.local_ranks if world > ranks.local_ranks else 1
    units = world // stride
    if units == 1:
        return Result("pairs", SKIP, "one rank has no partner")
    unit = ranks.process.rank // stride
    block = torch.empty(2**26 if ranks.is_gpu else 2**20, device=ranks.process.device)
    best = 0.0
    for shift in (0, 1):
        # The partner in (0, 1), (2, 3), ...; or in (1, 2), (3, 4), ..., which are these pairs after a shift by one.
        other = ((unit + shift) ^ 1) - shift
        ranks.meet()
        if 0 <= other < units:
            peer = other * stride + ranks.process.rank % stride
            best = max(best, _speed_to(ranks, peer, block, is_first=unit < other))
    least = max(_MIN_PAIR_SHARE * statistics.median_high(ranks.gather(best)), _MIN_GB_PER_SECOND)
    remedy = "cable, port or route of this host: preflight it with another neighbour, then ISOLATE it"
    value = f"{best:.3g} GB/s"
    return judge("pairs", [Defect(FAIL, value, remedy)] if best < least else [], value, f">= {least:.3g} GB/s")


def _speed_to(ranks: RankGroup, peer: int, block: Tensor, *, is_first: bool) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = ranks.now()
        for is_sender in (is_first, not is_first):
            if is_sender:
                dist.send(block, peer)
            else:
                dist.recv(block, peer)
        times.append(ranks.now() - began)
    return 2 * block.nbytes / min(times) / 1e9
