"""`python -m glm46 preflight` as a fork, whose ranks are forks too."""

from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from glm46 import cli
from tests.ranks.forked_launch import ForkedRank


def preflight(*argv: str, prepare: Callable[[int], None] = ForkedRank.prepare) -> int:
    """On one host; the exit code. ``prepare(rank)`` is called in each rank before its command."""
    ForkedRank.prepare = staticmethod(prepare)
    SubprocessHandler._popen = lambda self, args, env: ForkedRank(args, env)
    return cli.main(["preflight", *argv])
