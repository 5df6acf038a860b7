"""Metrics of a run for Prometheus, read from the files in its dump folder: heartbeat and rows.

The exporter is a thread of the launcher or a process of its own; in a run without launcher it is a thread of a rank. A
scrape costs training nothing and works while ranks hang, crash and start again.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm46.engine.observe.heartbeat import Beat, Phase, read_heartbeat
from glm46.engine.observe.history import ROWS_FILE, read_history, rows_by_kind
from glm46.engine.observe.metrics import METRICS, SPREAD, exported_name, find_metric, split_column

_TAIL_BYTES = 64 * 1024
"""Read of the end of the rows: some dozens. A value of an earlier row, such as of validation, is kept from then."""
_MOST_PARTS = 16
"""Bound on the series of one metric, such as those of sources: Prometheus pays for each one."""

_BASE_UNITS = {"GiB": ("bytes", 2.0**30), "TFLOP/s": ("FLOP/s", 1e12)}
_OF_HEARTBEAT = ("step", "tokens", "unix_seconds", "skipped_steps", "failed_saves")
"""Columns that the heartbeat has newer."""


class _Gauge(NamedTuple):
    name: str
    help: str
    value: str
    """Field of `Beat`."""


_GAUGES = (
    _Gauge("training_step", "Optimizer steps since the start of the run; falls when a run resumes.", "step"),
    _Gauge("training_tokens", "Tokens since the start of the run.", "tokens"),
    _Gauge("training_tokens_budget", "Tokens at which the run ends.", "tokens_budget"),
    _Gauge(
        "training_last_step_timestamp_seconds", "Time of the last step or change of phase, since 1970 in UTC.", "moved"
    ),
    _Gauge("training_start_timestamp_seconds", "Start of the process of the main rank, since 1970.", "started"),
    _Gauge("training_last_checkpoint_step", "Step of the newest checkpoint; 0 if there is none.", "saved_step"),
    _Gauge("training_last_checkpoint_timestamp_seconds", "Time of the newest checkpoint, since 1970.", "saved"),
    _Gauge("training_checkpoint_interval_steps", "Steps between two checkpoints.", "save_interval"),
)
_COUNTERS = (
    _Gauge("training_steps_total", "Optimizer steps of this process; starts at 0 with each process.", "steps_done"),
    _Gauge("training_tokens_total", "Tokens of this process.", "tokens_done"),
    _Gauge("training_skipped_steps_total", "Steps of this process that were skipped: spikes, non-finite.", "skipped"),
    _Gauge("training_not_finite_steps_total", "Steps skipped because a value was not finite.", "not_finite"),
    _Gauge("training_failed_saves_total", "Checkpoints of this process that could not be saved.", "failed_saves"),
)


class RunCollector(Collector):
    """The metrics of one run. A scrape reads the files; if another scrape waits for them, on a disk that does not
    answer, it gives the values of before, so that scrapes never queue.

    Counters start at 0 with each process of the main rank, and Prometheus takes a fall for such a start; gauges have
    absolute positions.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._is_reading = threading.Lock()
        self._beat: Beat | None = None
        self._rows: dict[str, float | None] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._restarts, self._since = 0, 0.0

    def restarted(self, number: int) -> None:
        """The launcher starts the ranks for the n-th time after the first; older heartbeats are not of this start."""
        self._restarts, self._since = number, time.time()

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        if self._is_reading.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._is_reading.release()
        yield CounterMetricFamily(
            "training_restarts_total", "Starts of the ranks by this launcher after the first.", value=self._restarts
        )
        beat = self._beat
        if self._since and (beat is None or beat.started < self._since):
            beat = Beat(started=self._since, moved=self._since)
        if beat is None:
            return
        yield from _of_heartbeat(beat)
        columns = dict(self._rows)
        if beat.loss is not None:
            columns["loss"] = beat.loss
        yield from _of_rows(columns)

    def _read(self) -> None:
        self._beat = read_heartbeat(self._folder) or self._beat
        path = self._folder / ROWS_FILE
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            if stamp == self._stamp:
                return
            # A resume writes the file again: values of rows that it removes must not stay.
            kept = dict(self._rows) if self._stamp and stamp[0] == self._stamp[0] else {}
            for rows in reversed(rows_by_kind(read_history(path, _TAIL_BYTES))):
                for row in rows:
                    kept |= row
            self._rows, self._stamp = kept, stamp
        except OSError:  # not there yet
            return


def _of_heartbeat(beat: Beat) -> Iterator[Metric]:
    for gauge in _GAUGES:
        if (value := getattr(beat, gauge.value)) is not None:
            yield GaugeMetricFamily(gauge.name, gauge.help, value=value)
    for counter in _COUNTERS:
        yield CounterMetricFamily(counter.name, counter.help, value=getattr(beat, counter.value))
    phases = GaugeMetricFamily("training_phase", "1 for the phase of the main rank, else 0.", labels=["phase"])
    for name in get_args(Phase):
        phases.add_metric([name], float(name == beat.phase))
    yield phases
    info = GaugeMetricFamily("training_info", "1; the labels say which run this is.", labels=sorted(beat.info))
    info.add_metric([beat.info[name] for name in sorted(beat.info)], 1.0)
    yield info


def _of_rows(columns: Mapping[str, float | None]) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily] = {}
    for column, value in columns.items():
        name, part = split_column(column)
        try:
            metric = find_metric(column)
        except KeyError:  # such as kind; or of another release
            continue
        if name in _OF_HEARTBEAT:
            continue
        label = "ranks" if metric.per == SPREAD else (metric.per or "network").partition("@")[0]
        exported = exported_name(name)
        unit, factor = _BASE_UNITS.get(metric.unit, (metric.unit, 1.0))
        if exported not in families:
            families[exported] = GaugeMetricFamily(exported, f"{metric.meaning} [{unit}]", labels=[label])
        family = families[exported]
        if len(family.samples) < _MOST_PARTS:
            # A value that was not finite is null in a row: the last finite one would hide it.
            scaled = float("nan") if value is None else value * factor
            family.add_sample(exported, {label: part} if part else {}, scaled)
    yield from families.values()


def exported_names() -> frozenset[str]:
    """All names that a run can export."""
    of_rows = (exported_name(metric.name) for metric in METRICS if metric.name not in _OF_HEARTBEAT)
    of_beats = (entry.name for entry in (*_GAUGES, *_COUNTERS))
    return frozenset({*of_rows, *of_beats, "training_phase", "training_info", "training_restarts_total"})
