"""Services of a run: report, metrics, saves, watchdog, heartbeat, stop, spikes, stragglers, profiles."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.bandwidth import BandwidthProbe
from glm46.compute.distributed.device_time import OwnDeviceTime
from glm46.compute.distributed.environment import launched_local_world_size
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.engine.observe.heartbeat import Heartbeat
from glm46.engine.observe.module_times import flops_by_kind
from glm46.engine.observe.profiler import Profiled, Profiler
from glm46.engine.observe.report import Report
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.observe.tracker import Tracker
from glm46.engine.reliability.loss_spikes import SpikeDetector
from glm46.engine.reliability.run_lock import writing
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.reliability.stragglers import Stragglers
from glm46.engine.reliability.watchdog import Watchdog
from glm46.engine.training.saving import Saver
from glm46.engine.training.state import Progress
from glm46.engine.training.step_metrics import StepMetrics, start_report
from glm46.engine.training.task import Task, trained_networks
from glm46.run.plan import Plan
from glm46.storage.checkpoint.manager import CheckpointManager

# Good steps in the median that finds spikes; no step is one before half as many good steps.
SPIKE_WINDOW = 128


@dataclass(frozen=True)
class Services:
    """The services of a run from its start, or from a rollback, on."""

    report: Report
    metrics: StepMetrics
    saver: Saver
    watchdog: Watchdog
    heartbeat: Heartbeat
    stop: StopRequest
    spikes: SpikeDetector
    stragglers: Stragglers
    profiler: Profiler
    bandwidth: BandwidthProbe
    times: StartTimes

    def requests(self, *, has_failed: bool) -> dict[str, Tensor]:
        """The numbers of this rank in the all-reduce before a step, int64."""
        named = {
            "stop": self.stop.signal_name is not None,
            "non_finite": self.saver.found_non_finite,
            "unsaved": self.saver.must_end,
            "errors": has_failed,
            "profile": self.profiler.is_requested(),
            "paces": self.stragglers.shared_paces(),
        }
        return {name: torch.tensor(value, dtype=torch.int64) for name, value in named.items()}


def build_checkpoints(plan: Plan) -> CheckpointManager:
    """The checkpoints of a run."""
    config = plan.config.checkpoint
    return CheckpointManager(
        plan.config.checkpoint_folder,
        keep_latest_k=config.keep_latest_k,
        keep_every=config.keep_every,
        keep_best_k=config.keep_best_k,
        node_local_folder=Path(config.node_local_folder) if config.node_local_folder else None,
    )


@contextmanager
def services_of(
    task: Task,
    checkpoints: CheckpointManager,
    progress: Progress,
    meta: dict[str, Any] | None,
    stop: StopRequest,
    watchdog: Watchdog,
    heartbeat: Heartbeat,
    times: StartTimes,
    on_deleted: Callable[[], str],
) -> Iterator[Services]:
    """The services of a run that continues from this progress. Metrics of later steps are removed from the files.
    Collective.

    Args:
        meta: metadata of the checkpoint that was loaded, if any.
        times: of this start, reported after its first step.
        on_deleted: see `Report`.
    """
    config, process = task.plan.config, task.cluster.process
    folder = Path(config.job.dump_folder)
    with writing(folder, config.folders_apart):
        report = Report(
            folder,
            is_main=process.is_main,
            tensorboard_folder=config.tensorboard_folder if config.metrics.enable_tensorboard else None,
            total_tokens=task.plan.budget_tokens,
            resumed_step=checkpoints.loaded_step,
            tracker=_tracker(task, is_new=checkpoints.loaded_step is None) if process.is_main else None,
            on_deleted=on_deleted,
        )
    try:
        report.config(dump_config(config))
        report.message(start_report(task, progress, meta, is_own=checkpoints.loaded_step is not None))
        sigmas = config.training.spike_sigmas if task.has_loss_level else 0.0
        spikes = SpikeDetector(sigmas, SPIKE_WINDOW)
        if meta is not None and progress.step:
            spikes.restore(meta["spikes"])
        say = report.message if process.is_main else partial(print, f"rank {process.rank}:", flush=True)
        with Profiler(config.profiling, folder, _profiled(task), say) as profiler:
            yield Services(
                report=report,
                metrics=StepMetrics(task),
                saver=Saver(task, checkpoints, report, progress, spikes, heartbeat),
                watchdog=watchdog,
                heartbeat=heartbeat,
                stop=stop,
                spikes=spikes,
                stragglers=Stragglers(process.rank, process.world_size, task.plan.layout.pp, _device_time(task)),
                profiler=profiler,
                bandwidth=BandwidthProbe(task.cluster, config.comm.bandwidth_interval, launched_local_world_size()),
                times=times,
            )
    except UserError as error:
        report.log("\n".join(error.faults))
        raise
    finally:
        report.close()


def _tracker(task: Task, *, is_new: bool) -> Tracker | None:
    config = task.plan.config
    if config.metrics.tracker is None:
        return None
    table, say = config.model_dump(exclude_none=True), partial(print, flush=True)
    return Tracker(config.metrics, Path(config.job.dump_folder), table, is_new=is_new, report=say)


def _device_time(task: Task) -> OwnDeviceTime | None:
    """The timer of the layers of the main network on a GPU."""
    if task.cluster.device.type != "cuda" or task.cluster.process.world_size == 1:
        return None
    models = next(iter(task.networks.values())).models
    layers = [layer for model in models for layer in (*model.layers.values(), *model.mtp.values())]
    return OwnDeviceTime(layers, lambda: torch.cuda.Event(enable_timing=True))


def _profiled(task: Task) -> Profiled:
    main, layout = next(iter(task.networks)), task.plan.layout
    share = layout.world_size // layout.pp  # of the work on this rank's layers

    def flops(tokens: float, half_pairs: float) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for network in trained_networks(task).values():
            names, adapter = [*network.parameters, *network.frozen], task.plan.config.adapter
            kinds = flops_by_kind(names, network.shape, tokens / share, half_pairs / share, adapter)
            for kind, number in (*kinds.items(), ("optimizer", network.optimizer.muon.flops())):
                sums[kind] += number
        return sums

    return Profiled(
        rank=task.cluster.process.rank,
        device=task.cluster.device,
        models=[
            ("" if name == main else f"{name}/", model)
            for name, network in task.networks.items()
            for model in network.models
        ],
        is_compiled=task.plan.config.compile.enable,
        flops=flops,
        wait_for_all=lambda: dist.all_reduce(torch.zeros(1)),  # on the CPU: no rank waits for its GPU
    )
