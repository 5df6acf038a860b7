"""The server's side of `[rollout] weights = "broadcast"`: tensors that rank 0 of the trainer broadcasts in buckets.

It needs torch alone, so that the tests of glm46 receive with the code that a server runs. The sender is
``glm46/rollout/weight_group.py``.
"""

import json
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist


def checksum(block: torch.Tensor) -> torch.Tensor:
    """int64 [1] of a block of bytes, a multiple of 8: its words times odd numbers, so that a change of one word, or two
    words in each other's place, change it. Equal on all devices."""
    words = block.view(torch.int64)
    return (words * torch.arange(1, 2 * len(words), 2, device=block.device)).sum(0, keepdim=True)


class Receiver:
    """One worker in the process group of one update; iterate over the names and tensors of the policy.

    Each wait has a deadline. A tensor is a part of its bucket, which is not used again.
    """

    def __init__(self, invitation: str, worker: int, device: torch.device):
        """Join the group.

        Args:
            invitation: JSON of the trainer: address and port of its store, its processes, seconds for each wait,
                backend of the group, and the version of the weights.
            worker: number of this worker of the server, from 0.
            device: that the tensors of NCCL are on.
        """
        said = json.loads(invitation)
        self.version, self._wait = said["version"], timedelta(seconds=said["seconds"])
        is_nccl = said["backend"] == "nccl"
        self._device = device if is_nccl else torch.device("cpu")
        self._store = dist.TCPStore(said["address"], said["port"], is_master=False, timeout=self._wait)
        self._store.set(f"worker {worker}", "")
        kind = dist.ProcessGroupNCCL if is_nccl else dist.ProcessGroupGloo
        self._group = kind(dist.PrefixStore("group", self._store), 1 + worker, said["size"], self._wait)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            text, size = self._next(2, torch.int64).tolist()
            if not size:
                self._group.shutdown()
                return
            block = self._next(size, torch.uint8)
            if not torch.equal(checksum(block[:-8]), block[-8:].view(torch.int64)):
                raise ValueError(f"version {self.version}: a bucket has another checksum than the trainer sent")
            for name, dtype, shape, start, end in json.loads(bytes(block[:text].tolist())):
                yield name, block[text + start : text + end].view(getattr(torch, dtype)).view(shape)

    def _next(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(size, dtype=dtype, device=self._device)
        self._group.broadcast(values, 0).wait(self._wait)
        return values
