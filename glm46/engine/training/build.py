"""Construction and training of a job on this rank, from the first message to the exit code."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from glm46.compute.distributed.mesh import Cluster, build_cluster
from glm46.compute.distributed.process import join, leave, ranks_of_every_host, use_deterministic_kernels
from glm46.compute.distributed.process_control import die_with_parent
from glm46.compute.model.attention_runs import use_attention_kernel
from glm46.config.checkpoint import MetricsConfig
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.run_lock import writing
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.reliability.verdict import HANG_FOLDER
from glm46.engine.reliability.watchdog import Watchdog
from glm46.engine.training import resume
from glm46.engine.training.loop import RollbackNeeded, train
from glm46.engine.training.observer import Observer
from glm46.engine.training.outputs import run_outputs
from glm46.engine.training.services import build_checkpoints, services_of
from glm46.engine.training.task import Task
from glm46.engine.training.weight_source import WeightSource
from glm46.run.plan import Plan, resolve_plan

BuildTask = Callable[[Plan, Cluster], Task]
Observe = Callable[[Path, MetricsConfig], AbstractContextManager[Observer]]
"""Function of job.dump_folder and [metrics] that opens the observer of a run on this rank."""


def run(
    config: RunConfig,
    build_task: BuildTask,
    weights: WeightSource,
    observe: Observe,
    stop: StopRequest | None = None,
) -> int:
    """Train a task as configured, on this rank. Collective.

    Args:
        build_task: function of the plan and the cluster. Collective.
        weights: reads and writes weights of other programs.
        observe: function that opens the observer; see `glm46.engine.observe.observers`.
        stop: created earlier by a caller that wants to catch signals before this call; None to create it here.

    Returns:
        See `loop.train`.

    Raises:
        UserError: the config, the data or the checkpoint have faults.
        Diverged: steps failed, or weights are not finite, and no rollback is possible.
    """
    die_with_parent()
    stop = stop or StopRequest()
    with ExitStack() as ends:
        observer = ends.enter_context(observe(Path(config.job.dump_folder), config.metrics))
        outputs = ends.enter_context(run_outputs(config, weights))
        if config.debug.deterministic:
            use_deterministic_kernels()
        process = join(config.comm.init_timeout_seconds)
        ends.callback(leave)
        with writing(outputs.folder):  # the watchdog opens a file there
            watchdog = Watchdog(
                process,
                outputs.folder / HANG_FOLDER,
                shortest_seconds=config.comm.hang_seconds,
                start_seconds=config.comm.init_timeout_seconds,
            )
        try:
            plan = resolve_plan(config, process.world_size, host_ranks=ranks_of_every_host())
            use_attention_kernel(config.model.attention_kernel, plan.shape.head_dim, plan.shape.sliding_window)
            task = build_task(plan, build_cluster(plan, process))
            checkpoints = build_checkpoints(plan)
            ends.callback(task.close)
            ends.callback(checkpoints.release)
            progress, meta = resume.start(task, checkpoints, weights)
            while True:
                try:
                    with services_of(task, checkpoints, progress, meta, stop, watchdog, observer) as services:
                        if process.is_main:  # only after services_of, which may refuse the run
                            outputs.write_config()
                        return train(task, services, progress, weights)
                except RollbackNeeded:
                    with watchdog.unwatched("going back to an earlier checkpoint"):
                        progress, meta = resume.roll_back(task, checkpoints, progress)
        except RuntimeError:  # perhaps from torch.distributed after the store was lost
            watchdog.check_store()  # then ends the process, with the exit code of a hang
            raise
        finally:
            watchdog.close()
            stop.restore()
