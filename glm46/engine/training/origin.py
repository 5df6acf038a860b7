"""Checks of the checkpoint that a run starts from, and the keys whose values differ in a checkpoint."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError
from glm46.config.loader import stored_config
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.run_lock import outer_run
from glm46.files.local_disk import real_path
from glm46.files.regular_file import read_regular
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.integrity import META, published_steps, quick_faults, step_folder, step_of

CONTINUE_REMEDY = "restore it, or take what matches, with new clocks, through checkpoint.initial_load_path instead"
"""Remedy for a difference from the checkpoint of `checkpoint.load_path`."""
INITIAL_REMEDY = "restore it, or exclude what does not match with checkpoint.initial_load_exclude"
"""Remedy for a difference from the step folder of `checkpoint.initial_load_path`."""

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "use_qk_norm",
    "attention_bias",
    "num_nextn_predict_layers",
)
SHAPE_KEYS = (*(f"model.shape.{name}" for name in _SHAPE), "training.dtype")
"""Keys that determine the weights of a checkpoint."""
TENSOR_KEYS = (
    *SHAPE_KEYS,
    "moe.balance",
    "optimizer.name",
    "optimizer.state_dtype",
    "adapter.name",
    "adapter.rank",
    "adapter.expert_rank",
    "adapter.targets",
    "adapter.layers",
)
"""Keys that determine which tensors a checkpoint holds, and their shapes and dtypes."""

_KEYS_SHOWN = 3
"""Number of differing keys to show; if there are more, the folder belongs to another model."""


def refuse_origin(config: RunConfig) -> None:
    """Check the checkpoint that a run would start from, and the folders that it writes to. Needs no process group and
    writes nothing.

    Raises:
        UserError: the folder is missing, or of another kind or model.
    """
    checkpoint = config.checkpoint
    folder = config.checkpoint_folder
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
        return
    if checkpoint.load_path is not None and not has_checkpoint(config):
        _refuse_continued(config, Path(checkpoint.load_path))


def has_checkpoint(config: RunConfig) -> bool:
    """Return whether a start resumes from a checkpoint of its own folder, or of the local disks of its nodes."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return False
    local = Path(checkpoint.node_local_folder) if checkpoint.node_local_folder else None
    is_local = local is not None and any(local.rglob("step-*"))  # not gathered yet
    return checkpoint.load_step != -1 or bool(published_steps(config.checkpoint_folder)) or is_local


def _refuse_folders_of_others(config: RunConfig, saved: Sequence[int]) -> None:
    dump_folder = Path(config.job.dump_folder)
    for key, folder in config.folders_apart.items():
        if other := outer_run(folder, dump_folder):
            raise UserError(f"{key} = {str(folder)!r}: lies in the folder of the run in {other}; name another folder")
    if not saved or "checkpoint.folder" not in config.folders_apart:
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


def _refuse_continued(config: RunConfig, path: Path) -> None:
    """Raise the faults of `checkpoint.load_path` that can be found without reading its tensors."""
    key = f"checkpoint.load_path = {str(path)!r}"
    folder = real_path(path)
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


def saved_run(folder: Path) -> RunConfig | None:
    """Return the configuration of the run that saved a step folder; None if it is missing or cannot be read. Raises
    UserError like `stored_config`."""
    try:
        return stored_config(json.loads(read_regular(folder / META))["config"])
    except UserError as error:
        raise UserError(*(f"{folder}: {fault}" for fault in error.faults)) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def differences(keys: tuple[str, ...], config: RunConfig, folder: Path) -> list[str]:
    """Return a line for each of the first keys whose value differs from the configuration saved in a step folder."""
    saved = saved_run(folder)
    if saved is None:
        return []
    ours = _values(config)
    theirs = _values(saved)
    lines = [
        f"{key} = {_shown(ours.get(key))}: {folder} was saved with {_shown(theirs.get(key))}"
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
        and f"{key}.".startswith(tuple(f"{prefix}." for prefix in keys))  # a key or a table
    ]
    more = len(lines) - _KEYS_SHOWN
    return [*lines[:_KEYS_SHOWN], *([f"more keys that differ from {folder}: {more}"] if more > 0 else [])]


def _values(config: RunConfig) -> Mapping[str, Any]:
    values = dict(_flatten("", config.model_dump()))
    values |= {f"model.shape.{name}": value for name, value in resolve_shape(config.model).model_dump().items()}
    # Sources may move to another path.
    values["data.sources"] = [(source.name, source.weight, source.packing) for source in config.data.sources]
    return values


def _flatten(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _shown(value: object) -> str:
    return "absent" if value is None else json.dumps(value, default=str)
