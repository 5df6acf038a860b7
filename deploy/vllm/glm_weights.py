"""The server's side of `[rollout] weights = "broadcast"`: tensors that rank 0 of the trainer broadcasts in buckets.

It needs torch alone, so that the tests of glm46 receive with the code that a server runs. The sender is
``glm46/rollout/weight_group.py``.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

_QUICK = timedelta(seconds=10)
"""For calls of the store that the trainer answers at once, or not at all."""
_LOOK_SECONDS, _TICK_SECONDS = 0.2, 0.002
"""How often a wait asks whether the trainer still takes part, and whether the values have come."""


def checksum(block: torch.Tensor) -> torch.Tensor:
    """int64 [1] of a block of bytes, a multiple of 8: its words times odd numbers, so that a change of one word, or two
    words in each other's place, change it. Equal on all devices."""
    words = block.view(torch.int64)
    return (words * torch.arange(1, 2 * len(words), 2, device=block.device)).sum(0, keepdim=True)


class Receiver:
    """One worker in the process group of one update, as a context; iterate over the names and tensors of the policy.

    The trainer keeps the store open as long as it takes part. When it has closed it, for whatever reason, each wait
    here ends with an error after `_LOOK_SECONDS`, so that the server is free for the next update. A worker that fails
    says so in the store and leaves the group, so that the trainer does not wait for it. A tensor is a part of its
    bucket, which is not used again.
    """

    def __init__(self, invitation: str, worker: int, device: torch.device):
        """Find the store.

        Args:
            invitation: JSON of the trainer: address and port of its store, name of this update in it, processes,
                seconds for each wait, backend of the group, and the version of the weights.
            worker: number of this worker of the server, from 0.
            device: that the tensors of NCCL are on.

        Raises:
            OSError, RuntimeError: the update has ended, as a request finds that waited in the server for longer than
                the trainer. The port may be that of another update's store by now.
        """
        said = json.loads(invitation)
        self.version, self._seconds, self._worker = said["version"], said["seconds"], worker
        self._size, self._is_nccl = said["size"], said["backend"] == "nccl"
        self._device = device if self._is_nccl else torch.device("cpu")
        place = (said["address"], said["port"])
        socket.create_connection(place, _QUICK.total_seconds()).close()  # where none listens, TCPStore tries on
        store = dist.TCPStore(*place, is_master=False, timeout=_QUICK)
        self._store = dist.PrefixStore(said["update"], store)
        if not self._store.check(["open"]):
            raise RuntimeError(f"version {self.version}: the trainer has ended this update")
        self._group: list[dist.Backend] = []

    def __enter__(self) -> "Receiver":
        wait = timedelta(seconds=self._seconds)
        try:
            self._store.set_timeout(wait)
            self._store.set(f"worker {self._worker}", "")
            self._group = [self._form(dist.PrefixStore("group", self._store), wait)]
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _form(self, store: dist.Store, wait: timedelta) -> dist.Backend:
        kind = dist.ProcessGroupNCCL if self._is_nccl else dist.ProcessGroupGloo
        return kind(store, 1 + self._worker, self._size, wait)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(RuntimeError):  # the trainer may have gone
                self._store.set("left", "")
        if self._group:
            (self._group[0].shutdown if error is None else self._group[0].abort)()
            # Gloo has no abort: the last reference waits for the end of a broadcast, by its timeout.
            threading.Thread(target=self._group.clear, daemon=True).start()
        self._group, self._store = [], None  # whatever holds the traceback

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            text, size = self._next(2, torch.int64).tolist()
            if not size:
                return
            block = self._next(size, torch.uint8)
            if not torch.equal(checksum(block[:-8]), block[-8:].view(torch.int64)):
                raise ValueError(f"version {self.version}: a bucket has another checksum than the trainer sent")
            for name, dtype, shape, start, end in json.loads(bytes(block[:text].tolist())):
                yield name, block[text + start : text + end].view(getattr(torch, dtype)).view(shape)

    def _next(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(size, dtype=dtype, device=self._device)
        work, now = self._group[0].broadcast(values, 0), time.monotonic()
        end, look = now + self._seconds, now + _LOOK_SECONDS
        while not work.is_completed():
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now > end:
                raise RuntimeError(f"version {self.version}: no weights came within {self._seconds:g} s")
            if now > look:
                self._require_trainer()
                look = time.monotonic() + _LOOK_SECONDS
        work.wait()
        return values

    def _require_trainer(self) -> None:
        try:
            self._store.wait(["open"], _QUICK)
        except RuntimeError:
            raise RuntimeError(f"version {self.version}: the trainer has ended this update") from None
