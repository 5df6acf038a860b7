"""`python -m glm46 preflight` as a fork, whose ranks are forks too."""

from collections.abc import Callable

from glm46 import cli
from tests.ranks.forked_launch import ForkedRank, fork_ranks


def preflight(*argv: str, prepare: Callable[[int], None] = ForkedRank.prepare) -> int:
    """On one host; the exit code. ``prepare(rank)`` is called in each rank before its command."""
    ForkedRank.prepare = staticmethod(prepare)
    fork_ranks()
    return cli.main(["preflight", *argv])
