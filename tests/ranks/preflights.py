"""`python -m glm46 preflight` as a fork, whose ranks are forks too."""

import os
import signal
import time

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from glm46 import cli
from tests.ranks.forked_launch import ForkedRank


def preflight(*argv: str, stopped: int | None = None) -> int:
    """On one host; the exit code.

    Args:
        stopped: a rank that stops for good half a second after its start.
    """

    def prepare(rank: int) -> None:
        if rank == stopped and os.fork() == 0:
            rank_process = os.getppid()
            time.sleep(0.5)
            os.kill(rank_process, signal.SIGSTOP)
            os._exit(0)

    ForkedRank.prepare = staticmethod(prepare)
    SubprocessHandler._popen = lambda self, args, env: ForkedRank(args, env)
    return cli.main(["preflight", *argv])
