"""Worker processes return all results, or the error of the first call that failed, and none survives."""

import multiprocessing
import os
import signal
import time

import pytest

from glm46.config.errors import UserError
from glm46.prepare.workers import call_in_workers

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
