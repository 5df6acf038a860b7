"""The server's side of `[rollout] weights = "broadcast"`: tensors that rank 0 of the trainer broadcasts in buckets.

It needs torch alone, so that the tests of glm46 receive with the code that a server runs. The sender is
``glm46/tasks/rl/rollout/weight_group.py``.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

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


_Found = TypeVar("_Found")


def _within(seconds: float, awaited: str, ask: Callable[[], _Found]) -> _Found:
    """What a call gives, in a thread that is left behind after some seconds: a process that is stopped or stuck answers
    nothing, and TCPStore and the first broadcast of NCCL wait for it without a bound, whatever their timeouts.

    Raises:
        RuntimeError: no answer came.
    """
    found: futures.Future[_Found] = futures.Future()

    def run() -> None:
        try:
            found.set_result(ask())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return found.result(seconds)
    except futures.TimeoutError:
        raise RuntimeError(f"the trainer does not answer within {seconds:g} s: {awaited}") from None


def _end_group(held: list[dist.Backend], how: str) -> None:
    getattr(held.pop(), how)()


class Receiver:
    """One worker in the process group of one update, as a context; iterate over the names and tensors of the policy.

    The trainer keeps the store open as long as it takes part. When it has closed it, for whatever reason, each wait
    here ends with an error after `_LOOK_SECONDS`, so that the server is free for the next update; when it is stopped or
    stuck, after the seconds for each wait. A worker says in the store whether it has loaded, so that the trainer waits
    for it no longer, and for no other one's word. A tensor is a part of its bucket, which is not used again.
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
        self._size, self._kind = said["size"], said["backend"]
        self._device = device if self._kind == "nccl" else torch.device("cpu")
        place = (said["address"], said["port"])
        socket.create_connection(place, _QUICK.total_seconds()).close()  # where none listens, TCPStore tries on

        def find() -> tuple[dist.Store, bool]:
            store = dist.PrefixStore(said["update"], dist.TCPStore(*place, is_master=False, timeout=_QUICK))
            return store, store.check(["open"])

        self._at = f"at {place[0]} port {place[1]}"
        self._store, is_open = _within(_QUICK.total_seconds(), f"its store {self._at}", find)
        if not is_open:
            raise RuntimeError(f"version {self.version}: the trainer has ended this update")
        self._group: list[dist.Backend] = []

    def __enter__(self) -> "Receiver":
        store, wait = self._store, timedelta(seconds=self._seconds)

        def join() -> dist.Backend:
            store.set_timeout(wait)
            store.set(f"worker {self._worker}", "")
            return self._form(dist.PrefixStore("group", store), wait)

        try:
            waiting = f"the {self._kind} group of {self._size} processes {self._at}"
            self._group = [_within(self._seconds + _QUICK.total_seconds(), waiting, join)]
            self._watch = threading.Thread(target=self._await_end, daemon=True)
            self._watch.start()
            first = torch.zeros(1, dtype=torch.uint8, device=self._device)
            waiting = (
                f"its first broadcast in {waiting}; see NCCL_SOCKET_IFNAME and the network between the two, or set "
                'rollout.weights = "disk" in the run'
            )
            self._await(_within(self._seconds, waiting, partial(self._group[0].broadcast, first, 0)))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _await_end(self) -> None:
        """Return when the trainer has ended the update, or this worker has."""
        with suppress(RuntimeError):
            while (store := self._store) is not None:
                store.wait(["open"], _QUICK)
                time.sleep(_LOOK_SECONDS)

    def _form(self, store: dist.Store, wait: timedelta) -> dist.Backend:
        kind = dist.ProcessGroupNCCL if self._kind == "nccl" else dist.ProcessGroupGloo
        return kind(store, 1 + self._worker, self._size, wait)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        said = "left" if error is not None else f"done {self._worker}"
        with suppress(RuntimeError):  # the trainer may have gone
            _within(_QUICK.total_seconds(), f"its store {self._at}", partial(self._store.set, said, ""))
        if self._group:
            # NCCL's abort may wait for a communicator that is still made. Gloo has none: the last reference waits for
            # the end of a broadcast, by its timeout.
            how = "shutdown" if error is None else "abort"
            threading.Thread(target=_end_group, args=(self._group, how), daemon=True).start()
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
        self._await(self._group[0].broadcast(values, 0))
        return values

    def _await(self, work: dist.Work) -> None:
        end = time.monotonic() + self._seconds
        while not work.is_completed():
            time.sleep(_TICK_SECONDS)
            if time.monotonic() > end:
                raise RuntimeError(f"version {self.version}: no weights came within {self._seconds:g} s")
            if not self._watch.is_alive():
                raise RuntimeError(f"version {self.version}: the trainer has ended this update")
        try:
            work.wait()
        except RuntimeError as error:  # of the library, which may be as quick
            raise RuntimeError(f"version {self.version}: no weights came: {error}") from error
