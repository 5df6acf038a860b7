"""What Prometheus gets: the guide's names, values of the loop and of rows, within bounds, over a real socket."""

import importlib.machinery
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from glm46.config.errors import UserError
from glm46.engine.observe import exporter as exporter_module
from glm46.engine.observe import tracker
from glm46.engine.observe.exporter import Exporter, exported_names
from glm46.engine.observe.metrics import _OF_NETWORKS, METRICS, SPREAD
from glm46.engine.observe.report import Report
from glm46.engine.observe.tracker import Tracker
from tests.processes import HANG_SECONDS, free_port, wait_until

ROOT = Path(__file__).parents[4]
RUN = ("run", "r")

GUIDE = ("training_loss", "training_learning_rate", "training_tokens_per_second", "training_steps_total")
GUIDE += ("expert_balance_cv", "training_perplexity", "training_validation_loss")
GUIDE += ("nccl_allreduce_time_ms", "nccl_bandwidth_gbps", "nccl_busbw_gbps")


def scrape(exporter: Exporter) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    return generate_latest(registry).decode()


def values(text: str) -> dict:
    """The value of each series, by its name and sorted labels other than the run's."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["run"] == "r" for sample in samples)
    keys = [(sample.name, *sorted(sample.labels.items() - {RUN})) for sample in samples]
    assert len(set(keys)) == len(keys)
    return {key if len(key) > 1 else key[0]: sample.value for key, sample in zip(keys, samples, strict=True)}


def begin(step: int = 0, **more) -> Exporter:
    """An exporter without an endpoint, of a run that has begun to train."""
    exporter = Exporter("r", None, print)
    settings = {"budget": 1000, "save_interval": 50, "info": {"task": "pretrain", "config": "abc"}} | more
    exporter.begins(step=step, tokens=10 * step, **settings)
    return exporter


def phase_of(exporter: Exporter) -> str:
    phases = {key[1][1]: value for key, value in values(scrape(exporter)).items() if key[0] == "training_phase"}
    assert sorted(phases.values()) == [0, 0, 0, 0, 0, 1]
    return max(phases, key=phases.get)


def full_row(parts: int = 3) -> dict:
    """Every column that a run can have, with many parts."""
    row = {}
    for metric in METRICS:
        if metric.per == SPREAD:
            row |= {f"{metric.name}/{part}": 1.0 for part in ("min", "mean", "max")}
        else:
            row[metric.name] = 2 if metric.name == "step" else 1.0
            row |= {f"{metric.name}/{part}": 1.0 for part in range(parts if metric.per else 0)}
    return row


def test_every_column_has_a_name_that_prometheus_accepts_and_the_guide_knows():
    exporter = begin()
    exporter.row(full_row())
    text = scrape(exporter)
    names = {family.name + "_total" * (family.type == "counter") for family in text_string_to_metric_families(text)}
    # The time of a checkpoint comes with the first checkpoint.
    assert names == exported_names() - {"training_last_checkpoint_timestamp_seconds"}
    assert set(GUIDE) <= names
    for name in names:
        assert re.fullmatch("(training|expert|dead|nccl)_[a-z_]+[a-z]", name), name
    # Prometheus adds these.
    assert not re.search(r"[{,](instance|job|cluster)=", text)
    assert "_created" not in text
    if shutil.which("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=300)
        # The guide's name of a time, and the only one that is not in base units.
        faults = [line for line in done.stderr.splitlines() if not line.startswith("nccl_allreduce_time_ms ")]
        assert (done.returncode, faults) == (3, []), done.stderr


def test_values_are_those_of_the_rows_in_base_units(tmp_path):
    exporter = begin(step=4, save_interval=None)
    report = Report(tmp_path, is_main=True, tensorboard_folder=None, total_tokens=10, exporter=exporter)
    report.validation({"step": 3, "validation_loss": 5.5, "validation_loss/code": 5.25})
    row = {"step": 4, "tokens": 5, "loss": 3.5, "lr": 1e-3, "mfu": 0.4, "tokens_per_second": 5.0}
    row |= {"grad_norm": math.nan, "grad_norm/critic": 7.0, "memory_peak_gib/max": 2.0, "tflops_per_device": 3.0}
    report.train(row)
    report.close()
    exported = values(scrape(exporter))
    assert exported["training_loss"] == 3.5 and exported["training_learning_rate"] == 1e-3
    assert exported["training_mfu_ratio"] == 0.4 and exported["training_validation_loss"] == 5.5
    assert exported["training_validation_loss", ("source", "code")] == 5.25
    assert exported["training_memory_peak_bytes", ("ranks", "max")] == 2 * 2**30
    assert exported["training_device_flops"] == 3e12
    assert math.isnan(exported["training_grad_norm"])  # not the last finite value
    assert exported["training_grad_norm", ("network", "critic")] == 7.0
    assert (exported["training_step"], exported["training_tokens"], exported["training_tokens_budget"]) == (4, 40, 1000)
    assert exported["training_last_checkpoint_step"] == 4 and "training_checkpoint_interval_steps" not in exported
    assert exported["training_info", ("config", "abc"), ("task", "pretrain")] == 1


def test_counters_begin_at_0_with_each_process_and_survive_a_rollback():
    exporter = begin(step=10_000)
    exporter.step(10_001, 100_010, was_skipped=False, is_finite=True, loss=2.0)
    exporter.step(10_002, 100_020, was_skipped=True, is_finite=False, loss=math.nan)
    exporter.save_failed()
    exported = values(scrape(exporter))
    counts = ("training_steps_total", "training_tokens_total", "training_skipped_steps_total")
    more = ("training_not_finite_steps_total", "training_failed_saves_total")
    assert [exported[name] for name in (*counts, *more)] == [2, 20, 1, 1, 1]
    assert exported["training_step"] == 10_002 and math.isnan(exported["training_loss"])
    exporter.begins(step=9_900, tokens=99_000, budget=10**6, save_interval=50, info={})
    exporter.step(9_901, 99_010, was_skipped=False, is_finite=True, loss=2.0)
    exported = values(scrape(exporter))
    assert [exported[name] for name in counts] == [3, 30, 1]
    assert exported["training_loss"] == 2.0
    # A new process at an older step: Prometheus takes the fall for a start, and no rate is thousands of steps.
    exported = values(scrape(begin(step=9_900)))
    assert [exported[name] for name in counts] == [0, 0, 0] and exported["training_step"] == 9_900


def test_a_process_has_no_position_before_it_begins_to_train():
    """A step of 0 would look like a run that went back, and keep `LossSpike` silent for eleven minutes."""
    exporter = Exporter("r", None, print)
    positions = {"training_step", "training_tokens", "training_tokens_budget", "training_last_checkpoint_step"}
    assert not positions & set(values(scrape(exporter))) and phase_of(exporter) == "start"
    exporter.begins(step=9_900, tokens=99_000, budget=10**6, save_interval=50, info={})
    assert positions <= set(values(scrape(exporter)))


def test_the_phase_is_the_trainer_s():
    exporter = begin()
    moved = "training_last_step_timestamp_seconds"
    before = values(scrape(exporter))[moved]
    assert phase_of(exporter) == "train"
    with exporter.phase("validate"):
        assert phase_of(exporter) == "validate"
    assert phase_of(exporter) == "train"
    assert values(scrape(exporter))[moved] > before  # a long validation is not a stall afterwards
    with pytest.raises(ValueError), exporter.phase("save"):
        raise ValueError
    assert phase_of(exporter) == "save"
    exporter.stops()
    assert phase_of(exporter) == "stop"


def test_a_checkpoint_sets_step_and_time():
    exporter = begin()
    began = time.time()
    exporter.saved(50)
    exported = values(scrape(exporter))
    assert exported["training_last_checkpoint_step"] == 50
    assert exported["training_last_checkpoint_timestamp_seconds"] >= began


def test_the_number_of_series_is_bounded_as_the_documents_say():
    exporter = begin()
    # More parts than are exported, and a second network.
    row = full_row(parts=60)
    row |= {f"{m.name}/critic": 1.0 for m in METRICS if m.per is None and m.group in _OF_NETWORKS}
    exporter.row(row)
    series = len(values(scrape(exporter)))
    bounds = [
        int(re.search(r"a run at most (\d+)\s+series", (ROOT / file).read_text())[1])
        for file in ("docs/monitoring.md", "deploy/monitoring/prometheus.yml")
    ]
    assert bounds == [-(-series // 50) * 50] * 2
    exporter = begin()
    exporter.row(full_row(parts=4))
    assert 150 < len(values(scrape(exporter))) <= 300


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return response.read().decode()


def answers(port: int) -> bool:
    try:
        return bool(get(port))
    except OSError:
        return False


def test_a_taken_port_is_reported_and_training_continues():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = []
        exporter = Exporter("r", port, lines.append)
    assert len(lines) == 1 and f"metrics.prometheus_port = {port}" in lines[0] and "another port" in lines[0]
    exporter.step(1, 10, was_skipped=False, is_finite=True, loss=1.0)
    exporter.close(has_failed=False)


@pytest.mark.slow
def test_the_endpoint_is_on_loopback_alone_and_a_silent_client_holds_up_no_scrape():
    port = free_port()
    lines = []
    exporter = Exporter("r", port, lines.append)
    try:
        assert lines == [f"metrics      http://127.0.0.1:{port}/metrics"]
        with socket.create_connection(("127.0.0.1", port)):
            assert 'training_phase{phase="start",run="r"} 1.0' in get(port)
        own_address = socket.gethostbyname(socket.gethostname())
        if not own_address.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((own_address, port), timeout=0.2)
    finally:
        exporter.close(has_failed=True)
    assert not answers(port)


@pytest.mark.slow
def test_a_run_that_ends_as_intended_is_seen_in_its_last_phase(monkeypatch):
    """An endpoint that vanishes in another phase raises TrainingDown."""
    monkeypatch.setattr(exporter_module, "_LAST_SCRAPE_SECONDS", 60.0)
    port = free_port()
    exporter = Exporter("r", port, print)
    get(port)
    closing = threading.Thread(target=exporter.close, kwargs={"has_failed": False})
    closing.start()
    wait_until(lambda: 'training_phase{phase="stop",run="r"} 1.0' in get(port))
    closing.join(30)
    assert not closing.is_alive() and not answers(port)


@pytest.mark.slow
@pytest.mark.parametrize("is_scraped, has_failed", [(False, False), (True, True)])
def test_a_run_that_failed_or_that_nobody_watches_ends_at_once(is_scraped, has_failed, monkeypatch):
    monkeypatch.setattr(exporter_module, "_LAST_SCRAPE_SECONDS", 600.0)
    port = free_port()
    exporter = Exporter("r", port, print)
    if is_scraped:
        get(port)
    exporter.close(has_failed=has_failed)  # waits ten minutes otherwise
    assert not answers(port)


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
