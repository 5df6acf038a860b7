"""Time of the agreement on a step by the number of processes, beside gloo's all-reduce of the same numbers.

    python scripts/measure/measure_agreement.py 8 32

Each process is forked and computes with one thread. Per number of processes one JSON object: rounds of messages that
follow each other, messages of all processes, and the median and least time of rank 0 in milliseconds. With fewer cores
than processes the time is that of all messages, and not of the rounds.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from glm46.compute.distributed.agreement import combine_on_host
from glm46.operate.estimate.plan_sizes import tree_rounds

NUMBERS, WARM_UP, REPEATS = 16, 10, 200


def _times(work: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(WARM_UP + REPEATS):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    dist.barrier()
    return times[WARM_UP:]


def _rank(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    numbers = torch.zeros(NUMBERS, dtype=torch.int64)
    forms = {
        "agreement": (tree_rounds(ranks), 2 * (ranks - 1), _times(lambda: combine_on_host(numbers))),
        "all_reduce": (2 * (ranks - 1), 2 * (ranks - 1) * ranks, _times(lambda: dist.all_reduce(numbers))),
    }
    if rank == 0:
        for name, (following, messages, times) in forms.items():
            row = {"form": name, "ranks": ranks, "rounds": following, "messages": messages}
            row |= {"median_ms": round(statistics.median(times), 3), "least_ms": round(min(times), 3)}
            print(json.dumps(row | {"cores": len(os.sched_getaffinity(0))}), flush=True)
    dist.destroy_process_group()


def main(counts: list[int]) -> None:
    """Measure each number of processes."""
    for ranks in counts:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                _rank(rank, ranks, port)
                sys.stdout.flush()
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]] or [8, 32])
