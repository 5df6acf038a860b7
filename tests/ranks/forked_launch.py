"""`python -m glm46 launch` by fork: real launcher, real torchrun, real ranks, without their seconds of imports.

The caller has torch and glm46 imported. The launcher is a fork of it, and torchrun forks the ranks; a rank then runs
the command line that torchrun made for it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from glm46 import cli
from glm46.config.run_config import RunConfig
from glm46.operate.launch.train_rank import train
from tests.harness import end_with

EXIT_SECONDS = "TEST_EXIT_SECONDS"
"""A variable: seconds that a rank takes from the end of its command to its exit."""


class ForkedRank:
    """What torchrun uses of a rank's process."""

    prepare: Callable[[int], None] = staticmethod(lambda rank: None)
    """Called in each rank before its command."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str]):
        self.returncode: int | None = None
        # Python has hooks around a fork and loses what a handler raises there; `subprocess` runs none of them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            # As in a new interpreter: no descriptors of the launcher, no handlers, a session of its own.
            os.closerange(3, 512)
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.setsid()
            os.environ.update(env)
            end_with(lambda: self._run(args))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self, args: tuple[str, ...]) -> int:
        ForkedRank.prepare(int(os.environ["RANK"]))
        code = cli.main(args[args.index("glm46") + 1 :])
        time.sleep(float(os.environ.get(EXIT_SECONDS, 0)))
        return code

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked rank", timeout)
            time.sleep(0.005)
        return self.returncode


def fork_launch(config: Path, log: Path, prepare: Callable[[int], None] = ForkedRank.prepare) -> int:
    """Start the launcher with two ranks; its process id. ``prepare(rank)`` is called in each rank before it starts."""
    child = os.fork()
    if child == 0:
        os.setsid()
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        ForkedRank.prepare = staticmethod(prepare)
        end_with(lambda: launch("--config", str(config), "--nproc", "2"))
    return child


def launch(*arguments: str) -> None:
    """`python -m glm46 launch` with these arguments, in this process, which ends with its exit code."""
    fork_ranks()
    sys.exit(cli.main(["launch", *arguments]))


def preflight(*arguments: str, prepare: Callable[[int], None] = ForkedRank.prepare) -> None:
    """`python -m glm46 preflight` on one host, in this process, which ends with its exit code.

    ``prepare(rank)`` is called in each rank before its command.
    """
    ForkedRank.prepare = staticmethod(prepare)
    fork_ranks()
    sys.exit(cli.main(["preflight", *arguments]))


def train_and_exit(config: RunConfig) -> None:
    """Train on a rank, and end with the exit code."""
    sys.exit(train(config))


def fork_ranks() -> None:
    """From now on torchrun in this process forks its ranks."""
    SubprocessHandler._popen = lambda self, args, env: ForkedRank(args, env)
