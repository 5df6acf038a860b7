#!/usr/bin/env python
"""What metrics for Prometheus cost: the heartbeat in the first rank, and a scrape in the launcher.

    python scripts/measure/measure_exporter.py

A row has every column of metrics.jsonl at once, with 16 parts of each that has any. Hardware is the least, mean and
largest value of all ranks, so 8,192 ranks have the row of one.
"""

import json
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from glm46.config.checkpoint import MetricsConfig
from glm46.engine.observe.endpoint import Endpoint
from glm46.engine.observe.exporter import RunCollector
from glm46.engine.observe.heartbeat import Heartbeat
from glm46.engine.observe.metrics import METRICS

STEPS, SCRAPES = 5000, 200
STEP_SECONDS, SCRAPE_SECONDS = 1.0, 5.0
"""A short step of a large run, and the shipped interval."""


def write_row(file: Path, step: int) -> None:
    """Append a row with all columns."""
    row: dict[str, float] = {metric.name: 1.25 for metric in METRICS} | {"step": step}
    row |= {f"{metric.name}/{part}": 1.25 for metric in METRICS if metric.per for part in range(16)}
    with file.open("a") as lines:
        lines.write(json.dumps({"kind": "train", **row}) + "\n")


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        beat = Heartbeat(folder, is_main=True)
        beat.begins(step=0, tokens=0, budget=10**12, save_interval=100, info={"layout": "pp=16 dp_shard=64 tp=8"})
        began = time.perf_counter()
        for step in range(1, STEPS + 1):
            with beat.phase("prepare"):
                pass
            beat.step(step, step * 4096, was_skipped=False, is_finite=True, loss=2.5)
        step_seconds = (time.perf_counter() - began) / STEPS
        for step in range(100):
            write_row(folder / "metrics.jsonl", step)
        config = MetricsConfig(prometheus_port=9400, prometheus_sd_folder=name)
        endpoint = Endpoint(config, folder, RunCollector(folder), print)
        url, cpu, wall = f"http://127.0.0.1:{endpoint.port}/metrics", time.process_time(), time.perf_counter()
        for step in range(SCRAPES):
            write_row(folder / "metrics.jsonl", 100 + step)  # as often as there are scrapes
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read()
        cpu, wall = (time.process_time() - cpu) / SCRAPES, (time.perf_counter() - wall) / SCRAPES
        endpoint.close(has_failed=False)
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    print(f"heartbeat  {step_seconds * 1e6:.0f} us in each step: {step_seconds / STEP_SECONDS:.4%} of a step of 1 s")
    print(f"scrape     {wall * 1e3:.1f} ms, {series} series, {len(text) / 1e3:.0f} kB")
    print(f"launcher   {cpu * 1e3:.1f} ms of a core in {SCRAPE_SECONDS:.0f} s: {cpu / SCRAPE_SECONDS:.3%}, with client")
    assert threading.active_count() < 5


if __name__ == "__main__":
    main()
