"""`python -m glm46 preflight` as a fork, whose ranks are forks too."""

import time
from collections.abc import Callable

from glm46 import cli
from glm46.compute.distributed.process import Process
from glm46.operate.cluster import rank as rank_module
from glm46.operate.cluster.results import Result
from glm46.run.plan import Plan
from tests.processes import PROGRAM_SECONDS
from tests.ranks.forked_launch import ForkedRank, fork_ranks


def preflight(*argv: str, prepare: Callable[[int], None] = ForkedRank.prepare) -> int:
    """On one host; the exit code. ``prepare(rank)`` is called in each rank before its command."""
    ForkedRank.prepare = staticmethod(prepare)
    fork_ranks()
    return cli.main(["preflight", *argv])


def preflight_with_broken_rank(*argv: str) -> int:
    """As `preflight`; rank 1 raises in the small steps, after it has joined the collectives before them."""

    def prepare(rank: int) -> None:
        if rank == 1:
            rank_module.small_steps = _unfinished

    return preflight(*argv, prepare=prepare)


def _unfinished(plan: Plan, process: Process) -> list[Result]:
    raise NotImplementedError("uneven shards")


def preflight_with_rank_that_waits(*argv: str) -> int:
    """As `preflight`; rank 1 does not come to the end of its products, and the others wait for it for some seconds."""

    def prepare(rank: int) -> None:
        rank_module._WAIT_SECONDS = {False: 3.0}
        if rank == 1:
            rank_module.products = lambda group: time.sleep(PROGRAM_SECONDS)

    return preflight(*argv, prepare=prepare)
