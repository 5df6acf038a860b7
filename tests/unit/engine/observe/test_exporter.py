"""What Prometheus gets: the guide's names, values of rows and heartbeat, and bounds that hold when files misbehave."""

import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from glm46.engine.observe import exporter
from glm46.engine.observe.exporter import RunCollector, exported_names
from glm46.engine.observe.heartbeat import HEARTBEAT_FILE, Heartbeat, read_heartbeat
from glm46.engine.observe.metrics import _OF_NETWORKS, METRICS, SPREAD
from tests.processes import HANG_SECONDS

ROOT = Path(__file__).parents[4]

GUIDE = ("training_loss", "training_learning_rate", "training_tokens_per_second", "training_steps_total")
GUIDE += ("expert_balance_cv", "training_perplexity", "training_validation_loss", "training_slowest_rank_ratio")
GUIDE += ("nccl_allreduce_time_ms", "nccl_bandwidth_gbps", "nccl_busbw_gbps")


def scrape(collector) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


def values(text) -> dict:
    """The value of each series, by its name and sorted labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    keys = [(sample.name, *sorted(sample.labels.items())) for sample in samples]
    assert len(set(keys)) == len(keys)
    return {key if len(key) > 1 else key[0]: sample.value for key, sample in zip(keys, samples, strict=True)}


def write_rows(folder, *rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"kind": "train", **row}) + "\n" for row in rows))


def begin(folder, step=0, **more):
    beat = Heartbeat(folder, is_main=True)
    settings = {"budget": 1000, "save_interval": 50, "info": {"task": "pretrain", "config": "abc"}} | more
    beat.begins(step=step, tokens=10 * step, **settings)
    return beat


def full_row(parts=3) -> dict:
    """Every column that a run can have, with many parts."""
    row = {}
    for metric in METRICS:
        if metric.per == SPREAD:
            row |= {f"{metric.name}/{part}": 1.0 for part in ("min", "mean", "max")}
        else:
            row[metric.name] = 2 if metric.name == "step" else 1.0
            row |= {f"{metric.name}/{part}": 1.0 for part in range(parts if metric.per else 0)}
    return row


def test_every_column_has_a_name_that_prometheus_accepts_and_the_guide_knows(tmp_path):
    begin(tmp_path)
    write_rows(tmp_path, full_row())
    text = scrape(RunCollector(tmp_path))
    names = {family.name + "_total" * (family.type == "counter") for family in text_string_to_metric_families(text)}
    # Checkpoint time comes with the first checkpoint.
    assert names == exported_names() - {"training_last_checkpoint_timestamp_seconds"}
    assert set(GUIDE) <= names
    for name in names:
        assert re.fullmatch("(training|expert|dead|nccl)_[a-z_]+[a-z]", name), name
    # Service discovery and Prometheus add these.
    assert not re.search(r"[{,](run|instance|job|cluster)=", text)
    assert "_created" not in text
    if shutil.which("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=300)
        # The guide's name of a time, and the only one that is not in base units.
        faults = [line for line in done.stderr.splitlines() if not line.startswith("nccl_allreduce_time_ms ")]
        assert (done.returncode, faults) == (3, []), done.stderr


def test_values_are_those_of_the_rows_in_base_units(tmp_path):
    begin(tmp_path, step=4, save_interval=None)
    first = {"step": 3, "kind": "validation", "validation_loss": 5.5, "validation_loss/code": 5.25}
    row = {"step": 4, "loss": 3.5, "lr": 1e-3, "mfu": 0.4, "grad_norm": None, "grad_norm/critic": 7.0}
    write_rows(tmp_path, first, row | {"memory_peak_gib/max": 2.0, "tflops_per_device": 3.0, "of_the_future": 1.0})
    found = values(scrape(RunCollector(tmp_path)))
    assert found["training_loss"] == 3.5 and found["training_learning_rate"] == 1e-3
    assert found["training_mfu_ratio"] == 0.4 and found["training_validation_loss"] == 5.5
    assert found["training_validation_loss", ("source", "code")] == 5.25
    assert found["training_memory_peak_bytes", ("ranks", "max")] == 2 * 2**30
    assert found["training_device_flops"] == 3e12
    assert math.isnan(found["training_grad_norm"])  # not the last finite value
    assert found["training_grad_norm", ("network", "critic")] == 7.0
    assert (found["training_step"], found["training_tokens"], found["training_tokens_budget"]) == (4, 40, 1000)
    assert found["training_last_checkpoint_step"] == 4 and "training_checkpoint_interval_steps" not in found
    assert found["training_info", ("config", "abc"), ("task", "pretrain")] == 1


def test_counters_begin_at_0_with_each_process_and_survive_a_rollback(tmp_path):
    beat, collector = begin(tmp_path, step=10_000), RunCollector(tmp_path)
    for step in (10_001, 10_002):
        beat.step(
            step,
            10 * step,
            was_skipped=step == 10_002,
            is_finite=step != 10_002,
            loss=math.nan if step == 10_002 else 2.0,
        )
    beat.save_failed()
    found = values(scrape(collector))
    counts = ("training_steps_total", "training_tokens_total", "training_skipped_steps_total")
    more = ("training_not_finite_steps_total", "training_failed_saves_total")
    assert [found[name] for name in (*counts, *more)] == [2, 20, 1, 1, 1]
    assert found["training_step"] == 10_002 and math.isnan(found["training_loss"])
    beat.begins(step=9_900, tokens=99_000, budget=10**6, save_interval=50, info={})
    beat.step(9_901, 99_010, was_skipped=False, is_finite=True, loss=2.0)
    found = values(scrape(collector))
    assert [found[name] for name in counts] == [3, 30, 1]
    assert found["training_loss"] == 2.0
    # A new process at an older step: Prometheus takes the fall for a start, and no rate is thousands of steps.
    begin(tmp_path, step=9_900)
    found = values(scrape(collector))
    assert [found[name] for name in counts] == [0, 0, 0] and found["training_step"] == 9_900


def test_a_process_has_no_position_before_it_begins_to_train(tmp_path):
    """A step of 0 would look like a run that went back, and keep `LossSpike` silent for eleven minutes."""
    begin(tmp_path, step=9_900)
    collector, beat = RunCollector(tmp_path), Heartbeat(tmp_path, is_main=True)
    positions = {"training_step", "training_tokens", "training_tokens_budget", "training_last_checkpoint_step"}
    assert not positions & set(values(scrape(collector)))
    beat.begins(step=9_900, tokens=99_000, budget=10**6, save_interval=50, info={})
    assert positions <= set(values(scrape(collector)))


def test_the_phase_is_that_of_the_trainer_and_of_the_launcher(tmp_path):
    beat, collector = begin(tmp_path), RunCollector(tmp_path)

    def phase():
        found = {key[1][1]: value for key, value in values(scrape(collector)).items() if key[0] == "training_phase"}
        assert sorted(found.values()) == [0, 0, 0, 0, 0, 1]
        return max(found, key=found.get)

    before = read_heartbeat(tmp_path).moved
    assert phase() == "train"
    with beat.phase("validate"):
        assert phase() == "validate"
    assert phase() == "train"
    assert read_heartbeat(tmp_path).moved > before  # a long validation is not a stall afterwards
    began = time.time()
    collector.restarted(2)  # the ranks of before are gone, the new ones have not begun
    assert phase() == "start"
    found = values(scrape(collector))
    assert found["training_restarts_total"] == 2
    # Not the age of the last step of before, which may be days, and raise TrainingStalled or PhaseTooLong.
    assert found["training_last_step_timestamp_seconds"] >= began and "training_step" not in found
    begin(tmp_path).stops()
    assert phase() == "stop"


def test_a_resume_that_removes_rows_removes_their_values(tmp_path):
    begin(tmp_path)
    write_rows(tmp_path, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 9.0, "dead_experts": 7})
    collector = RunCollector(tmp_path)
    assert values(scrape(collector))["dead_experts"] == 7
    (tmp_path / "metrics.jsonl").rename(tmp_path / "old")  # keeps the inode taken
    write_rows(tmp_path, {"step": 1, "loss": 3.0})
    found = values(scrape(collector))
    assert found["training_loss"] == 3.0 and "dead_experts" not in found


def test_the_number_of_series_is_bounded_as_the_documents_say(tmp_path):
    begin(tmp_path)
    # More parts than are exported, in a row that is read whole, and a second network.
    row = full_row(parts=60)
    row |= {f"{m.name}/critic": 1.0 for m in METRICS if m.per is None and m.group in _OF_NETWORKS}
    write_rows(tmp_path, row)
    series = len(values(scrape(RunCollector(tmp_path))))
    stated = [
        int(re.search(r"a run at most (\d+)\s+series", (ROOT / file).read_text())[1])
        for file in ("docs/monitoring.md", "deploy/monitoring/prometheus.yml")
    ]
    assert stated == [-(-series // 50) * 50] * 2
    write_rows(tmp_path, full_row(parts=4))
    assert 150 < len(values(scrape(RunCollector(tmp_path)))) <= 300


def test_files_that_are_missing_torn_or_of_another_release_leave_the_last_values(tmp_path):
    collector = RunCollector(tmp_path)
    assert values(scrape(collector)) == {"training_restarts_total": 0}
    begin(tmp_path, step=3)
    assert values(scrape(collector))["training_step"] == 3
    for content in ("", "{", '{"phase": "train", "unknown": 1}'):
        (tmp_path / HEARTBEAT_FILE).write_text(content)
        assert values(scrape(collector))["training_step"] == 3


def test_a_disk_that_does_not_answer_delays_one_scrape_only(tmp_path, monkeypatch):
    begin(tmp_path, step=3)
    collector, answers, asked = RunCollector(tmp_path), threading.Event(), threading.Event()
    scrape(collector)

    def hanging(folder):
        asked.set()
        answers.wait(HANG_SECONDS)

    monkeypatch.setattr(exporter, "read_heartbeat", hanging)
    first = threading.Thread(target=scrape, args=(collector,))
    first.start()
    assert asked.wait(HANG_SECONDS)
    assert values(scrape(collector))["training_step"] == 3
    assert first.is_alive()
    answers.set()
    first.join()


def test_only_the_main_rank_writes_and_a_failing_disk_is_no_fault(tmp_path):
    other = Heartbeat(tmp_path, is_main=False)
    other.step(1, 10, was_skipped=False, is_finite=True, loss=1.0)
    other.close()
    assert not list(tmp_path.iterdir())
    nowhere = Heartbeat(tmp_path / "absent", is_main=True)
    nowhere.step(1, 10, was_skipped=False, is_finite=True, loss=1.0)
    nowhere.close()
    beat = begin(tmp_path, info={"long": "x" * 5000})
    beat.begins(step=0, tokens=0, budget=1, save_interval=None, info={})  # shorter than before
    assert read_heartbeat(tmp_path).info == {}
    with pytest.raises(ValueError), beat.phase("save"):
        raise ValueError
    assert read_heartbeat(tmp_path).phase == "save"
    # After a network disk has failed the descriptor stays broken: the next write but one is in the file again.
    os.dup2(os.open(os.devnull, os.O_RDONLY), beat._file)
    for step in (7, 8):
        beat.step(step, 10, was_skipped=False, is_finite=True, loss=1.0)
    assert read_heartbeat(tmp_path).step == 8
    beat.close()
