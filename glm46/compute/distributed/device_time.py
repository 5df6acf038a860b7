"""Device time of this rank's own work, measured by events on its stream and read a step later, without a wait.

A host runs ahead of its GPU and waits for it once per step. Collectives keep all GPUs in step, so every host waits
until the same moment, and its clock does not tell a slow GPU from a fast one. On the device a rank computes its
layers, and waits for other ranks between and inside them. The forward of each layer in the first micro-batch of a step
is measured, without these waits: FSDP2 gathers a layer before the hooks of this module run, and collectives inside
layers are wrapped in `waiting_for_ranks`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class OwnDeviceTime:
    """Measures the forward of layers on this rank's device.

    Args:
        layers: layers of this rank; hooks stay on them.
        make_event: constructor of events with timing; tests pass their own.
    """

    def __init__(self, layers: Iterable[nn.Module], make_event: Callable[[], torch.cuda.Event]):
        self._layers = list(layers)
        self._make_event = make_event
        self._unmeasured: set[nn.Module] = set()
        self._forwards: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._previous = self._forwards, self._waits
        self._seconds = 0.0
        self._began: torch.cuda.Event | None = None
        self._wait: AbstractContextManager | None = None
        for layer in self._layers:
            layer.register_forward_pre_hook(self._enter)  # after the hook of FSDP2, which gathers the layer
            # Before FSDP2 frees the layer; also after an error, or later collectives would be measured.
            layer.register_forward_hook(self._leave, prepend=True, always_call=True)
            for module in layer.modules():
                if module is not layer and isinstance(module, FSDPModule):  # experts, gathered inside the layer
                    module.register_forward_pre_hook(self._wait_begins, prepend=True)
                    module.register_forward_pre_hook(self._wait_ends)

    def step_begins(self) -> None:
        """Measure the next call of each layer; from now on `seconds` reads the step that has ended."""
        self._previous = (self._forwards, self._waits)
        self._forwards = []
        self._waits = []
        self._unmeasured = set(self._layers)

    def seconds(self) -> float:
        """Return the time of the previous step, or of an earlier one if the device has not finished it; 0 at first."""
        forwards, waits = self._previous
        if forwards and all(end.query() for _, end in (*forwards, *waits)):
            forward_milliseconds = sum(begin.elapsed_time(end) for begin, end in forwards)
            wait_milliseconds = sum(begin.elapsed_time(end) for begin, end in waits)
            self._seconds = (forward_milliseconds - wait_milliseconds) / 1e3
        return self._seconds

    def _mark(self) -> torch.cuda.Event:
        event = self._make_event()
        event.record()
        return event

    @torch.compiler.disable
    def _enter(self, layer: nn.Module, *_call: object) -> None:
        global _measuring
        if layer in self._unmeasured:
            self._unmeasured.remove(layer)
            self._began = self._mark()
            _measuring = self

    @torch.compiler.disable
    def _leave(self, *_call: object) -> None:
        global _measuring
        if self._began is not None:
            self._forwards.append((self._began, self._mark()))
            self._began = None
            _measuring = None

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
        """Exclude the device time of the work inside this context from the measured time."""
        begin = self._mark()
        yield
        self._waits.append((begin, self._mark()))


_measuring: OwnDeviceTime | None = None
"""Object that is currently measuring a layer."""


def waiting_for_ranks() -> AbstractContextManager:
    """Context around a collective that the stream waits for, to exclude the wait from the rank's own time. Free if
    nothing is measured."""
    return nullcontext() if _measuring is None else _measuring.leave_out()
