"""The signal that a process gets at the end of its parent. Needs no torch."""

import ctypes
import os
import signal

from glm46.compute.distributed.environment import launched_world_size

_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def die_with_parent(parent: int | None = None) -> None:
    """Have the system kill this process when its parent ends, the server of ranks or torchrun; it would otherwise go on
    and keep its GPU.

    Args:
        parent: its process id, known before a fork: it may have ended since then. None: the parent of now, without
            effect in a process that is not a rank.
    """
    if parent is None and launched_world_size() is None:
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)
