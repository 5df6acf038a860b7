"""Ranks that agree while one of them is dead, or does not come; prints what the others raise as JSON.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/agreements.py
"""

import json
import os
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from glm46.compute.distributed.agreement import awaited, combine_on_host
from glm46.engine.observe.rank_spread import spread_over_ranks
from glm46.engine.training.rank_sums import sum_on_host
from tests.processes import wait_until
from tests.ranks.forked_ranks import await_ranks, in_halves, start_ranks

RANKS, VICTIM, TIMEOUT = 6, 5, 30.0
"""The victim is a child of rank 4, which is one of rank 0."""
FAULTS = ("dead", "late")
NAMES = ["a", "b", "c"]


def values(rank: int) -> dict[str, float]:
    """Of a rank; one name that only some ranks have, and one that none has."""
    return {"a": float(rank % 4)} | ({"b": -rank / 3} if rank in (1, 4) else {})


def work(rank: int, fault: str, folder: Path) -> int:
    """Agree once with all ranks, and once more while the victim is away."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT))
    found = {"sums": sum_on_host({"x": [rank, 1]})}
    found["spread"] = spread_over_ranks(values(rank), NAMES)
    if rank == VICTIM:
        if fault == "dead":
            os._exit(0)
        others = [folder / f"{other}.json" for other in range(RANKS) if other != VICTIM]
        wait_until(lambda: all(file.exists() for file in others))
    began = time.monotonic()
    try:
        combine_on_host(torch.zeros(1))
    except RuntimeError as error:
        found |= {"error": str(error), "awaited": list(awaited)}
    folder.joinpath(f"{rank}.json").write_text(json.dumps(found | {"seconds": time.monotonic() - began}))
    os._exit(0)  # its connections are not closed in order


def main() -> None:
    """Both faults, beside each other."""

    def run(fault: str) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ranks = start_ranks(RANKS, folder / "log-", partial(work, fault=fault, folder=folder))
            codes = await_ranks(ranks)
            rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
            print(json.dumps({"name": fault, "codes": codes, "ranks": rows}), flush=True)

    in_halves(FAULTS, run)


if __name__ == "__main__":
    main()
