"""Weights & Biases gets every row, in the same run after a restart; failing, hanging or absent it costs nothing."""

import importlib.machinery
import json
import sys
import threading
import types

import pytest

from glm46.config.errors import UserError
from glm46.engine.observe import tracker
from glm46.engine.observe.report import Report
from glm46.engine.observe.tracker import Tracker
from tests.processes import HANG_SECONDS

CONFIG = {"optimizer": {"lr": 0.1}, "training": {"steps": 4}}


class Fake(types.ModuleType):
    """The functions of the package that are called, and their arguments."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.rows, self.opened, self.ended = [], [], 0
        self.may_open = threading.Event()
        self.may_open.set()
        self.id = "r1"

    def init(self, **keys):
        assert self.may_open.wait(HANG_SECONDS)
        self.opened.append(keys)
        return self

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.ended += 1

    def Settings(self, **keys):
        return keys

    def define_metric(self, *_, **__):
        pass


@pytest.fixture
def package(monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def start(folder, lines, *, is_new=True):
    return Tracker(folder, CONFIG, is_new=is_new, report=lines.append)


def test_rows_of_a_report_arrive_and_a_restart_continues_the_run(package, tmp_path):
    lines = []
    for is_new in (True, False, True):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        sender = start(folder, lines, is_new=is_new)
        report = Report(
            folder,
            is_main=True,
            tensorboard_folder=None,
            total_tokens=10,
            resumed_step=None if is_new else 1,
            tracker=sender,
        )
        report.train({"step": 1, "tokens": 5, "loss": 2.5, "grad_norm": float("nan")})
        report.validation({"step": 1, "validation_loss": 2.75})
        report.close()
    rows = [{"step": 1, "tokens": 5, "loss": 2.5}, {"step": 1, "validation_loss": 2.75}]
    assert package.rows == rows * 3 and package.ended == 3 and not lines
    assert [keys["id"] for keys in package.opened] == [None, "r1", None]
    assert [keys["config"] for keys in package.opened] == [CONFIG] * 3
    assert json.loads((folder / tracker.ID_FILE).read_text()) == {"id": "r1"}


def test_a_service_that_hangs_holds_up_neither_rows_nor_the_end(package, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "_END_SECONDS", 0.05)
    lines = []
    package.may_open.clear()
    sender = start(tmp_path, lines)
    for step in range(2000):
        sender.write({"step": step})
    sender.close()
    assert len(lines) == 1 and "wandb" in lines[0] and "training continues" in lines[0]
    package.may_open.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_that_fails_is_reported_once(package, tmp_path):
    lines = []
    package.log = None
    sender = start(tmp_path, lines)
    for step in range(3):
        sender.write({"step": step})
    sender.close()
    sender.write({"step": 4})
    assert len(lines) == 1 and "failed" in lines[0]


def test_a_package_that_is_absent_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="metrics.enable_wandb = true.*pip install wandb"):
        Tracker(tmp_path, CONFIG, is_new=True, report=print)
