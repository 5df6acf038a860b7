"""All outputs of a run as one observer: console, files, TensorBoard, exporter, tracker, profiles, hardware metrics."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from glm46.compute.distributed.environment import launched_rank, variables_that_are_set
from glm46.config.checkpoint import MetricsConfig
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.engine.observe.exporter import Exporter
from glm46.engine.observe.hardware import HardwareMonitor, device_peak_flops
from glm46.engine.observe.identity import identity
from glm46.engine.observe.introduction import introduction
from glm46.engine.observe.kept_warnings import KeptWarnings
from glm46.engine.observe.metrics import METRICS, SPREAD
from glm46.engine.observe.module_flops import OPTIMIZER, flops_by_kind, names_of_depths
from glm46.engine.observe.profiler import Profiled, Profiler
from glm46.engine.observe.rank_spread import spread_over_ranks
from glm46.engine.observe.report import Report
from glm46.engine.observe.start_times import VARIABLE as START_TIMES
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.observe.tracker import Tracker
from glm46.engine.reliability.run_lock import writing
from glm46.engine.reliability.stop import EXIT_STOPPED
from glm46.engine.training.observer import Phase, RowKind
from glm46.engine.training.state import Progress
from glm46.engine.training.task import Task, trained_networks

_RANK_COLUMNS = tuple(metric.name for metric in METRICS if metric.per == SPREAD)


@contextmanager
def observing(folder: Path, metrics: MetricsConfig) -> Iterator["Observers"]:
    """Yield the observer of a run on this rank. Stores the warnings of all modules, and serves metrics on the first
    rank if a port is configured.

    Args:
        folder: job.dump_folder.
    """
    times = StartTimes.inherited(variables_that_are_set([START_TIMES]))
    warnings = KeptWarnings()
    port = metrics.prometheus_port if launched_rank() == 0 else None
    exporter = Exporter(folder.name, port, partial(print, flush=True))
    has_failed = True
    try:
        with warnings.listening():
            yield Observers(folder, exporter, warnings, times)
        has_failed = False
    except UserError as error:
        has_failed = error.exit_code not in (UserError.exit_code, EXIT_STOPPED)
        raise
    finally:
        exporter.close(has_failed=has_failed)


class Observers:
    """All outputs of a run; see `Observer`. Report, profiler and hardware monitor exist inside `training`."""

    _report: Report
    _profiler: Profiler
    _hardware: HardwareMonitor
    _peak_flops: float | None

    def __init__(self, folder: Path, exporter: Exporter, warnings: KeptWarnings, times: StartTimes):
        self._folder = folder
        self._exporter = exporter
        self._warnings = warnings
        self._times = times

    @contextmanager
    def training(
        self, task: Task, progress: Progress, meta: dict[str, Any] | None, *, resumed_step: int | None
    ) -> Iterator[None]:
        """See `Observer.training`."""
        first_message = introduction(task, progress, meta, is_own=resumed_step is not None)
        config = task.plan.config
        process = task.cluster.process
        compute_type = getattr(torch, config.training.mixed_precision_param)
        self._hardware = HardwareMonitor(task.cluster.device)
        self._peak_flops = device_peak_flops(task.cluster.device, compute_type)
        with writing(self._folder, config.folders_apart):
            self._report = Report(
                self._folder,
                is_main=process.is_main,
                tensorboard_folder=config.tensorboard_folder if config.metrics.enable_tensorboard else None,
                total_tokens=task.plan.budget_tokens,
                resumed_step=resumed_step,
                tracker=_tracker(task, is_new=resumed_step is None) if process.is_main else None,
                exporter=self._exporter,
            )
        report = self._report
        try:
            report.config(dump_config(config))
            report.message(first_message)
            say = report.message if process.is_main else partial(print, f"rank {process.rank}:", flush=True)
            self._profiler = Profiler(config.profiling, self._folder, _profiled(task), say)
            self._exporter.begins(
                step=progress.step,
                tokens=progress.tokens,
                budget=task.plan.budget_tokens,
                save_interval=config.checkpoint.interval if config.checkpoint.enable else None,
                info=identity(task) if process.is_main else {},
            )
            with self._profiler, self._warnings.written(report.log):
                yield
        except UserError as error:
            report.log("\n".join(error.faults))
            raise
        finally:
            report.close()

    def message(self, text: str) -> None:
        """See `Observer.message`."""
        self._report.message(text)

    def log(self, text: str) -> None:
        """See `Observer.log`."""
        self._report.log(text)

    def row(self, kind: RowKind, row: Mapping[str, float]) -> None:
        """See `Observer.row`. Adds hardware metrics of all ranks and MFU to training rows."""
        if kind == "step":
            self._report.step(row)
        elif kind == "validation":
            self._report.validation(row)
        else:
            columns = spread_over_ranks(self._hardware.read(), _RANK_COLUMNS)
            if self._peak_flops is not None:
                columns["mfu"] = row["tflops_per_device"] * 1e12 / self._peak_flops
            self._report.train({**row, **columns})

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """See `Observer.phase`."""
        return self._exporter.phase(phase)

    def step_begins(self, step: int) -> None:
        """See `Observer.step_begins`."""
        self._profiler.step_begins(step)

    def requests_profile(self) -> bool:
        """See `Observer.requests_profile`."""
        return self._profiler.is_requested()

    def profile_after(self, step: int) -> None:
        """See `Observer.profile_after`."""
        self._profiler.record_after(step)

    def step_trained(self, step: int, tokens: int, *, was_skipped: bool, is_finite: bool, loss: float | None) -> None:
        """See `Observer.step_trained`. After the first step it reports the duration of the start."""
        self._exporter.step(step, tokens, was_skipped=was_skipped, is_finite=is_finite, loss=loss)
        if line := self._times.first_step():
            self.message(line)

    def step_ends(self, step: int, tokens: int, half_pairs: int) -> None:
        """See `Observer.step_ends`."""
        self._profiler.step_ends(step, tokens, half_pairs)

    def steps_end(self) -> None:
        """See `Observer.steps_end`."""
        self._report.close_bar()
        self._profiler.drop()
        self._exporter.stops()

    def saved(self, step: int) -> None:
        """See `Observer.saved`."""
        self._exporter.saved(step)

    def save_failed(self) -> None:
        """See `Observer.save_failed`."""
        self._exporter.save_failed()

    def has_lost_folder(self) -> bool:
        """See `Observer.has_lost_folder`."""
        return self._report.has_lost_folder()

    def flush(self) -> None:
        """See `Observer.flush`."""
        self._report.finish_writes()


def _tracker(task: Task, *, is_new: bool) -> Tracker | None:
    config = task.plan.config
    if not config.metrics.enable_wandb:
        return None
    table = config.model_dump(exclude_none=True)
    say = partial(print, flush=True)
    return Tracker(Path(config.job.dump_folder), table, is_new=is_new, report=say)


def _profiled(task: Task) -> Profiled:
    layout = task.plan.layout
    share = layout.world_size // layout.pp  # ranks that share the work on this rank's layers

    def flops(tokens: float, half_pairs: float) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for network in trained_networks(task).values():
            layers = network.shape.num_nextn_predict_layers
            names = names_of_depths([*network.parameters, *network.frozen], layers, network.plan.mtp_depths)
            config = task.plan.config
            kinds = flops_by_kind(
                names,
                network.shape,
                tokens / share,
                half_pairs / share,
                config.adapter,
                only_drafts=config.trains_only_drafts,
            )
            for kind, number in (*kinds.items(), (OPTIMIZER, network.optimizer.muon.flops())):
                sums[kind] += number
        return sums

    return Profiled(
        rank=task.cluster.process.rank,
        device=task.cluster.device,
        flops=flops,
        wait_for_all=lambda: dist.all_reduce(torch.zeros(1)),  # on the CPU: no rank waits for its GPU
    )
