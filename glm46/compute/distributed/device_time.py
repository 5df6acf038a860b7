"""Device time of this rank's own work, measured by events on its stream and read a step later, without a wait.

A host runs ahead of its GPU and waits for it once per step, on all ranks equally long, so its clock does not tell a
slow GPU from a fast one. On the device a rank computes its layers, and waits for other ranks between and in them.
Measured is the forward of each layer in the first micro-batch of a step, without these waits: FSDP2 gathers a layer
before its hooks here, and the collectives inside of layers are `waiting_for_ranks`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class OwnDeviceTime:
    """Measures the forward of layers on this rank's device.

    Args:
        layers: of this rank; hooks stay on them.
        make_event: of events with timing; tests pass their own.
    """

    def __init__(self, layers: Iterable[nn.Module], make_event: Callable[[], torch.cuda.Event]):
        self._layers, self._make_event = list(layers), make_event
        self._left: set[nn.Module] = set()
        self._own: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._before = self._own, self._waits
        self._seconds = 0.0
        self._began: torch.cuda.Event | None = None
        self._wait: AbstractContextManager | None = None
        for layer in self._layers:
            layer.register_forward_pre_hook(self._enter)  # after that of FSDP2, which gathers the layer
            layer.register_forward_hook(self._leave, prepend=True, always_call=True)
            for module in layer.modules():
                if module is not layer and isinstance(module, FSDPModule):  # experts, gathered inside of the layer
                    module.register_forward_pre_hook(self._wait_begins, prepend=True)
                    module.register_forward_pre_hook(self._wait_ends)

    def step_begins(self) -> None:
        """Measure the next call of each layer."""
        self._before, self._own, self._waits = (self._own, self._waits), [], []
        self._left = set(self._layers)

    def seconds(self) -> float:
        """Time of the step before this one; that of an earlier one if the device is not done with it, 0 without any."""
        own, waits = self._before
        if own and all(end.query() for _, end in (*own, *waits)):
            whole, left_out = (sum(begin.elapsed_time(end) for begin, end in pairs) for pairs in (own, waits))
            self._seconds = (whole - left_out) / 1e3
        return self._seconds

    def _mark(self) -> torch.cuda.Event:
        event = self._make_event()
        event.record()
        return event

    @torch.compiler.disable
    def _enter(self, layer: nn.Module, *_call: object) -> None:
        global _measuring
        if layer in self._left:
            self._left.remove(layer)
            self._began, _measuring = self._mark(), self

    @torch.compiler.disable
    def _leave(self, *_call: object) -> None:
        global _measuring
        if self._began is not None:
            self._own.append((self._began, self._mark()))
            self._began, _measuring = None, None

    @torch.compiler.disable
    def _wait_begins(self, *_call: object) -> None:
        if _measuring is self:
            self._wait = self.leave_out()
            self._wait.__enter__()

    @torch.compiler.disable
    def _wait_ends(self, *_call: object) -> None:
        if self._wait is not None:
            self._wait.__exit__(None, None, None)
            self._wait = None

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leave the device time of the work inside out of the measured time."""
        begin = self._mark()
        yield
        self._waits.append((begin, self._mark()))


_measuring: OwnDeviceTime | None = None
"""What measures a layer at this moment."""


def waiting_for_ranks() -> AbstractContextManager:
    """Around a collective that the stream waits for: this time is not the rank's own. Costs nothing where no device is
    measured."""
    return nullcontext() if _measuring is None else _measuring.leave_out()
