"""Trackers get every row, in the run of before after a restart; one that fails, hangs or is absent costs nothing."""

import importlib.machinery
import json
import sys
import threading
import types

import pytest

from glm46.config.checkpoint import MetricsConfig
from glm46.config.errors import UserError
from glm46.engine.observe import tracker
from glm46.engine.observe.report import Report
from glm46.engine.observe.tracker import Tracker
from tests.processes import HANG_SECONDS

CONFIG = {"optimizer": {"lr": 0.1}, "training": {"steps": 4}}


class Fake(types.ModuleType):
    """What both packages have, and what they were told."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.rows, self.opened, self.ended = [], [], 0
        self.may_open = threading.Event()
        self.may_open.set()
        self.id, self.info = "r1", types.SimpleNamespace(run_id="r1")

    def init(self, **keys):
        assert self.may_open.wait(HANG_SECONDS)
        self.opened.append(keys)
        return self

    def start_run(self, **keys):
        return self.init(**keys)

    def log(self, row):
        self.rows.append(row)

    def log_metrics(self, row, step):
        assert step == row["step"]
        self.rows.append(row)

    def finish(self):
        self.ended += 1

    end_run = finish

    def Settings(self, **keys):
        return keys

    def define_metric(self, *_, **__):
        pass

    log_params = define_metric


@pytest.fixture(params=["wandb", "mlflow"])
def package(request, monkeypatch):
    fake = Fake(request.param)
    monkeypatch.setitem(sys.modules, request.param, fake)
    return fake


def start(package, folder, said, *, is_new=True):
    return Tracker(MetricsConfig(tracker=package.__name__), folder, CONFIG, is_new=is_new, report=said.append)


def test_rows_of_a_report_arrive_and_a_restart_continues_the_run(package, tmp_path):
    said = []
    for is_new in (True, False, True):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        sender = start(package, folder, said, is_new=is_new)
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
    assert package.rows == rows * 3 and package.ended == 3 and not said
    key = "id" if package.__name__ == "wandb" else "run_id"
    assert [keys[key] for keys in package.opened] == [None, "r1", None]
    assert json.loads((folder / tracker.ID_FILE).read_text()) == {"id": "r1"}


def test_a_tracker_that_hangs_holds_up_neither_rows_nor_the_end(package, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "_END_SECONDS", 0.05)
    said = []
    package.may_open.clear()
    sender = start(package, tmp_path, said)
    for step in range(2000):
        sender.write({"step": step})
    sender.close()
    assert len(said) == 1 and package.__name__ in said[0] and "training continues" in said[0]
    package.may_open.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tracker_that_fails_says_so_once(package, tmp_path):
    said, package.log = [], None
    package.log_metrics = None
    sender = start(package, tmp_path, said)
    for step in range(3):
        sender.write({"step": step})
    sender.close()
    sender.write({"step": 4})
    assert len(said) == 1 and "failed" in said[0]


def test_a_package_that_is_absent_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="metrics.tracker = 'wandb'.*pip install wandb"):
        Tracker(MetricsConfig(tracker="wandb"), tmp_path, CONFIG, is_new=True, report=print)
