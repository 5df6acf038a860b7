"""Device time by events of a made-up device, whose clock the work moves."""

import pytest
from torch import nn

from glm46.compute.distributed.device_time import OwnDeviceTime, waiting_for_ranks


class Device:
    """A stream that does its work at once, unless it lags behind its host."""

    def __init__(self):
        self.milliseconds, self.events, self.is_done = 0.0, 0, True

    def event(self) -> "Event":
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device, self.at = device, None

    def record(self) -> None:
        self.at = self.device.milliseconds

    def query(self) -> bool:
        return self.device.is_done

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.device.is_done, "a host that asks would wait"
        return end_event.at - self.at


class Layer(nn.Module):
    """Works, waits for others, works."""

    def __init__(self, device: Device, work: float, wait: float):
        super().__init__()
        self.device, self.work, self.wait = device, work, wait

    def forward(self, x: float) -> float:
        self.device.milliseconds += self.work
        with waiting_for_ranks():
            self.device.milliseconds += self.wait
        if x < 0:
            raise ValueError("not this one")
        self.device.milliseconds += self.work
        return x


def test_own_time_is_the_first_forward_of_each_layer_without_waits():
    device = Device()
    layers = [Layer(device, 10.0, 500.0), Layer(device, 20.0, 0.0)]
    own = OwnDeviceTime(layers, device.event)
    layers[0](0.0)  # a validation before the first step
    assert own.seconds() == 0.0 and device.events == 0
    for factor in (1.0, 2.0, 3.0):
        own.step_begins()
        for micro_batch in range(3):
            for layer in layers:
                device.milliseconds += 1000.0  # between layers the stream waits for FSDP2's gather
                layer.work *= factor if micro_batch == 0 else 1.0
                layer(0.0)
    # The step before the last one: 2 * (10 + 20) ms, times 1, times 2.
    assert own.seconds() == pytest.approx(0.12)
    assert device.events == 3 * 2 * 4  # begin and end of a layer and of its wait; other micro-batches cost nothing


def test_the_host_never_waits_for_the_device():
    device = Device()
    layer = Layer(device, 10.0, 0.0)
    own = OwnDeviceTime([layer], device.event)
    for _ in range(2):
        own.step_begins()
        layer(0.0)
    assert own.seconds() == pytest.approx(0.02)
    layer.work = 50.0
    for _ in range(2):
        own.step_begins()
        layer(0.0)
    device.is_done = False
    assert own.seconds() == pytest.approx(0.02)  # what was known before
    device.is_done = True
    assert own.seconds() == pytest.approx(0.1)


def test_a_layer_that_fails_ends_its_measurement():
    device = Device()
    layer = Layer(device, 10.0, 0.0)
    own = OwnDeviceTime([layer], device.event)
    own.step_begins()
    with pytest.raises(ValueError):
        layer(-1.0)
    events = device.events
    with waiting_for_ranks():
        pass
    assert device.events == events
