"""A copy of a rank's tensors in host memory, which a save reads while training changes the originals."""

from collections.abc import Mapping

import torch
from torch import Tensor

from glm46.compute.distributed.host_memory import host_bytes
from glm46.compute.distributed.local_tensor import local_tensor

_ALIGNMENT_BYTES = 64


class Staging:
    """Host memory for one copy of this rank's tensors, reused by every save because allocating it is slow.

    It is one allocation, pinned when any tensor is on a GPU.
    """

    def __init__(self) -> None:
        self._layout: list[tuple[str, torch.Size, torch.dtype, bool]] = []
        self._copies: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's part of each tensor; the copies are complete on return.

        Args:
            tensors: name to Tensor or DTensor.

        Returns:
            Name to CPU tensor of the local shape. The next call overwrites them.
        """
        local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        layout = [(name, tensor.shape, tensor.dtype, tensor.is_cuda) for name, tensor in local.items()]
        if layout != self._layout:
            self._copies = {}  # free the old memory before the new is allocated
            self._copies = _allocate(local)
            self._layout = layout
        for name, tensor in local.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in local.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # sync: from here on the optimizer may change the originals
        return self._copies


def _allocate(local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    starts, end = {}, 0
    for name, tensor in local.items():
        starts[name] = end
        end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    slab = host_bytes(end, pin=any(tensor.is_cuda for tensor in local.values()))
    copies = {}
    for name, tensor in local.items():
        if tensor.nbytes == 0:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            continue
        # Each has a storage of its own: DCP would copy a view before it writes it.
        part = slab[starts[name] : starts[name] + tensor.nbytes]
        copies[name] = torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    return copies
