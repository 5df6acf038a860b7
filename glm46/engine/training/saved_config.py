"""Configuration that a checkpoint was saved with, compared with this run's, to explain why the checkpoint does not
fit."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError
from glm46.config.loader import stored_config
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.files.regular_file import read_regular
from glm46.storage.checkpoint.integrity import META

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
    "index_n_heads",
    "index_head_dim",
    "indexer_types",
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
    "finetune.train_only",
    "adapter.name",
    "adapter.rank",
    "adapter.expert_rank",
    "adapter.targets",
    "adapter.layers",
)
"""Keys that determine which tensors a checkpoint holds, and their shapes and dtypes."""

_KEYS_SHOWN = 3
"""Number of differing keys to show; if there are more, the folder belongs to another model."""
_FAULTS_SHOWN = 3


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


def explain_load_faults(faults: Sequence[str], config: RunConfig, folder: Path) -> list[str]:
    """Return the changed keys that explain why a step folder cannot be loaded, with a remedy. Without such keys, and
    for initial weights, where patterns exclude tensors by name, return the first few faults too."""
    text = "\n".join(faults)
    # Keys of these tables explain only faults of the tensors whose names hold this text; other keys explain any fault.
    tensors_of_table = {"optimizer": "optimizer.", "moe": "balance."}
    keys = [key for key in TENSOR_KEYS if tensors_of_table.get(key.partition(".")[0], "") in text]
    is_initial = folder == config.checkpoint.initial_load_folder
    if folder == config.checkpoint.load_folder:
        remedy = CONTINUE_REMEDY
    elif is_initial:
        remedy = INITIAL_REMEDY
    else:
        # Under [adapter], `initial_load_path` is the base.
        rest = "" if config.adapter else ", with checkpoint.initial_load_path to load what matches"
        remedy = f"restore it, or begin anew with another job.dump_folder{rest}"
    causes = [f"{line}; {remedy}" for line in differences(tuple(keys), config, folder)]
    if causes and not is_initial:
        return causes
    if is_initial and not causes and all(": lacks optimizer." in fault for fault in faults):
        # The earlier run did not train these weights, such as indexers.
        return [
            f"checkpoint.initial_load_path = {config.checkpoint.initial_load_path!r}: {faults[0]}, and "
            f"{len(faults) - 1} more optimizer states of this run; set checkpoint.initial_load_model_only = true"
        ]
    more = [f"and {len(faults) - _FAULTS_SHOWN} more tensors"] if len(faults) > _FAULTS_SHOWN else []
    if folder == config.checkpoint.load_folder:
        key = f"checkpoint.load_path = {config.checkpoint.load_path!r}"
        faults = [f"{key}: {fault}; restore the folder, or give another one" for fault in faults]
    return [*causes, *faults[:_FAULTS_SHOWN], *more]
