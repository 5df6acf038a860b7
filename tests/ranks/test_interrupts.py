"""Signals before ranks train, once and twice: interrupts.py, which says how to run many."""

import random
import signal

import pytest

from tests.ranks.interrupts import attempt, phases


@pytest.mark.parametrize(
    ("phase", "numbers"),
    [
        ("start", (signal.SIGINT,)),
        ("prepare", (signal.SIGINT, signal.SIGINT)),
        ("prepare", (signal.SIGTERM,)),
        ("prepare a source", (signal.SIGHUP, signal.SIGTERM)),
        ("waiting", (signal.SIGTERM,)),
        ("misspelt", (signal.SIGINT, signal.SIGINT)),
        ("first", (signal.SIGUSR1,)),
    ],
)
def test_a_signal_ends_all_that_was_started(phase, numbers, tmp_path):
    row = attempt(phase, phases(tmp_path)[phase], numbers, random.Random(0), tmp_path)
    assert row["right"] and not row["left"] and row["seconds"] < 10, row
    assert "Traceback" not in row["said"], row
