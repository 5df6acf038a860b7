"""Checks of the files that a run reads and writes at its start, before its ranks start or torch is imported."""

from pathlib import Path

from glm46.config.command_line import Start
from glm46.config.errors import UserError
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.run_lock import refuse_locked, refuse_unwritable
from glm46.engine.training.origin import refuse_origin
from glm46.operate.launch.rl_start import refuse_rl
from glm46.tasks.weights.start_folders import refuse_weights


def refuse_start(config: RunConfig, typed: Start) -> None:
    """Raise the faults of the run's folders that every rank would raise at its start. If another shipped run
    makes the missing weights, the fault has its command.

    Raises:
        UserError: a folder cannot be used, or is in use.
    """
    try:
        refuse_origin(config)
        refuse_weights(config)
    except UserError as error:
        path = config.checkpoint.initial_load_path
        maker = None if path is None or Path(path).exists() else typed.command_that_makes(Path(path))
        hint = f"; this one is made by: {maker}" if maker else ""
        raise UserError(*(fault + hint for fault in error.faults)) from error
    for key, folder in {"job.dump_folder": Path(config.job.dump_folder), **config.folders_apart}.items():
        refuse_unwritable(folder, key)
    refuse_locked(Path(config.job.dump_folder), config.folders_apart)
    if config.rl is not None:
        refuse_rl(config.rl.resolved(), config.rollout)
