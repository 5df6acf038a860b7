"""Time of one MoE layer whose experts are on two hosts with a slow link between them, all to all and in two levels.

    sudo python scripts/measure/measure_exchange.py --mbit 200

The hosts are network namespaces of this machine, joined by a pair of virtual interfaces that send at the given rate;
ranks of one host talk over its loopback interface, at full speed. Needs Linux, root, `ip` and `tc`. Both ways run in
turn, so that what else the machine does slows both.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.compute.distributed.groups import group_of_partition
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions
from glm46.compute.parallelize.exchange import AllToAllDispatcher
from glm46.compute.parallelize.two_level import TwoLevelDispatcher
from glm46.config.presets import PRESETS

HOSTS, OF_HOST = 2, 4
NAMES = [f"glm46-host{host}" for host in range(HOSTS)]
PORT = 29555


def join_hosts(mbit: float) -> None:
    """Two namespaces, joined by a link of this rate in each direction."""
    commands = [f"ip netns add {name}" for name in NAMES]
    commands += [f"ip link add link0 netns {NAMES[0]} type veth peer name link1 netns {NAMES[1]}"]
    for host, name in enumerate(NAMES):
        inside = f"ip netns exec {name}"
        commands += [
            f"{inside} ip link set lo up",
            f"{inside} ip address add 10.77.0.{host + 1}/24 dev link{host}",
            f"{inside} ip link set link{host} up",
            f"{inside} tc qdisc add dev link{host} root tbf rate {mbit}mbit burst 128kb latency 100ms",
        ]
    for command in commands:
        subprocess.run(command.split(), check=True)


def run_rank(rank: int, arguments: argparse.Namespace) -> None:
    """Time the layer on this rank; rank 0 prints the medians."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="10.77.0.1", MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME=f"link{rank // OF_HOST}")
    ranks = HOSTS * OF_HOST
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    by_host = torch.arange(ranks).view(HOSTS, OF_HOST)
    between, in_host = group_of_partition(by_host.t()), group_of_partition(by_host)
    changes = dict(n_routed_experts=32, num_experts_per_tok=8, hidden_size=arguments.width, moe_intermediate_size=64)
    torch.manual_seed(0)
    moe = MoE(PRESETS["debug"].model_copy(update=changes))
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.02)
    for name, parameter in list(moe.experts.named_parameters()):
        moe.experts.register_parameter(name, nn.Parameter(parameter.data.chunk(ranks)[rank].clone()))
    ways = {
        "all_to_all": AllToAllDispatcher(dist.group.WORLD),
        "two_level": TwoLevelDispatcher(dist.group.WORLD, between, in_host),
        "two_chunks": TwoLevelDispatcher(dist.group.WORLD, between, in_host, 2),
    }
    x = torch.randn(1, arguments.tokens, arguments.width, requires_grad=True)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats + 1):
        for name, way in ways.items():
            moe.dispatcher = way
            dist.barrier()
            start = time.perf_counter()
            y, _ = moe(x, None, RoutingOptions())
            y.sum().backward()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        found = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        for name, median in found.items():
            shown = " ".join(f"{each:.2f}" for each in seconds[name][1:])
            print(f"{name:<12} {median:.2f} s, forward and backward; all: {shown}")
        print(f"ratio        {found['all_to_all'] / found['two_level']:.2f}")
    dist.destroy_process_group()


def main() -> None:
    """Make the hosts, run a process for each rank in them, and remove the hosts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of the link between the hosts")
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--width", type=int, default=512, help="hidden size; rows are FP32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return run_rank(arguments.rank, arguments)
    try:
        join_hosts(arguments.mbit)
        of_rank = [sys.executable, __file__, *sys.argv[1:], "--rank"]
        commands = [["ip", "netns", "exec", NAMES[rank // OF_HOST], *of_rank, str(rank)] for rank in range(8)]
        processes = [subprocess.Popen(command) for command in commands]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            sys.exit("a rank failed")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False)
    return None


if __name__ == "__main__":
    main()
