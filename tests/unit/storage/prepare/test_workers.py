"""Worker processes return all results, or the error of the first call that failed, and none survives."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.operate.launch.process_end import started_ranks
from glm46.storage.prepare.workers import call_in_workers, end_worker, start_worker
from tests.processes import wait_until

_started = None


def start(value):
    global _started
    _started = value


def answer(number, kind):
    if kind == "fault":
        raise EOFError("damaged", number)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "slow":
        time.sleep(600)
    return _started + number


@pytest.mark.slow
def test_every_item_is_answered_once_by_any_number_of_workers():
    for workers, count in ((1, 3), (3, 5), (4, 2)):
        results = list(call_in_workers(workers, start, (100,), answer, [(i, "") for i in range(count)]))
        assert sorted(results) == [(i, 100 + i) for i in range(count)]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("kind", "error", "text"), [("fault", EOFError, "damaged"), ("killed", UserError, "SIGKILL")])
def test_a_fault_ends_all_workers_at_once(kind, error, text):
    with pytest.raises(error, match=text):
        list(call_in_workers(2, start, (0,), answer, [(0, "slow"), (1, kind)]))
    assert not multiprocessing.active_children()


def other_session(number):
    """A program in a session of its own, as a limited program is."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as program:
        time.sleep(600)
    return program


def test_a_worker_and_its_program_are_no_ranks():
    """The launcher passes a signal on to ranks and lives on; without ranks it ends."""
    connection, process = start_worker(start, (0,), other_session)
    connection.send((0, (0,)))
    wait_until(lambda: any(os.getpgid(child) == child for child in _children(process.pid)))
    assert os.getpgid(process.pid) == process.pid
    try:
        assert not started_ranks()
    finally:
        for child in _children(process.pid):
            os.kill(child, signal.SIGKILL)
        end_worker(process)


def _children(process):
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
