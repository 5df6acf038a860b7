"""Kill a process when its parent exits. Needs no torch."""

import ctypes
import os
import signal

from glm46.compute.distributed.environment import launched_world_size

_PR_SET_PDEATHSIG = 1
"""Option of prctl. Source: linux/prctl.h."""


def die_with_parent() -> None:
    """Kill this rank when its parent (the launcher, or torchrun) exits, so that an orphan does not hold a GPU. No
    effect in a process that is not a rank."""
    if launched_world_size() is None:
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)
