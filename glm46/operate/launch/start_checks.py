"""Checks of the files that a run reads and writes at its start, before its ranks start or torch is imported."""

from pathlib import Path

from glm46.config.command_line import Start
from glm46.config.errors import UserError
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.run_lock import refuse_locked, refuse_small_disk, refuse_unwritable
from glm46.run.plan import Plan, resolve_plan
from glm46.tasks.weights.start_folders import refuse_weights


def refuse_alone(config: RunConfig, typed: Start) -> Plan:
    """Raise the faults of a run of this process alone, and return its plan. Its data must have been prepared.

    Raises:
        UserError: a folder, the disk, the tokenizer or the data has a fault.
    """
    # Imported here: a refusal before this does not need the libraries of the data.
    from glm46.storage.data.corpus import load_text

    plan = resolve_plan(config, 1)
    refuse_small_disk(plan, 1)
    refuse_start(config, typed)
    load_text(plan)
    return plan


def refuse_start(config: RunConfig, typed: Start) -> None:
    """Raise the faults of the run's folders that every rank would raise at its start. If another shipped run
    makes the missing weights, the fault has its command.

    Raises:
        UserError: a folder cannot be used, or is in use.
    """
    from glm46.engine.training.origin import refuse_origin

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
        from glm46.operate.launch.rl_start import refuse_rl

        refuse_rl(config.rl.resolved())
