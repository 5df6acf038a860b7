"""Checks of the checkpoint or weights that a run starts from, and the keys in which a checkpoint differs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli

from glm46.checkpoint.integrity import META, published_steps
from glm46.config.errors import UserError
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.config.validation import validate_table

_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "first_k_dense_replace", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_attention_heads", "num_key_value_heads",
    "head_dim", "use_qk_norm", "attention_bias", "num_nextn_predict_layers",
)  # fmt: skip
TENSOR_KEYS = (
    *(f"model.{name}" for name in _SHAPE), "training.dtype", "moe.balance", "optimizer.name", "optimizer.router",
    "optimizer.lm_head", "optimizer.state_dtype",
)  # fmt: skip
"""Keys that determine which tensors a checkpoint holds, and their shapes and dtypes."""


def refuse_origin(config: RunConfig) -> None:
    """Check the checkpoint or weights that a run would start from. Needs no process group and writes nothing.

    Raises:
        UserError: they are missing, or of another kind or model.
    """
    checkpoint, folder = config.checkpoint, Path(config.job.dump_folder) / config.checkpoint.folder
    if checkpoint.enable and folder.exists() and not folder.is_dir():
        raise UserError(
            f"checkpoint.folder = {checkpoint.folder!r}: {folder} is a file; move it away, or name another folder"
        )
    saved = published_steps(folder) if checkpoint.enable else []
    if checkpoint.enable and checkpoint.load_step != -1:
        if checkpoint.load_step not in saved:
            there = ", ".join(map(str, saved)) or "none"
            raise UserError(
                f"checkpoint.load_step = {checkpoint.load_step}: no such checkpoint in {folder}; steps there: {there}; "
                "give one of them, or -1 for the newest"
            )
        return
    local = Path(checkpoint.node_local_folder) if checkpoint.node_local_folder else None
    is_local = local is not None and any(local.rglob("step-*"))  # not gathered yet
    if not saved and not is_local and checkpoint.initial_load_path is not None:
        _refuse_initial(config, Path(checkpoint.initial_load_path))


def _refuse_initial(config: RunConfig, path: Path) -> None:
    key, in_hf = f"checkpoint.initial_load_path = {str(path)!r}", config.checkpoint.initial_load_in_hf
    if not path.is_dir():
        raise UserError(f"{key}: no such folder; give a {'Hugging Face' if in_hf else 'step'} folder")
    if in_hf:
        from glm46.huggingface.import_weights import check_folder  # imports torch, which the other checks do not need

        try:
            check_folder(path, resolve_shape(config.model))
        except UserError as error:
            raise UserError(*(f"{key}: {fault}" for fault in error.faults)) from error
        return
    if not path.resolve().name.removeprefix("step-").isdigit():
        raise UserError(
            f"{key}: not a step folder; give one such as outputs/debug/checkpoint/step-000100, or set "
            "checkpoint.initial_load_in_hf = true for a Hugging Face one"
        )


def saved_run(folder: Path) -> RunConfig | None:
    """Configuration of the run that saved a step folder; None if there is none, or this version cannot read it."""
    try:
        return validate_table(tomli.loads(json.loads((folder / META).read_bytes())["config"]))[0]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def differences(keys: tuple[str, ...], config: RunConfig, folder: Path) -> list[str]:
    """One line for each key whose value differs from the one that a step folder was saved with."""
    saved = saved_run(folder)
    if saved is None:
        return []
    ours, theirs = _values(config), _values(saved)
    return [
        f"{key} = {_shown(ours[key])}: {folder} was saved with {_shown(theirs[key])}"
        for key in keys
        if ours[key] != theirs[key]
    ]


def _values(config: RunConfig) -> Mapping[str, Any]:
    values = dict(_flatten("", config.model_dump()))
    values |= {f"model.{name}": value for name, value in resolve_shape(config.model).model_dump().items()}
    # Sources may move to another path.
    values["data.sources"] = [(source.name, source.weight, source.packing) for source in config.data.sources]
    return values


def _flatten(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
