"""Measures the links between ranks: the shares of a node's and a network's bandwidth that the planner uses.

Start it on every host like a run: ``torchrun --nproc-per-node=8 -m glm46 benchmark links --gpu H100``.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.bandwidth import seconds_of
from glm46.compute.distributed.environment import launched_world_size
from glm46.compute.distributed.groups import new_group
from glm46.compute.distributed.process import join, leave, ranks_of_every_host
from glm46.config.errors import UserError
from glm46.engine.observe.peaks import Accelerator, accelerator_of
from glm46.operate.benchmark.rates import device_peaks, write_shares

_ROUNDS = 6
"""Number of rounds; the first one connects the ranks and is not counted."""
_JOIN_SECONDS = 600
_SIZES = {"cuda": (2**16, 2**20, 2**24, 2**28), "cpu": (2**12, 2**16, 2**20, 2**22)}
"""Bytes of the complete tensor. The planner uses the speed of the largest one."""


def benchmark_links(arguments: argparse.Namespace) -> None:
    """Measure all-reduce and all-to-all by size, inside a host and over all hosts. Rank 0 prints a table and the
    shares, and adds them to the file of ``--json``. Collective.

    Raises:
        UserError: there are fewer than two ranks, hosts are unequal, the GPU is unknown, or the file cannot be written.
    """
    if (launched_world_size() or 1) < 2:
        command = "torchrun --nproc-per-node=GPUS -m glm46 benchmark links"
        raise UserError(f"benchmark links: it measures between ranks; start it on each host: {command}")
    process = join(_JOIN_SECONDS)
    try:
        if not (host_ranks := ranks_of_every_host()):
            raise UserError("benchmark links: hosts have unequal numbers of ranks; start equally many on each")
        peaks = accelerator_of(arguments.gpu) if arguments.gpu else device_peaks(process.device, torch.float32)
        if peaks is None:
            raise UserError(f"benchmark links: unknown GPU {torch.cuda.get_device_name()}; describe it with --gpu")
        shares, table = _measure(process.device, process.world_size, host_ranks, peaks, arguments.network)
        if process.is_main:
            print("\n".join(table))
            write_shares(shares, arguments.json)
    except ValueError as error:
        raise UserError(f"benchmark links: --gpu {error}") from error
    finally:
        leave()


def _measure(
    device: torch.device, world: int, host_ranks: int, peaks: Accelerator, network_gbits: float
) -> tuple[dict[str, float | str], list[str]]:
    """Return the shares in the form of `Efficiencies.read`, and the lines of a table. Collective."""
    hosts = [new_group(range(first, first + host_ranks)) for first in range(0, world, host_ranks)]
    groups: dict[str, tuple[dist.ProcessGroup | None, int]] = {}
    if host_ranks > 1:
        groups["a host"] = hosts[dist.get_rank() // host_ranks], host_ranks
    if world > host_ranks:
        groups["all hosts"] = dist.group.WORLD, world
    shares: dict[str, float | str] = {}
    table = [f"{'ranks':<20} {'collective':<12} {'bytes':>12} {'ms':>10} {'GB/s':>8}"]
    for where, (group, ranks) in groups.items():
        speeds = dict[str, float]()
        for name, parts_sent, call in _calls(group):
            for size in _SIZES[device.type]:
                tensor = torch.zeros(size // 4 // ranks * ranks, device=device)
                seconds = _seconds(partial(call, tensor), device)
                speeds[name] = parts_sent * (ranks - 1) / ranks * tensor.nbytes / seconds
                shown = f"{tensor.nbytes:>12,} {seconds * 1e3:>10.3f} {speeds[name] / 1e9:>8.2f}"
                table.append(f"{f'{ranks} of {where}':<20} {name:<12} {shown}")
        shares.setdefault("call_seconds", _seconds(lambda: dist.all_reduce(torch.zeros(1, device=device)), device))
        if where == "a host":
            shares["link"] = speeds["all-reduce"] / peaks.link_bandwidth
        else:
            inside = peaks.link_bandwidth * float(shares.get("link", 1.0))
            away = (world - host_ranks) / (world - 1)
            # Only part of an exchange leaves the host; the rest overlaps with it inside (`TargetCluster.link`).
            port = away / max(1 / speeds["all-to-all"] - (1 - away) / inside, 1e-30)
            shares["network"] = port / (network_gbits / 8 * 1e9)
    source = f"{world} ranks of {peaks.name}, torch {torch.__version__}"
    return shares | {"source": source}, table


def _calls(group: dist.ProcessGroup | None) -> list[tuple[str, float, Callable[[Tensor], object]]]:
    """Return each collective with its name and the number of tensor sizes that a rank sends."""
    return [
        ("all-reduce", 2, lambda tensor: dist.all_reduce(tensor, group=group)),
        ("all-to-all", 1, lambda tensor: dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group)),
    ]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the last rank in the fastest round. Collective."""
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        times.append(seconds_of(call, device))
    slowest = torch.tensor(times[1:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.min())
