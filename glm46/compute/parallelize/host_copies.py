"""Host memory for tensors that checkpointed layers keep. They leave the device while the next layer computes forward,
and come back before backward needs them.

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
        """Layers that still have tensors on the device, in the order of their forwards: the current one and the one
        before it, whose copies run while the current one computes."""
        self._latest: weakref.ref[LayerCopies] | None = None
        """The layer whose forward began last. Weak, so that a layer ends with its graph."""

    def begin(self, is_first: bool) -> "LayerCopies":
        """Begin the forward of a layer: the first layer of a micro-batch, or the next one."""
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
        """``before``: the layer before it in its micro-batch, whose backward comes next; None for the first."""
        self._owner = owner
        self._before = before
        self._is_fetched = False
        self._copies: weakref.WeakSet[Copied] = weakref.WeakSet()
        self._done: torch.cuda.Event | None = None
        """Event after the last copy, in either direction."""

    def copy(self, x: Tensor) -> "Copied":
        """Start to copy a tensor, which must not be changed."""
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
            copied.on_device = None

    def fetch(self) -> None:
        """Wait until all tensors are on the device, and start to copy back the tensors of the layer whose backward is
        next."""
        if self._is_fetched:
            return
        self._is_fetched = True
        if any(copied.on_device is None for copied in self._copies):
            self._owner.release()  # what forwards of later micro-batches still have on the device
        self._load()
        self._wait()
        before = None if self._before is None else self._before()
        if before is not None:
            before._load()

    def _load(self) -> None:
        for copied in self._copies:
            if copied.on_device is None and copied.host is not None:
                copied.on_device = torch.empty_like(copied.host, device=copied.device, pin_memory=False)
                self._start(copied.on_device, copied.host, copied.device)

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
        self._layer = layer
        self._has_gradient = x.requires_grad
        self.device = x.device
        self.on_device: Tensor | None = x.detach()
        self.host: Tensor | None = host

    def take(self) -> Tensor:
        """Return the tensor on the device, outside of any graph. Only once: the copies are released."""
        self._layer.fetch()
        self._layer._copies.discard(self)
        tensor = self.on_device
        self.on_device = None
        self.host = None
        assert tensor is not None, "taken before"
        return tensor.requires_grad_(self._has_gradient)
