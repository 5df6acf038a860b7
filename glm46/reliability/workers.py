"""Worker processes of the loader: no signal ends them but that of their rank, which may have a step to finish."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

from glm46.distributed.process import die_with_parent
from glm46.reliability.stop import SIGNALS


@contextmanager
def starting_workers() -> Iterator[None]:
    """Around the start of worker processes, which inherit that these signals are blocked. torchrun and job systems
    signal every process of a rank; a worker that ended then would end the run before the save."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(_number: int) -> None:
    """First call in a worker process, started within `starting_workers`: only its rank ends it, or the rank's death."""
    die_with_parent()
    threading.Thread(target=_obey, args=(parent_process().pid,), name="signals", daemon=True).start()


def _obey(rank: int) -> None:
    while True:
        signal_info = signal.sigwaitinfo(SIGNALS)
        if signal_info.si_pid == rank and signal_info.si_signo == signal.SIGTERM:  # the loader is being closed
            os._exit(0)
