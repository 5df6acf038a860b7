"""This process among the others. The only file that reads the environment."""

import ctypes
import datetime
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


_RECORDED_COLLECTIVES = 2000
"""What the flight recorder keeps: some steps, to see who is behind."""


@dataclass(frozen=True)
class Process:
    """Who this process is and where it computes."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all: writes logs, prints."""
        return self.rank == 0


def visible_gpus() -> str | None:
    """What CUDA_VISIBLE_DEVICES says, None when it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def launched_world_size() -> int | None:
    """Number of processes that torchrun started, None when it did not start this one."""
    size = os.environ.get("WORLD_SIZE")
    return None if size is None else int(size)


def set_variables(names: Sequence[str]) -> dict[str, str]:
    """Those of some variables of the environment that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def launched_rank() -> int:
    """This process's number among those that torchrun started; 0 when it did not start this one."""
    return int(os.environ.get("RANK", "0"))


def die_with_parent() -> None:
    """Have the system kill this process when torchrun, which started it, is gone: without that a rank whose torchrun
    was killed goes on for ever and keeps its GPU. Only Linux can; does nothing where torchrun did not start this."""
    if launched_world_size() is None or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before it was watched
        os.kill(os.getpid(), signal.SIGKILL)


def share_cores(cores: int, processes: int) -> None:
    """Give each process that is started from here its share of the cores. Without this torchrun gives each one thread;
    what the user has set stays."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // processes, 1)))


def join(timeout_seconds: int) -> Process:
    """Join the process group that torchrun's variables describe, or make one of a single process.

    There is a group even for one process, so that all code after this has one path. CPU tensors always go through gloo:
    token counts and the wish to stop are agreed on without waiting for the GPU.
    """
    rank, world_size = launched_rank(), launched_world_size() or 1
    timeout = datetime.timedelta(seconds=timeout_seconds)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend, device_id = "cpu:gloo,cuda:nccl", device
    else:
        device, backend, device_id = torch.device("cpu"), "gloo", None
    store = dist.HashStore() if world_size == 1 else None
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, store=store, timeout=timeout, device_id=device_id
    )
    return Process(rank, world_size, device)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
