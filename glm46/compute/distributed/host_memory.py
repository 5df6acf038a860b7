"""Memory of the host, pinned beside a GPU without a byte more than is asked for."""

import mmap
import weakref
from math import prod

import numpy as np
import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


def host_bytes(size: int, *, pin: bool) -> np.ndarray:
    """Uninitialised memory, uint8 [size]. Torch's pinned allocator rounds each allocation up to a power of two.

    Args:
        pin: copies to and from a GPU run at the speed of the bus.

    Raises:
        MemoryError: CUDA cannot pin so much.
    """
    # CUDA pins whole pages: no two allocations may share one.
    whole = np.empty(size + 2 * mmap.PAGESIZE, dtype=np.uint8)
    start = -whole.ctypes.data % mmap.PAGESIZE
    if pin and size:
        runtime, address = torch.cuda.cudart(), whole.ctypes.data + start
        error = int(runtime.cudaHostRegister(address, size, _PORTABLE))
        if error:
            raise MemoryError(f"CUDA cannot pin {size} bytes of host memory (error {error}); see ulimit -l")
        # Memory that is freed while registered would stay pinned, and its address could not be registered again.
        weakref.finalize(whole, runtime.cudaHostUnregister, address)
    return whole[start : start + size]


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool) -> Tensor:
    """An uninitialised tensor in `host_bytes`."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(host_bytes(prod(shape) * dtype.itemsize, pin=pin), dtype=dtype).view(shape)
