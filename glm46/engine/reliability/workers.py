"""Signals in worker processes of the loader: only their rank ends them, which may have a step to finish first."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

from glm46.compute.distributed.process_control import die_with_parent
from glm46.engine.reliability.stop import SIGNALS


@contextmanager
def starting_workers() -> Iterator[None]:
    """Start worker processes inside this context: they inherit blocked signals. torchrun and job systems signal every
    process of a rank; a worker that ended then would end the run before the save."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(_number: int) -> None:
    """First call in a worker process started within `starting_workers`: it ends when its rank ends it or is gone."""
    die_with_parent()
    rank = parent_process()
    assert rank is not None, "called outside of a worker"
    threading.Thread(target=_end_with, args=(rank.pid,), name="signals", daemon=True).start()


def _end_with(rank: int) -> None:
    while True:
        signal_info = signal.sigwaitinfo(SIGNALS)
        if signal_info.si_pid == rank and signal_info.si_signo == signal.SIGTERM:  # the loader closes its workers
            os._exit(0)
