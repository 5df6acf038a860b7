"""Host memory, pinned if there is a GPU, without the allocator's rounding."""

import mmap
import weakref
from math import prod

import numpy as np
import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


def host_bytes(size: int, *, pin: bool) -> np.ndarray:
    """Allocate uninitialised memory, uint8 [size]. Torch's pinned allocator would round its size up to a power of two.

    Args:
        pin: pin the memory, so that copies to and from a GPU run at the speed of the bus.

    Raises:
        MemoryError: CUDA cannot pin this much memory.
    """
    # CUDA pins whole pages: no two allocations may share one.
    allocation = np.empty(size + 2 * mmap.PAGESIZE, dtype=np.uint8)
    start = -allocation.ctypes.data % mmap.PAGESIZE
    if pin and size:
        runtime = torch.cuda.cudart()
        address = allocation.ctypes.data + start
        error = int(runtime.cudaHostRegister(address, size, _PORTABLE))
        if error:
            raise MemoryError(f"CUDA cannot pin {size} bytes of host memory (error {error}); see ulimit -l")
        # Memory that is freed while registered would stay pinned, and its address could not be registered again.
        weakref.finalize(allocation, runtime.cudaHostUnregister, address)
    return allocation[start : start + size]


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool) -> Tensor:
    """Create an uninitialised tensor in `host_bytes`."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(host_bytes(prod(shape) * dtype.itemsize, pin=pin), dtype=dtype).view(shape)
