"""Services of a run: observer, metrics, saves, watchdog, stop, spikes, bandwidth."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from glm46.compute.distributed.bandwidth import BandwidthProbe
from glm46.compute.distributed.environment import launched_local_world_size
from glm46.engine.reliability.loss_spikes import SpikeDetector
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.reliability.watchdog import Watchdog
from glm46.engine.training.observer import Observer
from glm46.engine.training.saving import Saver
from glm46.engine.training.state import Progress
from glm46.engine.training.step_metrics import StepMetrics
from glm46.engine.training.task import Task
from glm46.run.plan import Plan
from glm46.storage.checkpoint.manager import CheckpointManager

# Good steps in the median that detects spikes; detection starts after half this number of good steps.
SPIKE_WINDOW = 128


class StepRequests(NamedTuple):
    """Requests of this rank before a step, or the number of ranks with each of them."""

    stop: int
    """A stop signal was received."""
    non_finite: int
    """A save found values that are not finite."""
    saves_fail: int
    """Too many saves in a row have failed."""
    failed: int
    """The batches of the step could not be read."""
    lost_folder: int
    """The dump folder was deleted or renamed."""
    profile: int
    """A user has requested a profile."""


@dataclass(frozen=True)
class Services:
    """Services of a run, since its start or the last rollback."""

    observer: Observer
    metrics: StepMetrics
    saver: Saver
    watchdog: Watchdog
    stop: StopRequest
    spikes: SpikeDetector
    bandwidth: BandwidthProbe

    def requests(self, *, has_failed: bool) -> StepRequests:
        """Return the requests of this rank before a step."""
        return StepRequests(
            stop=self.stop.signal_name is not None,
            non_finite=self.saver.found_non_finite,
            saves_fail=self.saver.must_end,
            failed=has_failed,
            lost_folder=self.observer.has_lost_folder(),
            profile=self.observer.requests_profile(),
        )


def build_checkpoints(plan: Plan) -> CheckpointManager:
    """Build the checkpoint manager of a run."""
    config = plan.config.checkpoint
    return CheckpointManager(
        plan.config.checkpoint_folder,
        keep_latest_k=config.keep_latest_k,
        keep_every=config.keep_every,
        keep_best_k=config.keep_best_k,
        node_local_folder=plan.config.staging_folder,
        store_url=plan.config.checkpoint_url,
    )


@contextmanager
def services_of(
    task: Task,
    checkpoints: CheckpointManager,
    progress: Progress,
    meta: dict[str, Any] | None,
    stop: StopRequest,
    watchdog: Watchdog,
    observer: Observer,
) -> Iterator[Services]:
    """Yield the services of a run that continues from `progress`. Removes metrics of later steps from the files.
    Collective.

    Args:
        meta: metadata of the checkpoint that was loaded, if any.
    """
    config = task.plan.config
    sigmas = config.training.spike_sigmas if task.has_loss_level else 0.0
    spikes = SpikeDetector(sigmas, SPIKE_WINDOW)
    if meta is not None and progress.step:  # not in a new run that has loaded weights
        spikes.restore(meta["spikes"])
    with observer.training(task, progress, meta, resumed_step=checkpoints.loaded_step):
        yield Services(
            observer=observer,
            metrics=StepMetrics(task),
            saver=Saver(task, checkpoints, observer, spikes),
            watchdog=watchdog,
            stop=stop,
            spikes=spikes,
            bandwidth=BandwidthProbe(task.cluster, config.comm.bandwidth_interval, launched_local_world_size()),
        )
