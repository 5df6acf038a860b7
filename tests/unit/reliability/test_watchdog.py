"""The time limit of the watchdog."""

import time

import torch

from glm46.distributed.process import Process
from glm46.reliability.watchdog import Watchdog


def test_a_step_of_another_size_gets_the_limit_of_the_start(tmp_path):
    """It may compile again, which takes longer than five steps of the old size."""
    # 0 starts no thread; the limits are computed all the same.
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=0.0, start_seconds=300.0)

    def run_steps(seq_len: int) -> None:
        for step in range(30):
            watchdog.step_begins(step)
            watchdog.operation("training step", size=(8, seq_len))

    run_steps(128)
    assert watchdog.limit_seconds() < 1.0
    watchdog.operation("training step", size=(8, 256))
    assert watchdog.limit_seconds() == 300.0
    run_steps(256)
    assert watchdog.limit_seconds() < 1.0


def test_an_outage_does_not_raise_the_limit_above_that_of_the_start(tmp_path, monkeypatch):
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=0.0, start_seconds=300.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(60):
        watchdog.step_begins(step)
        now += 131.0 if step == 40 else 1.0
    assert watchdog.limit_seconds() == 300.0
