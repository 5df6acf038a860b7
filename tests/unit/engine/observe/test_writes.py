"""Writes in a thread: in order, waited for, and no longer than a moment where storage does not answer."""

import json
import threading
import time

import pytest

from glm46.engine.observe import writes
from glm46.engine.observe.console import ConsoleView
from glm46.engine.observe.history import LineFile, read_history
from glm46.engine.observe.report import Report
from glm46.engine.observe.writes import Writes
from tests.processes import HANG_SECONDS, wait_until


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A function that limits the time for which a call is waited for. Without it there is no limit."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(writes, "_PATIENCE_SECONDS", seconds)

    set_to(HANG_SECONDS)
    return set_to


def test_calls_are_made_in_order_and_waited_for():
    made, thread = [], Writes("test", most_waiting=100)
    for number in range(50):
        thread.make(lambda number=number: made.append(number))
        assert made == list(range(number + 1))
    thread.close()


def test_an_error_reaches_the_caller_and_every_later_one(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    made, thread = [], Writes("test", most_waiting=100)
    with pytest.raises(ZeroDivisionError):
        thread.make(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        thread.make(lambda: made.append(1))
    thread.close()
    assert made == []


@pytest.mark.slow
def test_a_call_that_stalls_is_waited_for_once_and_the_oldest_of_too_many_are_dropped(patience):
    made, answers, thread = [], threading.Event(), Writes("test", most_waiting=3)
    patience(1.0)
    began = time.monotonic()
    thread.make(answers.wait)
    for number in range(100):
        thread.make(lambda number=number: made.append(number))
    assert 1.0 <= time.monotonic() - began < 60.0 and made == []  # waiting at each call takes 101 s
    patience(HANG_SECONDS)
    threading.Timer(0.2, answers.set).start()
    thread.finish()
    assert made == [97, 98, 99]
    thread.make(lambda: made.append(100))  # waited for again
    assert made == [97, 98, 99, 100]
    thread.close()


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_storage_a_while_and_says_what_is_missing(tmp_path, monkeypatch, capsys, patience):
    patience(0.3)
    monkeypatch.setattr(writes, "_END_SECONDS", 0.5)
    answers = threading.Event()
    append = LineFile._append
    report = Report(tmp_path, is_main=True, tensorboard_folder=None, total_tokens=99)
    monkeypatch.setattr(LineFile, "_append", lambda *call: (answers.wait(), append(*call)))
    report.message("the last words")
    began = time.monotonic()
    report.close()
    assert 0.5 <= time.monotonic() - began < 50.0  # without an end, it waits for storage until the test is killed
    assert f"{tmp_path}: storage does not answer" in capsys.readouterr().out.replace("\n", "")
    answers.set()  # the threads are left behind, and end once it answers
    wait_until(lambda: "the last words" in (tmp_path / "log.txt").read_text())


@pytest.mark.slow
def test_storage_that_stalls_holds_no_step_up_and_loses_no_row(tmp_path, monkeypatch, patience):
    answers = threading.Event()
    append = LineFile._append
    answers.set()
    monkeypatch.setattr(LineFile, "_append", lambda *call: (answers.wait(), append(*call)))
    report = Report(tmp_path, is_main=True, tensorboard_folder=None, total_tokens=99, console=ConsoleView(99))

    def train(steps: range) -> None:
        for step in steps:
            row = {"step": step, "tokens": step, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 5.0}
            report.train(row)

    def written() -> list[int]:
        return [row["step"] for row in read_history(tmp_path / "metrics.jsonl")]

    train(range(1, 4))
    assert written() == [1, 2, 3]
    answers.clear()
    patience(2.0)
    began = time.monotonic()
    train(range(4, 54))
    assert time.monotonic() - began < 60.0 and written() == [1, 2, 3]  # waiting at each step takes 100 s
    patience(HANG_SECONDS)
    answers.set()
    report.finish_writes()
    assert written() == list(range(1, 54))
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["loss"] == 1.0
    report.close()
    assert [line for line in (tmp_path / "log.txt").read_text().splitlines() if "loss" in line][49:]
