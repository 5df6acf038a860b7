"""Checks of the checkpoint that a run starts from, before any process group exists."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.run_lock import outer_run
from glm46.engine.training.saved_config import CONTINUE_REMEDY, SHAPE_KEYS, differences, saved_run
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.integrity import published_steps, quick_faults, step_folder, step_of
from glm46.storage.checkpoint.store_mirror import refresh_mirror


def refuse_origin(config: RunConfig) -> None:
    """Check the checkpoint that a run would start from, and the folders that it writes to. Needs no process group and
    writes nothing, except the mirror of an object store.

    Raises:
        UserError: the folder is missing, or of another kind or model.
    """
    checkpoint = config.checkpoint
    folder = config.checkpoint_folder
    if checkpoint.enable and config.checkpoint_url is not None:
        try:
            refresh_mirror(config.checkpoint_url, folder)
        except OSError as error:
            raise UserError(
                f"checkpoint.folder = {checkpoint.folder!r}: cannot be read: {error.strerror}; set the variables of "
                "the provider, or another folder"
            ) from error
    if checkpoint.enable and folder.exists() and not folder.is_dir():
        raise UserError(
            f"checkpoint.folder = {checkpoint.folder!r}: {folder} is a file; move it away, or name another folder"
        )
    saved_steps = published_steps(folder) if checkpoint.enable else []
    _refuse_folders_of_others(config, saved_steps)
    if checkpoint.enable and checkpoint.load_step != -1:
        if checkpoint.load_step not in saved_steps:
            steps = ", ".join(map(str, saved_steps)) or "none"
            raise UserError(
                f"checkpoint.load_step = {checkpoint.load_step}: no such checkpoint in {folder}; steps there: {steps}; "
                "give one of them, or -1 for the newest"
            )
        return  # load_path is for a run without checkpoints of its own
    if checkpoint.load_folder is not None and not has_checkpoint(config):
        _refuse_continued(config, checkpoint.load_folder)


def has_checkpoint(config: RunConfig) -> bool:
    """Return whether a start resumes from a checkpoint of its own folder, or of the local disks of its nodes."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return False
    local = config.staging_folder
    has_local = local is not None and any(local.rglob("step-*"))  # not gathered yet
    return checkpoint.load_step != -1 or bool(published_steps(config.checkpoint_folder)) or has_local


def _refuse_folders_of_others(config: RunConfig, saved: Sequence[int]) -> None:
    dump_folder = Path(config.job.dump_folder)
    for key, folder in config.folders_apart.items():
        if other := outer_run(folder, dump_folder):
            raise UserError(f"{key} = {str(folder)!r}: lies in the folder of the run in {other}; name another folder")
    is_apart = "checkpoint.folder" in config.folders_apart or config.checkpoint_url is not None
    if not saved or not is_apart:
        return
    newest = step_folder(config.checkpoint_folder, saved[-1])
    owner = None
    with suppress(UserError):  # saved by another version
        owner = saved_run(newest)
    if owner is not None and Path(owner.job.dump_folder).absolute() != dump_folder.absolute():
        raise UserError(
            f"checkpoint.folder = {config.checkpoint.folder!r}: has checkpoints of the run in {owner.job.dump_folder}; "
            f"name another folder, with checkpoint.load_path = {str(newest)!r} to go on from there, or set "
            f"job.dump_folder = {owner.job.dump_folder!r}"
        )


def _refuse_continued(config: RunConfig, folder: Path) -> None:
    """Raise the faults of `checkpoint.load_path` that can be found without reading its tensors."""
    key = f"checkpoint.load_path = {config.checkpoint.load_path!r}"
    if step_of(folder) is None or not folder.is_dir():
        steps = published_steps(folder) or published_steps(folder.parent)
        parent = folder if published_steps(folder) else folder.parent
        steps_note = f"; {parent} has steps {', '.join(map(str, steps))}" if steps else ""
        reason = "not a step folder" if folder.exists() else "no such folder"
        if kind_of(folder) is Kind.DCP:
            raise UserError(f"{key}: this is {Kind.DCP.value}; give it as checkpoint.initial_load_path")
        raise UserError(f"{key}: {reason}{steps_note}; give one such as {step_folder(parent, max(steps, default=100))}")
    if faults := quick_faults(folder, step_of(folder))[1]:
        remedy = "restore what is missing, or give another step folder"
        raise UserError(*(f"{key}: {fault}; {remedy}" for fault in faults))
    if changed := differences(SHAPE_KEYS, config, folder):
        raise UserError(*(f"{key}: {line}; {CONTINUE_REMEDY}" for line in changed))
