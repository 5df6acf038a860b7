"""The alerts of deploy/monitoring: each fires at its second, not one evaluation earlier, and none on a recorded day.

promtool computes them as Prometheus does. Without it, only what the file itself says is tested.
"""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from glm46.engine.observe.exporter import exported_names

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "deploy" / "monitoring"
GROUPS = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
INSPECTOR = {"nccl_bus_bandwidth_gbs", "nccl_collective_exec_time_microseconds"}
"""Of NCCL's plugin, as its inspector_prom.cc writes them."""
EVERY_SECONDS = 5
FAULT = 600
UNTIL = 1900
"""Second until which an alert that must not fire is watched, unless `PATIENCE` has another one."""
PATIENCE = {"PhaseTooLong": 4800}
"""Second at which most faults begin."""
RUN = '{job="glm46", run="r", instance="n:9400"}'
UP = 'up{job="glm46", instance="n:9400"}'
GPU = '{job="dcgm", gpu="3", Hostname="n7", instance="n7:9400"}'
NODE = '{job="node", instance="n7:9100"}'
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (prometheus)")

Values = Callable[[int], float | str | None]


class Case(NamedTuple):
    """Series as functions of the second, the one whose labels the alert has first, and the second at which the alert
    fires; None for never."""

    alert: str
    fires: int | None
    series: dict[str, Values]
    every: int = EVERY_SECONDS
    text: str = ""
    """Summary of the alert; empty not to test it."""


def step(before: float, after: float, at: int = FAULT) -> Values:
    return lambda second: after if second >= at else before


def always(value: float) -> Values:
    return lambda second: value


def of_run(**values: Values) -> dict[str, Values]:
    return {f"{name.partition('__')[0]}{_labels(name)}": value for name, value in values.items()}


def _labels(name: str) -> str:
    more = name.partition("__")[2]
    key, _, value = more.partition("_")
    return RUN[:-1] + f', {key}="{value}"}}' if more else RUN


def noisy_loss(second: int) -> float:
    """Deviates by 0.02 from 3: the quartiles are 0.04 apart."""
    return 3.0 + (0.02 if second // EVERY_SECONDS % 2 else -0.02)


def spike(height: float) -> Values:
    return lambda second: noisy_loss(second) + height * (second >= 900)


def ends_as_intended(second: int) -> float | str:
    """Value of the phase ``stop`` of a run that ends at the fault."""
    if second >= FAULT:
        return "stale"
    return float(second == FAULT - EVERY_SECONDS)


TRAINS = {"training_phase__phase_train": always(1)}
STOPS_AT_600 = {"training_last_step_timestamp_seconds": lambda second: min(second, FAULT)}
LATE = {"training_step": always(1000)}

CASES = [
    Case(
        "TrainingDown",
        FAULT + 120,
        of_run(training_phase__phase_stop=step(0, "stale")) | {UP: step(1, 0)},
        text="r: no answer from n:9400; the run has crashed or its node is gone",
    ),
    Case("TrainingDown", None, of_run(training_phase__phase_stop=ends_as_intended) | {UP: step(1, 0)}),
    Case("TrainingDown", None, {UP: always(0)}),  # no run has had this port
    # A restart of the ranks.
    Case("TrainingDown", None, of_run(training_phase__phase_stop=always(0)) | {UP: lambda second: second // 100 % 2}),
    # The first evaluation later than 120 s is that of 125 s.
    Case("TrainingStalled", FAULT + 135, of_run(training_step_seconds=always(1), **STOPS_AT_600, **TRAINS)),
    Case("TrainingStalled", FAULT + 315, of_run(training_step_seconds=always(30), **STOPS_AT_600, **TRAINS)),
    Case(
        "TrainingStalled",
        None,
        of_run(training_step_seconds=always(1), training_phase__phase_save=always(1), **STOPS_AT_600)
        | of_run(training_phase__phase_train=always(0)),
    ),
    Case("PhaseTooLong", FAULT + 3665, of_run(training_phase__phase_prepare=always(1), **STOPS_AT_600)),
    Case("PhaseTooLong", FAULT + 3665, of_run(**STOPS_AT_600, **TRAINS)),  # in the first step
    Case("PhaseTooLong", None, of_run(training_step_seconds=always(1), **STOPS_AT_600, **TRAINS)),
    Case("PhaseTooLong", None, of_run(training_phase__phase_stop=always(1), **STOPS_AT_600)),
    Case("TrainingNotFinite", FAULT, of_run(training_not_finite_steps_total=step(0, 1))),
    Case("TrainingNotFinite", FAULT, of_run(training_loss=lambda second: "NaN" if second >= FAULT else 3.0)),
    Case("StepsSkipped", FAULT, of_run(training_skipped_steps_total=step(0, 5))),
    Case("StepsSkipped", None, of_run(training_skipped_steps_total=step(0, 2))),
    Case("LossSpike", 925, of_run(training_loss=spike(0.5))),
    Case("LossSpike", 925, of_run(training_loss=spike(0.3))),
    Case("LossSpike", None, of_run(training_loss=spike(0.15))),
    # A lone outlier.
    Case("LossSpike", None, of_run(training_loss=lambda second: noisy_loss(second) + 3.0 * (second == 900))),
    # As large as before, in a run whose loss deviates more.
    Case("LossSpike", None, of_run(training_loss=lambda second: 5 * noisy_loss(second) + 0.5 * (second >= 900))),
    Case("LossSpike", None, of_run(training_loss=spike(0.5), training_info__task_rl=always(1))),
    Case("LossSpike", None, of_run(training_loss=spike(0.5), training_step=step(1000, 10, at=900))),
    Case("ThroughputDrop", 4200, of_run(training_tokens_per_second=step(1000, 790, at=3600), **TRAINS)),
    Case("BandwidthDrop", 4200, of_run(nccl_busbw_gbps__group_nodes=step(100, 69, at=3600))),
    Case(
        "BandwidthDrop",
        4200,
        {f'nccl_bus_bandwidth_gbs{NODE[:-1]}, collective="AllReduce"}}': step(100, 69, at=3600)},
        text="69 GB/s between ranks (AllReduce), a third less than in the last hour (n7:9100)",
    ),
    Case("BandwidthDrop", None, of_run(nccl_busbw_gbps__group_nodes=step(100, 71))),
    Case(
        "TrainingMemoryNearlyFull",
        FAULT + 600,
        {
            f'training_extreme_rank{RUN[:-1]}, figure="memory_peak_ratio/max"}}': always(5),
            f'training_memory_peak_ratio{RUN[:-1]}, ranks="max"}}': step(0.96, 0.98),
        },
        text="r: rank 5 has reserved more than 97 % of its GPU's memory (n:9400)",
    ),
    Case("DataStarved", FAULT + 600, of_run(training_data_seconds=step(0.01, 0.2), training_step_seconds=always(1))),
    Case(
        "RestartLoop",
        1200,
        of_run(training_start_timestamp_seconds=lambda second: sum(second >= at for at in (300, 600, 1200))),
    ),
    Case("CheckpointFailed", FAULT, of_run(training_failed_saves_total=step(0, 1))),
    # A step in 5 s: step 201 is more than two intervals after step 100.
    Case(
        "CheckpointStale",
        1005 + 60,
        of_run(
            training_step=lambda second: second // 5,
            training_last_checkpoint_step=always(100),
            training_checkpoint_interval_steps=always(50),
        ),
    ),
    Case("ExpertsDead", FAULT + 600, of_run(dead_experts=step(0, 4), **LATE)),
    Case("ExpertsDead", None, of_run(dead_experts=step(0, 4), training_step=always(100))),
    Case("ExpertImbalance", FAULT + 600, of_run(expert_balance_cv=step(0.3, 1.2), **LATE)),
    # MiB, and no total: 79,000 of 80,000.
    Case(
        "GPUMemoryExhausted",
        FAULT + 300,
        {
            f"DCGM_FI_DEV_FB_USED{GPU}": step(70_000, 79_000),
            f"DCGM_FI_DEV_FB_FREE{GPU}": step(9_500, 500),
            f"DCGM_FI_DEV_FB_RESERVED{GPU}": always(500),
        },
    ),
    Case(
        "HighGPUTemperature",
        FAULT + 300,
        {f"DCGM_FI_DEV_GPU_TEMP{GPU}": step(70, 90)},
        text="GPU 3 of n7: 90 degrees C",
    ),
    Case(
        "HighGPUTemperature",
        FAULT + 300,
        {f'training_gpu_temperature_celsius{RUN[:-1]}, ranks="max"}}': step(70, 90)},
        text="r, hottest GPU: 90 degrees C",
    ),
    Case("GPURemapFailed", FAULT, {f"DCGM_FI_DEV_ROW_REMAP_FAILURE{GPU}": step(0, 1)}),
    Case("HighGPUTemperature", FAULT + 300, {f"DCGM_FI_DEV_MEMORY_TEMP{GPU}": step(85, 97)}),
    Case(
        "GPUThrottled", FAULT + 300, {f'DCGM_EXP_CLOCK_EVENTS_COUNT{GPU[:-1]}, clock_event="hw_thermal"}}': step(0, 2)}
    ),
    Case("GPUThrottled", None, {f'DCGM_EXP_CLOCK_EVENTS_COUNT{GPU[:-1]}, clock_event="gpu_idle"}}': step(0, 2)}),
    Case("GPUXid", FAULT, {f'DCGM_EXP_XID_ERRORS_COUNT{GPU[:-1]}, xid="79"}}': step(0, 1)}),
    Case(
        "GPULost",
        FAULT + 60,
        {
            f'DCGM_FI_DEV_GPU_TEMP{{Hostname="n7", gpu="{gpu}"}}': always(60) if gpu else step(60, "stale")
            for gpu in range(8)
        },
    ),
    Case("NodeDown", FAULT + 60, {f"up{NODE}": step(1, 0)}),
    # Full in 30,000 s: that is six hours ahead from 8,400 s on, and half of it is used from 15,000 s on.
    Case(
        "DiskFilling",
        15_060 + 600,
        {
            f"node_filesystem_avail_bytes{NODE}": lambda second: 1e12 * (1 - second / 30_000),
            f"node_filesystem_size_bytes{NODE}": always(1e12),
        },
        every=60,
    ),
    Case("ClockOff", FAULT + 600, {f"node_timex_offset_seconds{NODE}": step(0.001, -0.2)}),
    Case("ClockUnsynchronised", FAULT + 600, {f"node_timex_sync_status{NODE}": step(1, 0)}),
]


def written(values: Values, seconds: range) -> str:
    """A series in promtool's notation."""
    found = (values(second) for second in seconds)
    return " ".join("_" if value is None else str(value) for value in found)


def entry(series: dict[str, Values], end: int, every: int, expectations: list[dict]) -> dict:
    seconds = range(0, end + every, every)
    return {
        "interval": f"{every}s",
        "input_series": [{"series": name, "values": written(values, seconds)} for name, values in series.items()],
        "promql_expr_test": expectations,
    }


def texts(case: Case) -> dict:
    """Expectation of promtool of the labels and annotations with which an alert fires."""
    if not case.text:
        return {}
    rule = ALERTS[case.alert]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', next(iter(case.series)))) | rule["labels"]
    annotations = rule["annotations"] | {"summary": case.text}
    alert = {"exp_labels": labels, "exp_annotations": annotations}
    return {"alert_rule_test": [{"eval_time": f"{case.fires}s", "alertname": case.alert, "exp_alerts": [alert]}]}


def write_tests(file: Path, rules: Path, every: int, tests: list[dict]) -> Path:
    content = {"rule_files": [str(rules)], "evaluation_interval": f"{every}s", "tests": tests}
    file.write_text(json.dumps(content))
    return file


def run_promtool(*files: Path) -> None:
    done = subprocess.run(["promtool", "test", "rules", *files], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@needs_promtool
@pytest.mark.slow
def test_each_alert_fires_at_its_second_and_not_one_evaluation_earlier(tmp_path):
    tests = {}
    for case in CASES:
        every = case.every
        firing = f'count(ALERTS{{alertname="{case.alert}", alertstate="firing"}})'
        end = case.fires or PATIENCE.get(case.alert, UNTIL)
        expectations = [{"expr": firing, "eval_time": f"{end}s", "exp_samples": []}]
        if case.fires is not None:
            expectations[0]["exp_samples"] = [{"labels": "{}", "value": 1}]
            expectations.append({"expr": firing, "eval_time": f"{end - every}s", "exp_samples": []})
        tests.setdefault((case.alert, every), []).append(entry(case.series, end, every, expectations) | texts(case))
    files = []
    for (alert, every), of_alert in tests.items():
        # Its rule alone, with those that record: the others would cost a minute.
        kept = [*(rule for rule in RULES if "record" in rule), ALERTS[alert]]
        rules = tmp_path / f"{alert}.rules.yml"
        rules.write_text(json.dumps({"groups": [{"name": "kept", "rules": kept}]}))
        files.append(write_tests(tmp_path / f"{alert}.yml", rules, every, of_alert))
    run_promtool(*files)


def test_every_alert_has_a_case_that_fires():
    assert {case.alert for case in CASES if case.fires is not None} == ALERTS.keys()


def test_every_alert_says_where_and_how_much_and_has_a_runbook():
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "monitoring.md").read_text(), re.M)
    for name, rule in ALERTS.items():
        summary, runbook = rule["annotations"]["summary"], rule["annotations"]["runbook"]
        assert runbook == f"docs/monitoring.md#{name.lower()}" and name in headings
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.search(r"\$labels\.(run|Hostname|instance)", summary), name
    assert sorted(headings) == sorted(ALERTS)


def test_rules_read_only_metrics_that_somebody_exports():
    """A renamed column would otherwise silence its alert."""
    counters = (FOLDER / "dcgm-counters.csv").read_text()
    dcgm = set(re.findall(r"^DCGM_\w+", counters, re.M))
    assert all(line.count(",") == 2 for line in counters.splitlines() if not line.startswith("#"))
    pattern, known = r"\b(?:training|expert|dead|nvidia|nccl|DCGM)_\w+", exported_names() | RECORDED | INSPECTOR | dcgm
    found = {word for rule in RULES for word in re.findall(pattern, rule["expr"])}
    assert found <= known, found - known


def test_every_counter_of_dcgm_is_read_by_a_rule_or_a_dashboard():
    counters = re.findall(r"^DCGM_\w+", (FOLDER / "dcgm-counters.csv").read_text(), re.M)
    pages = "".join(path.read_text() for path in (FOLDER / "dashboards").iterdir())
    read = (FOLDER / "alerts.yml").read_text() + pages
    assert [name for name in counters if not re.search(rf"\b{name}\b", read)] == []


HOUR = 3600
DAY = 24 * HOUR
RECORDING = json.loads((Path(__file__).parent / "recorded_metrics.json").read_text())
"""Written by scripts/measure/record_metrics.py."""
SCRAPE = RECORDING["seconds"]
BETWEEN_STARTS = 1860
"""Seconds, at least: three starts within an hour raise RestartLoop."""
POSITIONS = ("training_step", "training_last_checkpoint_step")
"""Metrics that a resume continues; counters begin at 0 with each process."""


def recorded_series() -> dict[str, list[float | None]]:
    """Values of the scrapes, None where a series is absent; names have the labels of discovery."""
    series = {}
    for job, labels in (("glm46", RUN), ("node", NODE)):
        for name, runs in RECORDING[job].items():
            metric, _, own = name.partition("{")
            labelled = UP if name == "up" and job == "glm46" else f"{metric}{labels[:-1]}{', ' + own if own else '}'}"
            series[labelled] = [value for value, times in runs for _ in range(times)]
    return series


def recorded_day() -> dict[str, Values]:
    """The recording, and then its second half again and again: each time the run resumes where it was stopped. Before
    each repetition it waits in the queue, so that the starts are `BETWEEN_STARTS` apart."""
    series = recorded_series()
    up = series[UP]
    stopped = up.index(0)
    resumed = up.index(1, stopped)
    turn = max(len(up) - resumed, BETWEEN_STARTS // SCRAPE)
    newest_checkpoint, step = (series[f"{name}{RUN}"] for name in ("training_last_checkpoint_step", "training_step"))
    from_step = next(value for value in newest_checkpoint[resumed:] if value)
    # The step after the last scrape is saved, too.
    steps = 1 + max(value or 0 for value in step) - from_step

    def repeated(name: str, recorded: list[float | None]) -> Values:
        metric = name.partition("{")[0]

        def value(second: int) -> float | str:
            number, repetition = second // SCRAPE, 0
            if number >= resumed:
                repetition, place = divmod(number - resumed, turn)
                number = min(resumed + place, len(recorded) - 1)
            found = recorded[number]
            if found is None:
                return "stale"
            if metric.endswith("_timestamp_seconds"):
                return found + repetition * turn * SCRAPE
            # A process that has not loaded its checkpoint yet exports step 0.
            return found + repetition * steps if metric in POSITIONS and found else found

        return value

    read = {word for rule in RULES for word in re.findall(r"\w+", rule["expr"])}
    return {name: repeated(name, values) for name, values in series.items() if name.partition("{")[0] in read}


def test_the_recording_has_what_the_alerts_of_runs_read():
    groups = [group for group in GROUPS if group["name"] in ("training", "checkpoints", "experts")]
    text = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    read = set(re.findall(r"\b(?:up|(?:training|expert|dead|nccl)_\w+)\b", text))
    recorded = {name.partition("{")[0] for name in RECORDING["glm46"]}
    assert read - recorded == {"training_memory_peak_ratio"}  # of GPUs; the made-up day has it


def made_up_day() -> dict[str, Values]:
    """Series that a machine without GPUs does not have, made up: GPUs near their limits, which pause for five minutes
    of validation in each second hour, a disk on which large checkpoints come and go, and a clock that is kept."""

    def works(second: int) -> bool:
        return second % (2 * HOUR) < 2 * HOUR - 300

    return {
        f"DCGM_FI_DEV_GPU_TEMP{GPU}": lambda second: 60 + 20 * works(second),
        f"DCGM_FI_DEV_MEMORY_TEMP{GPU}": lambda second: 70 + 20 * works(second),
        f"DCGM_FI_DEV_FB_USED{GPU}": always(77_000),
        f"DCGM_FI_DEV_FB_FREE{GPU}": always(2_500),
        f"DCGM_FI_DEV_FB_RESERVED{GPU}": always(500),
        f'DCGM_EXP_CLOCK_EVENTS_COUNT{GPU[:-1]}, clock_event="sw_power_cap"}}': always(30),
        f"DCGM_FI_DEV_ROW_REMAP_FAILURE{GPU}": always(0),
        f'DCGM_EXP_XID_ERRORS_COUNT{GPU[:-1]}, xid="0"}}': always(0),
        f"up{GPU}": always(1),
        f'training_memory_peak_ratio{RUN[:-1]}, ranks="max"}}': always(0.95),
        f'training_extreme_rank{RUN[:-1]}, figure="memory_peak_ratio/max"}}': always(3),
        f'training_gpu_temperature_celsius{RUN[:-1]}, ranks="max"}}': lambda second: 60 + 20 * works(second),
        f"node_filesystem_avail_bytes{NODE}": lambda second: 1e12 - 2e11 * (second % HOUR) / HOUR,
        f"node_filesystem_size_bytes{NODE}": always(1.1e12),
        f"node_timex_sync_status{NODE}": always(1),
    }


def changes(values: Values) -> int:
    """What promtool computes of a series of the recorded day."""
    found = [value for second in range(0, DAY + 1, SCRAPE) if (value := values(second)) != "stale"]
    return sum(a != b for a, b in itertools.pairwise(found))


@needs_promtool
@pytest.mark.slow
def test_no_alert_fires_on_a_recorded_day_and_on_a_made_up_day_of_gpus(tmp_path):
    recorded, start = recorded_day(), f"training_start_timestamp_seconds{RUN}"
    days = {"recorded": (recorded, SCRAPE, start), "made_up": (made_up_day(), 30, f"DCGM_FI_DEV_GPU_TEMP{GPU}")}
    # Nothing keeps the clock of the recorded machine, and the alert says so.
    expected = {"recorded": ["ClockUnsynchronised"], "made_up": []}
    files = []
    for name, (series, every, witness) in days.items():
        metric, labels = re.fullmatch(r"(\w+)(.*)", witness).groups()
        fired = f'group by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{DAY}s]))'
        known = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in expected[name]]
        seen = {"labels": labels, "value": changes(series[witness])}
        checks = [
            {"expr": fired, "eval_time": f"{DAY}s", "exp_samples": known},
            # The day has arrived: promtool sees all starts.
            {"expr": f"changes({metric}[{DAY}s])", "eval_time": f"{DAY}s", "exp_samples": [seen]},
        ]
        day = [entry(series, DAY, every, checks)]
        files.append(write_tests(tmp_path / f"{name}.yml", FOLDER / "alerts.yml", every, day))
    assert changes(recorded[start]) > 40
    run_promtool(*files)


@needs_promtool
def test_promtool_and_amtool_accept_the_files():
    for command in (["check", "config", "prometheus.yml"], ["check", "rules", "--lint-fatal", "alerts.yml"]):
        done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    if shutil.which("amtool"):
        command = ["amtool", "check-config", "alertmanager.yml"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
