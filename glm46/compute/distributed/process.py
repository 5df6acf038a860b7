"""This process, its device and its process group."""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from glm46.compat import HashStore
from glm46.compute.distributed.agreement import combine_on_host
from glm46.compute.distributed.environment import (
    launched_local_rank,
    launched_local_world_size,
    launched_rank,
    launched_world_size,
    set_default,
)

_RECORDED_COLLECTIVES = 2000
"""Size of the flight recorder: the collectives of some steps, which show the rank that lags."""


@dataclass(frozen=True)
class Process:
    """Rank, world size and device of this process."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True if this process writes logs and prints for all ranks."""
        return self.rank == 0


def join(timeout_seconds: int) -> Process:
    """Join the process group that torchrun's variables describe, or make a group of one process. Collective.

    One process has a group too, so that all later code has one path. CPU tensors always go through gloo: ranks exchange
    token counts and stop requests without waiting for the GPU.
    """
    rank = launched_rank()
    world_size = launched_world_size() or 1
    timeout = datetime.timedelta(seconds=timeout_seconds)
    set_default("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))
    # With timing, NCCL's recorder distinguishes a running collective from one that waits for another kernel.
    set_default("TORCH_NCCL_ENABLE_TIMING", "1")
    # Keep fused multiply-add, which rounds once. Triton 3.9 warns if it is not set, since 3.10 will round twice.
    set_default("TRITON_DEFAULT_FP_FUSION", "1")
    if torch.cuda.is_available():
        device = torch.device("cuda", launched_local_rank())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
        device_id = device
    else:
        device = torch.device("cpu")
        backend = "gloo"
        device_id = None
    store = HashStore() if world_size == 1 else None  # one process needs no port; None: by torchrun's variables
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, store=store, timeout=timeout, device_id=device_id
    )
    return Process(rank, world_size, device)


def ranks_of_every_host() -> int:
    """Return the number of ranks of this run on each host; 0 if hosts have unequal numbers. Collective."""
    local = launched_local_world_size()
    largest, negative_smallest = combine_on_host(torch.tensor([local, -local]), torch.maximum).tolist()
    return local if largest == -negative_smallest else 0


def use_deterministic_kernels() -> None:
    """Make torch use only bitwise deterministic kernels. To be called before the process uses a GPU.

    cuBLAS needs a fixed workspace for that, and reads its size when it starts; without one torch refuses products.
    `varlen_attn` of torch 2.15 prefers cuDNN, whose backward sums in any order, and does not request its deterministic
    algorithm.
    """
    set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def nccl_version() -> str:
    """Version of torch's NCCL; empty without a GPU."""
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
