"""`python -m glm46 preflight` as a fork, whose ranks are forks too."""

from collections.abc import Callable

from glm46 import cli
from glm46.compute.distributed.process import Process
from glm46.operate.cluster import ranks
from glm46.operate.cluster.results import Result
from glm46.run.plan import Plan
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
            ranks.small_steps = _unfinished

    return preflight(*argv, prepare=prepare)


def _unfinished(plan: Plan, process: Process) -> Result:
    raise NotImplementedError("uneven shards")
