"""The time limit of the watchdog."""

import faulthandler
import os
import re
import shutil
import subprocess
import threading
import time
from contextlib import suppress

import pytest
import torch

from glm46.compute.distributed.process import Process
from glm46.engine.reliability import hang_report
from glm46.engine.reliability import watchdog as watchdog_module
from glm46.engine.reliability.stop import EXIT_HANG
from glm46.engine.reliability.watchdog import Watchdog, _within
from tests.processes import HANG_SECONDS


def test_a_step_of_another_size_gets_the_limit_of_the_start(tmp_path):
    """It may compile again, which takes longer than five steps of the old size."""
    # 0 starts no thread; the limits are computed all the same.
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=0.0, start_seconds=300.0)

    def run_steps(seq_len: int) -> None:
        for step in range(30):
            watchdog.step_begins(step)
            watchdog.operation("training step", size=(8, seq_len))

    run_steps(128)
    assert watchdog.limit_seconds() < 100.0
    watchdog.operation("training step", size=(8, 256))
    assert watchdog.limit_seconds() == 300.0
    run_steps(256)
    assert watchdog.limit_seconds() < 100.0


@pytest.mark.parametrize(
    ("outages", "steps", "limit"),
    [
        ({10}, 23, 5.0),  # of the fewest steps that set the limit, in the longest one: it would be 300 s
        ({40}, 60, 5.0),
        ({30, 31, 50}, 65, 5.0),
        (set(range(30, 40)), 60, 300.0),  # so many are no outage: the steps are slow, up to the bound
    ],
)
def test_the_limit_does_not_learn_from_outages(outages, steps, limit, tmp_path, monkeypatch):
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=0.0, start_seconds=300.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(steps):
        watchdog.step_begins(step)
        now += 131.0 if step in outages else 1.0
    assert watchdog.limit_seconds() == pytest.approx(limit)  # sums of seconds on a clock that is large


def test_a_folder_that_is_deleted_while_a_run_stops_is_no_error(tmp_path, capfd):
    folder = tmp_path / "hang"
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), folder, shortest_seconds=10.0, start_seconds=300.0)
    shutil.rmtree(folder)
    watchdog.close()
    assert capfd.readouterr().err == ""


WAITS = "for _ in $(seq 600); do [ -e $1 ] && break; sleep 0.1; done; exec cat > /dev/null"


def test_stacks_that_the_disk_does_not_take_hold_the_interpreter_up_for_no_moment(tmp_path):
    """Otherwise a rank whose storage hangs could not end by its own clock. A full pipe is the disk; it answers after
    a minute at most, so that a failure of this test ends."""
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=10.0, start_seconds=300.0)
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    with suppress(BlockingIOError):
        while True:
            os.write(sender, b"x")
    os.set_blocking(sender, True)
    with subprocess.Popen(["sh", "-c", WAITS, "sh", str(tmp_path / "answers")], stdin=receiver):
        os.close(receiver)
        stacks, began = watchdog._stacks, time.monotonic()
        with os.fdopen(sender, "w") as watchdog._stacks:
            assert _within(0.1, watchdog._keep_stacks) is None
            assert time.monotonic() - began < 30
            (tmp_path / "answers").touch()
        watchdog._stacks = stacks
    watchdog._keep_stacks()
    assert "test_stacks_that_the_disk" in (tmp_path / "stacks-rank0.txt").read_text()
    watchdog.close()


def test_a_report_that_takes_too_long_is_said_before_the_rank_ends(tmp_path, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(watchdog_module, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set() if code == EXIT_HANG else None)
    watchdog = Watchdog(Process(0, 1, torch.device("cpu")), tmp_path, shortest_seconds=10.0, start_seconds=300.0)
    watchdog._end_for_sure()
    assert ended.wait(HANG_SECONDS)
    watchdog.close()
    assert re.fullmatch(r"error: rank 0 ends, \d+ s after the alarm\n", capfd.readouterr().err)


@pytest.mark.parametrize(
    "text", ['{"entries": [{}]}', '{"entries": [{"process_group": []}]}', '{"entries": 1}', "[]", "no JSON"]
)
def test_a_report_does_not_depend_on_the_format_of_the_flight_recorder(text, monkeypatch):
    monkeypatch.setattr(hang_report, "flight_recorders", lambda: {"gloo": text})
    assert hang_report.collectives_here() == ({"collectives": {}, "peers": []}, f'{{"gloo": {text}}}')
