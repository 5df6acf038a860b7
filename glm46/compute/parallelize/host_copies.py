"""Host memory for what checkpointed layers keep: it leaves the device behind the computation, and comes back ahead.

On a GPU copies have a stream of their own. Kernels wait for them, the host does not. A tensor of the device is freed
once the stream that computes has passed its copy, so that the allocator gives its memory to later kernels alone. On a
CPU the same code copies from memory to memory.
"""

import functools
import weakref
from collections import deque

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class HostCopies:
    """The layers of a model, or of a part of it, whose forwards copy to host memory."""

    def __init__(self) -> None:
        self._leaving: deque[LayerCopies] = deque()
        """Those with tensors on the device still, in the order of their forwards: the present one and the one before,
        whose copies run while the present one computes."""
        self._latest: weakref.ref[LayerCopies] | None = None

    def begin(self, is_first: bool) -> "LayerCopies":
        """A forward of a layer begins, the first of a micro-batch or the next one."""
        while len(self._leaving) > 1:
            self._leaving.popleft().release()
        layer = LayerCopies(self, None if is_first else self._latest)
        self._leaving.append(layer)
        self._latest = weakref.ref(layer)
        return layer

    def release(self) -> None:
        """Free the device of all copied tensors."""
        while self._leaving:
            self._leaving.popleft().release()


class LayerCopies:
    """The tensors that one forward of a layer keeps."""

    def __init__(self, owner: HostCopies, before: "weakref.ref[LayerCopies] | None"):
        self._owner, self._before, self._is_fetched = owner, before, False
        self._copies: weakref.WeakSet[Copied] = weakref.WeakSet()
        self._done: torch.cuda.Event | None = None
        """The last copy in either direction."""

    def copy(self, x: Tensor) -> "Copied":
        """Start to copy a tensor, which no one may change."""
        pinned = _stream(x.device) is not None
        host = torch.empty_like(x, device="cpu", pin_memory=pinned, requires_grad=False)
        self._start(host, x, x.device)
        copied = Copied(self, x, host)
        self._copies.add(copied)
        return copied

    def release(self) -> None:
        """Free the device of the tensors, once they are copied."""
        self._wait()
        for copied in self._copies:
            copied.here = None

    def fetch(self) -> None:
        """Have all tensors on the device, and start to copy back those of the layer whose backward is next."""
        if self._is_fetched:
            return
        self._is_fetched = True
        if any(copied.here is None for copied in self._copies):
            self._owner.release()  # of later micro-batches
        self._load()
        self._wait()
        before = None if self._before is None else self._before()
        if before is not None:
            before._load()

    def _load(self) -> None:
        for copied in self._copies:
            if copied.here is None and copied.host is not None:
                copied.here = torch.empty_like(copied.host, device=copied.device, pin_memory=False)
                self._start(copied.here, copied.host, copied.device)

    def _wait(self) -> None:
        """Let later kernels wait for the copies."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    @torch.no_grad()
    def _start(self, target: Tensor, source: Tensor, device: torch.device) -> None:
        stream = _stream(device)
        if stream is None:
            target.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._done = stream.record_event()


class Copied:
    """A tensor with a copy in host memory."""

    def __init__(self, layer: LayerCopies, x: Tensor, host: Tensor):
        self._layer, self._has_gradient, self.device = layer, x.requires_grad, x.device
        self.here: Tensor | None = x.detach()
        self.host: Tensor | None = host

    def take(self) -> Tensor:
        """The tensor on the device, outside of any graph. Once: the copies are let go."""
        self._layer.fetch()
        self._layer._copies.discard(self)
        (here, self.here), self.host = (self.here, None), None
        assert here is not None, "taken before"
        return here.requires_grad_(self._has_gradient)
