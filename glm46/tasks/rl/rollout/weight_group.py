"""Broadcasts weights from rank 0 to the workers of inference servers, in buckets, over one process group per server and
update: gloo, or NCCL between GPUs. The receiver for vLLM is ``deploy/vllm/glm_weights.py``; SGLang has its own, for
which `SglangGroup` is the sender.

Group and store are created for each update and closed after it, on both sides, so that updates share no state. Each
side waits only while the other takes part: rank 0 watches the server's reply and the keys that workers set in the
store, the workers watch whether the store still exists.
"""

import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compat import PrefixStore, Store, TCPStore
from glm46.compute.distributed.environment import temporary_variable
from glm46.files.threads import in_thread
from glm46.tasks.rl.rollout.http_calls import CallError

BUCKET_BYTES = 256 << 20
"""Maximum bytes of tensors that are sent together; a larger tensor is a bucket of its own."""
_LONGEST_WAIT = 60.0
"""Seconds for a server to join, and to receive one bucket: less than the timeout of the job's own process group, in
which other ranks wait meanwhile. A server waits `_OF_SERVER` times longer, until the other servers have joined."""
_OF_SERVER = 4
_FOR_A_REASON = 5.0
"""Seconds to wait for the other of two signs of a failure: the server's reply and the state of its workers."""
_ALIGNED = 16
TICK_SECONDS = 0.002
DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_Group: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"  # the second is not in all builds


class WeightGroup:
    """Process group of rank 0 and the workers of one server, for one update. All waits are bounded."""

    def __init__(self, url: str, workers: int, backend: str, seconds: float):
        """
        Args:
            url: URL of the server. The group meets at the address from which this machine reaches it.
            workers: number of workers of the server.
            seconds: time for the whole update of the server.

        Raises:
            CallError: the server does not answer, or the store does not start in time.
        """
        self.url = url
        parts = urlsplit(url)
        self._wait = min(seconds, _LONGEST_WAIT)
        self.backend = backend
        self._workers = workers
        try:
            with socket.create_connection((parts.hostname, parts.port or 80), timeout=self._wait) as reached:
                address = reached.getsockname()[0]
                family = reached.family
            listener = socket.create_server((address, 0), family=family)
            # a later update may get the same port, so that `update` tells their keys apart
            port = listener.getsockname()[1]
            update = secrets.token_hex(8)
            timeout = timedelta(seconds=self._wait)
            descriptor = listener.detach()
            store = TCPStore(
                address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
            )
        except (OSError, dist.DistNetworkError) as error:  # DistNetworkError: this machine is too busy to answer itself
            raise CallError(f"no connection for weights ({error})") from None
        self._at = {"address": address, "port": port, "update": update}
        self._store: Store | None = PrefixStore(update, store)
        self._store.set("open", "")
        self._group: list[_Group] = []
        self._reply: Future[Any] = Future()
        self.fault: str | None = None
        """Why the group failed and receives nothing more; None if it works."""

    def join(self, version: int, load: Callable[[str], Future[Any]]) -> None:
        """Invite the workers and form the group.

        Args:
            load: begins to send an invitation to the server. The reply comes when all workers have loaded.

        Raises:
            CallError: `load` failed, or the workers did not join.
        """
        settings = {**self._at, "size": 1 + self._workers, "seconds": _OF_SERVER * self._wait, "backend": self.backend}
        invitation = json.dumps(settings | {"version": version})
        self._reply = load(invitation)
        try:
            self._await_workers()
            if self.fault is not None:
                self.result(0.0)  # raises
        except BaseException:
            self.close()
            raise

    def _await_workers(self) -> None:
        end = time.monotonic() + self._wait
        names = [f"worker {number}" for number in range(self._workers)]
        while not self._has(*names):
            if self._reply.done():
                raise CallError(f"loaded without the trainer: {self._reply.result()}")
            if time.monotonic() > end:
                self._fail(f"its workers did not join within {self._wait:g} s")
                return
            time.sleep(TICK_SECONDS)
        try:
            self._form(f"{self._at['update']}/group")
        except RuntimeError as error:
            self._fail(first_sentence(error))
        else:
            first = torch.zeros(1, dtype=torch.uint8, device=DEVICES[self.backend])
            began = time.monotonic()
            self.end(self._begin_first(first), began)

    def _form(self, prefix: str) -> None:
        """Create the process group, whose keys in the store begin with `prefix`."""
        wait = timedelta(seconds=self._wait)
        # A separate client: a group that is still closing must not keep the store of the workers open.
        store = TCPStore(self._at["address"], self._at["port"], is_master=False, timeout=wait)
        group = _join(PrefixStore(prefix, store), 1 + self._workers, self.backend, wait)
        if self._store is not None:  # closed meanwhile
            self._group = [group]

    def _begin_first(self, values: Tensor) -> dist.Work | None:
        """Start the first broadcast in a thread: NCCL creates its communicator and blocks until all workers join."""
        try:
            return in_thread(lambda: self.begin(values)).result(self._wait)
        except FutureTimeoutError:
            self._fail(
                f"the first {self.backend} broadcast to its {self._workers} workers, at {self._at['address']} port "
                f"{self._at['port']}, did not begin within {self._wait:g} s: see NCCL_SOCKET_IFNAME and the network "
                'between the two, or set rollout.weights = "disk"'
            )
            return None

    def announce(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Announce a bucket to the server. Nothing to do here: the bucket describes its own content."""

    def confirm(self) -> None:
        """Wait until the server has loaded a bucket. Nothing to do here: the server replies after the last one."""

    def bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the values to broadcast for a bucket of tensors, or for the end if there are none."""
        if not tensors:
            return [torch.zeros(2, dtype=torch.int64, device=DEVICES[self.backend])]
        text, block = _block(tensors, DEVICES[self.backend])
        return [torch.tensor([text, len(block)], device=block.device), block]

    def begin(self, values: Tensor) -> dist.Work | None:
        """Start a broadcast without waiting; return None after a failure."""
        try:
            return None if self.fault else self._group[0].broadcast(values, 0)  # type: ignore[union-attr]  # stubs lack it
        except RuntimeError as error:
            self._fail(first_sentence(error))
            return None

    def end(self, work: dist.Work | None, began: float) -> None:
        """Wait for a broadcast while its workers take part; ``began`` is its start by `time.monotonic`."""
        end = began + self._wait
        while work is not None and not work.is_completed():
            now = time.monotonic()
            if self._reply.done():
                end = min(end, now + _FOR_A_REASON)
            if self._has("left") or now > end:
                in_time = now < began + self._wait
                self._fail("a worker has left" if in_time else f"a bucket was not taken within {self._wait:g} s")
                return
            time.sleep(TICK_SECONDS)
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self._fail(first_sentence(error))

    def _has(self, *keys: str) -> bool:
        """Return True if the store is open and workers have set all these keys. Callers hold no reference to the store:
        a kept traceback would keep it open."""
        return self._store is not None and self._store.check(list(keys))

    def _fail(self, reason: str) -> None:
        self.fault = self.fault or f"the broadcast of the weights failed ({reason})"
        self.close()

    def result(self, seconds: float) -> Any:
        """Return the server's reply after the last bucket.

        Raises:
            CallError: the update failed, or no reply came in time.
        """
        end = time.monotonic() + seconds
        try:
            reply = self._reply.result(seconds if self.fault is None else _FOR_A_REASON)
            self._await_loaded(end)
        except FutureTimeoutError:  # not the builtin one before Python 3.11
            raise CallError(self.fault or f"it did not load the weights within {seconds:g} s") from None
        except CallError as error:
            raise CallError(f"{self.fault}; {error}" if self.fault else str(error)) from None
        finally:
            self.close()
        if self.fault is not None:
            raise CallError(self.fault)
        return reply

    def _await_loaded(self, end: float) -> None:
        """Wait until all workers report that they have loaded: vLLM's reply covers only its first replica."""
        while self._store is not None and not self._has(*(f"done {n}" for n in range(self._workers))):
            if self._has("left"):
                raise CallError("a worker has not loaded the weights; the server's log says why")
            if time.monotonic() > end:
                raise FutureTimeoutError
            time.sleep(TICK_SECONDS)

    def close(self) -> None:
        """End the update, also for the workers, who see that the store is gone. Does nothing if already closed."""
        self._store = None
        if self._group:
            # In a thread: NCCL's abort may wait for a communicator under construction. Gloo ends by its timeout. The
            # thread has the last reference, because the end of a group of gloo waits for its open broadcasts.
            last_reference = self._group
            self._group = []
            # The last call logs an error of the first one.
            in_thread(lambda: last_reference.pop().abort()).add_done_callback(Future.result)


def first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of an error of gloo, without its source location."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]


def _join(store: Store, size: int, backend: str, wait: timedelta) -> _Group:
    """Create a process group of this process, as rank 0, and the workers of a server, which are no ranks of the job."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, 0, size, wait)
    # Otherwise NCCL's watchdog ends this process when a server is lost, instead of only the wait for the broadcast.
    with temporary_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, 0, size, wait)  # type: ignore[arg-type]  # stubs lack this overload


class WeightSender:
    """Sends tensors to several groups at once. A group that fails receives no more; the others continue."""

    def __init__(self, groups: Sequence[WeightGroup]):
        """``groups`` must have the same class and backend."""
        self._groups = groups
        self._tensors = list[tuple[str, Tensor]]()
        self._nbytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the current bucket; a full bucket is sent first."""
        if self._tensors and self._nbytes + tensor.nbytes > BUCKET_BYTES:
            self._flush()
        self._tensors.append((name, tensor))
        self._nbytes += tensor.nbytes

    def end(self) -> None:
        """Send the last bucket, and an empty one that marks the end."""
        if self._tensors:
            self._flush()
        self._flush()

    def _flush(self) -> None:
        if not all(group.fault for group in self._groups):
            for group in self._groups:
                group.announce(self._tensors)
            for values in self._groups[0].bucket(self._tensors):
                began = time.monotonic()
                works = [group.begin(values) for group in self._groups]
                for group, work in zip(self._groups, works, strict=True):
                    group.end(work, began)
            for group in self._groups:
                group.confirm()
        self._tensors = []
        self._nbytes = 0


def _block(tensors: Sequence[tuple[str, Tensor]], device: str) -> tuple[int, Tensor]:
    """Return the length of a bucket's text and the bucket: text with name, dtype, shape, start and end of each tensor,
    then the tensors, then a checksum."""
    rows = list[tuple[str, str, list[int], int, int]]()
    at = 0
    for name, tensor in tensors:
        rows.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at, at + tensor.nbytes))
        at += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % _ALIGNED)
    block = torch.zeros(len(text) + at + 8, dtype=torch.uint8, device=device)
    block[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for (_, tensor), (*_, start, end) in zip(tensors, rows, strict=True):
        block[len(text) + start : len(text) + end].view(tensor.dtype).copy_(tensor.reshape(-1))
    words = block[:-8].view(torch.int64)  # weighted by odd numbers, so that swapped words change the sum
    total = (words * torch.arange(1, 2 * len(words), 2, device=device)).sum(0, keepdim=True)
    block[-8:] = total.view(torch.uint8)
    return len(text), block
