#!/usr/bin/env python
"""Record what a run and its node export, as input of the test that no alert fires on a normal day.

    python scripts/measure/record_metrics.py --minutes 35 --out tests/unit/engine/observe/recorded_metrics.json

Starts debug.toml on two processes with saves, validation and the bandwidth probe. After a quarter of the time the run
is stopped by SIGTERM and resumed; at the end it is stopped again. Node exporter is
recorded where it is installed. Each step sleeps for 4 s, so that the two ranks take little of a core, and its length
hardly depends on other work.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts.measure.measure_alerts import free_ports, kill_run, start_run  # noqa: E402

SCRAPE_SECONDS = 15
SCRAPES_PER_SAMPLE = 3
"""The shipped Prometheus reads every 5 s. A run that stops serves its last phase until the first scrape of it, for at
most 10 s."""
STEP_SLEEP_SECONDS = 4.0
WAIT_SCRAPES = 4
"""From SIGTERM to the next start, and recorded after the last SIGTERM."""
KEYS = {
    # Short steps, and a budget that the recording does not reach; saves and validation are those of debug.toml.
    "model.shape.num_hidden_layers": 2,
    "training.local_batch_size": 1,
    "training.global_batch_size": 2,
    "training.tokens": 10**7,
    "comm.bandwidth_interval": 50,
}
RUN_METRICS = re.compile(r".*")
NODE_METRICS = re.compile(r"node_(filesystem_(avail|size)_bytes|timex_offset_seconds|timex_sync_status)")

Sample = dict[str, float]
"""Value by series: name with labels."""


def scrape(address: str, kept: re.Pattern[str]) -> Sample | None:
    """The series of an endpoint whose metrics have these names; None if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    series = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            # Devices are of this machine, and of its mounts only the root has the same name everywhere.
            if kept.fullmatch(name) and labels.get("mountpoint", "/") == "/":
                stated = [
                    f"{key}={json.dumps(label)}"
                    for key, label in sorted(labels.items())
                    if key not in ("device", "run")
                ]
                series[f"{name}{{{', '.join(stated)}}}" if stated else name] = value
    return series


def await_sample(address: str, at: float) -> Sample:
    """Series of the run in the newest of the scrapes until this time that was answered, with their ``up``."""
    newest: Sample | None = None
    for remaining in reversed(range(SCRAPES_PER_SAMPLE)):
        next_scrape = at - remaining * SCRAPE_SECONDS / SCRAPES_PER_SAMPLE
        time.sleep(max(next_scrape - time.time(), 0.0))
        newest = scrape(address, RUN_METRICS) or newest
    return {"up": float(newest is not None)} | (newest or {})


def scrape_job(address: str | None, kept: re.Pattern[str]) -> Sample:
    """Series that Prometheus stores of a target, with its ``up``; nothing without a target."""
    if address is None:
        return {}
    series = scrape(address, kept)
    return {"up": float(series is not None)} | (series or {})


def encode(samples: list[Sample], began: float) -> dict[str, list]:
    """Each series as pairs of a value and how often it follows itself; None where it is absent. Times since 1970
    become seconds since the recording began."""
    columns = {}
    for name in sorted({name for sample in samples for name in sample}):
        found = [sample.get(name) for sample in samples]
        if name.endswith("_timestamp_seconds"):
            values = [value and round(value - began, 2) for value in found]
        else:
            values = [value and float(f"{value:.7g}") for value in found]
        columns[name] = [[value, len(list(same))] for value, same in itertools.groupby(values)]
    return columns


def write(out: Path, head: dict[str, object], jobs: dict[str, list[Sample]], began: float) -> None:
    """Write the fixture, a line for each series."""
    texts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for job, samples in jobs.items():
        columns = encode(samples, began)
        lines = [f"  {json.dumps(name)}: {json.dumps(runs, separators=(',', ':'))}" for name, runs in columns.items()]
        texts.append(f"{json.dumps(job)}: {{\n" + ",\n".join(lines) + "\n}")
    out.write_text("{" + ",\n".join(texts) + "}\n", encoding="utf-8")


def processor() -> str:
    """Model of the processor and number of cores."""
    models = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return f"{os.cpu_count()} cores of {models[0] if models else 'an unknown processor'}, torch {version('torch')}"


def start_node_exporter(address: str) -> subprocess.Popen | None:
    """Node exporter with the collectors that the alerts read; None if it is not installed."""
    if (program := shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")) is None:
        return None
    options = ["--collector.disable-defaults", "--collector.filesystem", "--collector.timex"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([program, f"--web.listen-address={address}", *options], **silent)


def record(folder: Path, minutes: float, out: Path) -> None:
    """Record into `out`, which is written anew after each scrape."""
    port, node_port = free_ports(2)
    keys = KEYS | {"metrics.prometheus_port": port}

    def start() -> subprocess.Popen:
        return start_run("recorded", folder, keys, processes=2, sleep_seconds=STEP_SLEEP_SECONDS)

    def expect(*codes: int | None) -> None:
        if (code := run.poll()) not in codes:
            sys.exit(f"the run has ended with code {code}\n{(folder / 'recorded.log').read_text()}")

    node_address = f"127.0.0.1:{node_port}"
    node = start_node_exporter(node_address)
    run = start()
    run_address = f"127.0.0.1:{port}"
    try:
        while scrape(run_address, RUN_METRICS) is None:  # until its data is prepared
            expect(None)
            time.sleep(0.2)
        began = time.time()
        count = round(minutes * 60 / SCRAPE_SECONDS)
        first_stop, last_stop = count // 4, count - WAIT_SCRAPES
        head = {
            "machine": processor(),
            "date": datetime.now(UTC).date().isoformat(),
            "command": f"python scripts/measure/record_metrics.py --minutes {minutes:g}",
            "seconds": SCRAPE_SECONDS,
        }
        jobs: dict[str, list[Sample]] = {"glm46": [], "node": []}
        for number in range(count):
            jobs["glm46"].append(await_sample(run_address, began + number * SCRAPE_SECONDS))
            jobs["node"].append(scrape_job(node_address if node else None, NODE_METRICS))
            write(out, head, jobs, began)
            if number in (first_stop, last_stop):
                expect(None)
                run.send_signal(signal.SIGTERM)
            elif number == first_stop + WAIT_SCRAPES:
                expect(75)
                run = start()
            elif not first_stop < number < first_stop + WAIT_SCRAPES and number < last_stop:
                expect(None)
        expect(75)
    finally:
        kill_run(run)
        if node:
            node.terminate()
            node.wait()


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=35.0, help="length of the recording; at least 8")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.minutes < 8:
        parser.error(f"--minutes {arguments.minutes:g}: must be at least 8, for a save and a validation of each start")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder, arguments.minutes, arguments.out)


if __name__ == "__main__":
    main()
