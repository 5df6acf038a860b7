"""Metrics of a run for Prometheus, served by the first rank.

`Observers` sets values at each step and change of phase, and `Report` calls `row`; a scrape reads them in a thread of
the server, without a cost for training.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm46.engine.observe.metrics import METRICS, exported_name, find_metric, split_column
from glm46.engine.training.observer import Phase

ADDRESS = "127.0.0.1"
"""Address of the endpoint, which is reachable from the same machine only."""
_MAX_SERIES_OF_METRIC = 16
"""Each series, such as one per source, costs memory in Prometheus. metrics.jsonl has all."""
_LAST_SCRAPE_SECONDS = 10.0
"""Maximum wait at the end of a run for a scrape of its last phase: two intervals of the shipped Prometheus config."""
_BASE_UNITS = {"GiB": ("bytes", 2.0**30), "TFLOP/s": ("FLOP/s", 1e12)}
"""Prometheus's unit for a unit of `METRICS`, and the factor between them."""

_GAUGES = {
    "training_step": "Optimizer steps since the start of the run; falls when a run resumes.",
    "training_tokens": "Tokens since the start of the run.",
    "training_tokens_budget": "Tokens at which the run ends.",
    "training_last_step_timestamp_seconds": "Time of the last step or change of phase, since 1970 in UTC.",
    "training_start_timestamp_seconds": "Start of the process of the first rank, since 1970.",
    "training_last_checkpoint_step": "Step of the newest checkpoint; 0 if there is none.",
    "training_last_checkpoint_timestamp_seconds": "Time of the newest checkpoint, or of the start from it, since 1970.",
    "training_checkpoint_interval_steps": "Steps between two checkpoints.",
}
_COUNTERS = {
    "training_steps_total": "Optimizer steps of this process; starts at 0 with each process.",
    "training_tokens_total": "Tokens of this process.",
    "training_skipped_steps_total": "Steps of this process that were skipped: spikes, non-finite.",
    "training_not_finite_steps_total": "Steps skipped because a value was not finite.",
    "training_failed_saves_total": "Checkpoints of this process that could not be saved.",
}
_COLUMNS_WITH_OWN_METRIC = ("step", "tokens", "unix_seconds", "skipped_steps", "failed_saves")
"""Columns of rows that `_GAUGES` and `_COUNTERS` already export, at each step instead of each row."""


class Exporter(Collector):
    """Metrics of a run, served at ``http://127.0.0.1:PORT/metrics``.

    A scrape is answered even while the ranks hang. Counters start at 0 with each process, and Prometheus treats a
    decrease as such a restart; gauges have absolute values. If the port cannot be used, the run continues without an
    endpoint.

    Args:
        run: value of the label ``run``, the name of the dump folder.
        port: None to serve nothing, as on all ranks except the first.
        report: receives one line about the address.
    """

    def __init__(self, run: str, port: int | None, report: Callable[[str], None]):
        now = time.time()
        self._run = run
        self._phase: Phase = "start"
        self._info: dict[str, str] = {}
        # Step and tokens are absent until training begins, because 0 would be a decrease.
        self._values: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self._values["training_start_timestamp_seconds"] = now
        self._values["training_last_step_timestamp_seconds"] = now
        self._row: dict[str, float | None] = {}
        self._scraped_at = 0.0
        self._end_is_scraped = threading.Event()
        self._server = None
        if port is None:
            return
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, ADDRESS, registry)
        except OSError as error:
            reason = error.strerror or error
            report(f"metrics.prometheus_port = {port}: {reason}; this run is not exported, set another port")
        else:
            report(f"metrics      http://{ADDRESS}:{port}/metrics")

    def begins(self, *, step: int, tokens: int, budget: int, save_interval: int | None, info: dict[str, str]) -> None:
        """Record that training begins, or begins again after a rollback, at this step.

        Args:
            budget: tokens at which the run ends.
            save_interval: steps between two checkpoints; None without checkpoints.
            info: labels of ``training_info``.
        """
        self._info = info
        self._values |= {
            "training_step": step,
            "training_tokens": tokens,
            "training_tokens_budget": budget,
            "training_last_checkpoint_step": step,
        }
        if step:
            # When it was saved is not known here: its age on the dashboard counts from now.
            self._values["training_last_checkpoint_timestamp_seconds"] = time.time()
        if save_interval is not None:
            self._values["training_checkpoint_interval_steps"] = save_interval
        self._enter("train")

    def step(self, step: int, tokens: int, *, was_skipped: bool, is_finite: bool, loss: float | None) -> None:
        """Count a step.

        Args:
            tokens: tokens since the start of the run.
            is_finite: True if loss and gradient are finite.
            loss: mean loss of the step; None to export only the loss in rows.
        """
        values = self._values
        values["training_tokens_total"] += tokens - values.get("training_tokens", 0)
        values["training_steps_total"] += 1
        values["training_skipped_steps_total"] += was_skipped
        values["training_not_finite_steps_total"] += not is_finite
        values["training_step"] = step
        values["training_tokens"] = tokens
        if loss is not None:
            self._row["loss"] = loss
        self._touch()

    def row(self, row: Mapping[str, float | None]) -> None:
        """Store the values of a row of metrics; a value that was not finite is None."""
        self._row |= row

    def saved(self, step: int) -> None:
        """Record that the checkpoint of a step is complete."""
        self._values["training_last_checkpoint_step"] = step
        self._values["training_last_checkpoint_timestamp_seconds"] = time.time()

    def save_failed(self) -> None:
        """Record that a checkpoint could not be saved."""
        self._values["training_failed_saves_total"] += 1

    def stops(self) -> None:
        """Record that no further step follows."""
        self._enter("stop")

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Set the phase inside this context. If the context ends with an error, the phase remains."""
        previous = self._phase
        self._enter(phase)
        yield
        self._enter(previous)

    def close(self, *, has_failed: bool) -> None:
        """Stop serving. At a regular end, wait until Prometheus has read the phase ``stop``, if it scrapes this run:
        it raises an alert when a run vanishes in any other phase."""
        if self._server is None:
            return
        if not has_failed:
            self._enter("stop")
            is_scraped_regularly = time.time() - self._scraped_at < _LAST_SCRAPE_SECONDS
            if is_scraped_regularly:
                self._end_is_scraped.wait(_LAST_SCRAPE_SECONDS)
        self._server.shutdown()
        self._server.server_close()
        self._server = None

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if phase != "stop":
            # The last save follows the end of the steps, so phase `save` may follow `stop`: `close` must wait again.
            self._end_is_scraped.clear()
        self._touch()

    def _touch(self) -> None:
        self._values["training_last_step_timestamp_seconds"] = time.time()

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        self._scraped_at = time.time()
        phase = self._phase
        values = dict(self._values)
        for name, meaning in _COUNTERS.items():
            counter = CounterMetricFamily(name, meaning, labels=["run"])
            counter.add_metric([self._run], values[name])
            yield counter
        for name, meaning in _GAUGES.items():
            if name in values:
                yield self._gauge(name, meaning, [({}, values[name])])
        phases = [({"phase": name}, float(name == phase)) for name in get_args(Phase)]
        yield self._gauge("training_phase", "1 for the phase of the first rank, else 0.", phases)
        if self._info:
            yield self._gauge("training_info", "1; the labels say which run this is.", [(self._info, 1.0)])
        yield from self._row_gauges(dict(self._row))
        if phase == "stop":
            self._end_is_scraped.set()

    def _gauge(self, name: str, meaning: str, samples: list[tuple[dict[str, str], float]]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, meaning)
        for labels, value in samples:
            family.add_sample(name, {"run": self._run} | labels, value)
        return family

    def _row_gauges(self, columns: Mapping[str, float | None]) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for column, value in columns.items():
            name, part = split_column(column)
            if name in _COLUMNS_WITH_OWN_METRIC:
                continue
            metric = find_metric(column)
            exported = exported_name(name)
            unit, factor = _BASE_UNITS.get(metric.unit, (metric.unit, 1.0))
            family = families.setdefault(exported, self._gauge(exported, f"{metric.meaning} [{unit}]", []))
            if len(family.samples) == _MAX_SERIES_OF_METRIC:
                continue
            labels = {"run": self._run}
            if part:
                labels[metric.part_label] = part
            # A value that was not finite is None in a row. Export NaN: the last finite value would hide it.
            family.add_sample(exported, labels, float("nan") if value is None else value * factor)
        yield from families.values()


def exported_names() -> frozenset[str]:
    """Return all names that a run can export, for the tests of dashboards and alerts."""
    columns = (exported_name(metric.name) for metric in METRICS if metric.name not in _COLUMNS_WITH_OWN_METRIC)
    return frozenset({*columns, *_GAUGES, *_COUNTERS, "training_phase", "training_info"})
