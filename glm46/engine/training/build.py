"""Builds a job on this rank and trains it, from the first message to the exit code."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from glm46.compute.distributed.environment import (
    launched_local_world_size,
    launched_rank,
    launched_world_size,
    set_variables,
)
from glm46.compute.distributed.mesh import Cluster, build_cluster
from glm46.compute.distributed.process import join, leave, ranks_of_every_host, use_deterministic_kernels
from glm46.compute.distributed.process_control import die_with_parent
from glm46.compute.model.attention_runs import use_attention_kernel
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.config.run_config import RunConfig
from glm46.engine.observe.heartbeat import Heartbeat
from glm46.engine.observe.kept_warnings import KeptWarnings
from glm46.engine.observe.start_times import VARIABLE as START_TIMES
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.run_lock import RunLocks, lock_run, refuse_small_disk, writing
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.reliability.verdict import HANG_FOLDER
from glm46.engine.reliability.watchdog import Watchdog
from glm46.engine.training import resume
from glm46.engine.training.loop import RollbackNeeded, train
from glm46.engine.training.origin import refuse_origin
from glm46.engine.training.services import build_checkpoints, services_of
from glm46.engine.training.task import Task
from glm46.run.plan import Plan, resolve_plan


def run(config: RunConfig, build_task: Callable[[Plan, Cluster], Task], stop: StopRequest | None = None) -> int:
    """Train a task as configured, on this rank. Collective.

    Args:
        build_task: takes the plan and the cluster. Collective.
        stop: created earlier to receive signals from then on; None to create it here.

    Returns:
        See `loop.train`.

    Raises:
        UserError: the config, the data or the checkpoint have faults.
        Diverged: steps or weights went bad.
    """
    die_with_parent()
    times = StartTimes.inherited(set_variables([START_TIMES]))
    stop = stop or StopRequest()
    dump_folder, locks = Path(config.job.dump_folder), RunLocks()
    with ExitStack() as ends:
        if launched_rank() == 0:  # before joining the process group, so that other ranks do not wait for a refused run
            refuse_origin(config)
            refuse_small_disk(resolve_plan(config, launched_world_size() or 1), launched_local_world_size())
            locks = lock_run(dump_folder, config.folders_apart)
            ends.push(lambda kind, *_: locks.close(is_refused=kind is not None and issubclass(kind, UserError)))
        if config.debug.deterministic:
            use_deterministic_kernels()
        warnings = KeptWarnings()
        ends.enter_context(warnings.listening())
        process = join(config.comm.init_timeout_seconds)
        ends.callback(leave)
        with writing(dump_folder):
            watchdog = Watchdog(
                process,
                dump_folder / HANG_FOLDER,
                shortest_seconds=config.comm.hang_seconds,
                start_seconds=config.comm.init_timeout_seconds,
            )
            heartbeat = Heartbeat(dump_folder, is_main=process.is_main)
        try:
            plan = resolve_plan(config, process.world_size, host_ranks=ranks_of_every_host())
            use_attention_kernel(config.model.attention_kernel, plan.shape.head_dim, plan.shape.sliding_window)
            task, checkpoints = build_task(plan, build_cluster(plan, process)), build_checkpoints(plan)
            ends.callback(task.close)
            progress, meta = resume.start(task, checkpoints)

            def write_config() -> None:
                (dump_folder / "config.toml").write_text(dump_config(config), encoding="utf-8")

            def made_again() -> str:
                write_config()
                heartbeat.folder_is_new()
                watchdog.folder_is_new()
                return locks.retake()

            while True:
                try:
                    with (
                        services_of(
                            task, checkpoints, progress, meta, stop, watchdog, heartbeat, times, made_again
                        ) as services,
                        warnings.written(services.report.log),
                    ):
                        if process.is_main:  # not before services: they may refuse the run
                            with writing(dump_folder):
                                write_config()
                        return train(task, services, progress)
                except RollbackNeeded:
                    progress, meta = resume.roll_back(task, checkpoints, progress)
        except RuntimeError:  # of torch.distributed, perhaps
            watchdog.check_store()
            raise
        finally:
            watchdog.close()
            heartbeat.close()
            stop.restore()
