"""Checks of the checkpoint or weights that a run starts from, and the keys in which a checkpoint differs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.config.adapter import AdapterConfig
from glm46.config.errors import UserError
from glm46.config.loader import stored_config
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.run_lock import outer_run
from glm46.files.local_disk import real_path
from glm46.run.parameters import adapter_rows, named_rows
from glm46.storage.checkpoint.folder_kind import Kind, kind_of, require_kind
from glm46.storage.checkpoint.integrity import META, published_steps, quick_faults, step_folder, step_of

CONTINUE_REMEDY = "restore it, or take what matches, with new clocks, through checkpoint.initial_load_path instead"
"""For a difference from the checkpoint of `checkpoint.load_path`."""
INITIAL_REMEDY = "restore it, or exclude what does not match with checkpoint.initial_load_exclude"
"""For a difference from the step folder of `checkpoint.initial_load_path`."""

_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "first_k_dense_replace", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_attention_heads", "num_key_value_heads",
    "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "use_qk_norm",
    "attention_bias", "num_nextn_predict_layers",
)  # fmt: skip
SHAPE_KEYS = (*(f"model.{name}" for name in _SHAPE), "training.dtype")
"""Keys that determine the weights of a checkpoint."""
TENSOR_KEYS = (
    *SHAPE_KEYS, "moe.balance", "optimizer.name", "optimizer.router", "optimizer.lm_head", "optimizer.state_dtype",
    "adapter.name", "adapter.rank", "adapter.expert_rank", "adapter.targets", "adapter.layers",
)  # fmt: skip
"""Keys that determine which tensors a checkpoint holds, and their shapes and dtypes."""

_KEYS_SHOWN = 3
"""More of them say that the folder is of another model."""


def refuse_origin(config: RunConfig) -> None:
    """Check the checkpoint or weights that a run would start from. Needs no process group and writes nothing.

    Raises:
        UserError: they are missing, or of another kind or model.
    """
    checkpoint, folder = config.checkpoint, config.checkpoint_folder
    if checkpoint.enable and folder.exists() and not folder.is_dir():
        raise UserError(
            f"checkpoint.folder = {checkpoint.folder!r}: {folder} is a file; move it away, or name another folder"
        )
    saved = published_steps(folder) if checkpoint.enable else []
    initial, weights = "checkpoint.initial_load", config.read_weights
    for begin in weights:
        if begin != initial or config.keeps_its_start:
            is_of_teacher = begin == "finetune.distillation.load"
            _refuse_weights((is_of_teacher and config.teacher) or config, begin, *weights[begin])
    _refuse_folders_of_others(config, saved)
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
    if saved or is_local:
        return
    if checkpoint.load_path is not None:
        _refuse_continued(config, Path(checkpoint.load_path))
    if initial in weights and not config.keeps_its_start:
        _refuse_weights(config, initial, *weights[initial])
    if config.adapter is not None and config.adapter.initial_load_path is not None:
        _refuse_adapter(config.model, config.adapter, Path(config.adapter.initial_load_path))


def _refuse_folders_of_others(config: RunConfig, saved: Sequence[int]) -> None:
    dump_folder = Path(config.job.dump_folder)
    for key, folder in config.folders_apart.items():
        if other := outer_run(folder, dump_folder):
            raise UserError(f"{key} = {str(folder)!r}: lies in the folder of the run in {other}; name another folder")
    if not saved or "checkpoint.folder" not in config.folders_apart:
        return
    newest = step_folder(config.checkpoint_folder, saved[-1])
    owner = None
    with suppress(UserError):  # of another version
        owner = saved_run(newest)
    if owner is not None and Path(owner.job.dump_folder).absolute() != dump_folder.absolute():
        raise UserError(
            f"checkpoint.folder = {config.checkpoint.folder!r}: has checkpoints of the run in {owner.job.dump_folder}; "
            f"name another folder, with checkpoint.load_path = {str(newest)!r} to go on from there, or set "
            f"job.dump_folder = {owner.job.dump_folder!r}"
        )


def _refuse_continued(config: RunConfig, path: Path) -> None:
    """Raise the faults of `checkpoint.load_path` that can be found without reading its tensors."""
    key, folder = f"checkpoint.load_path = {str(path)!r}", real_path(path)
    if step_of(folder) is None or not folder.is_dir():
        steps = published_steps(folder) or published_steps(folder.parent)
        parent = folder if published_steps(folder) else folder.parent
        there = f"; {parent} has steps {', '.join(map(str, steps))}" if steps else ""
        reason = "not a step folder" if folder.exists() else "no such folder"
        if kind_of(folder) is Kind.DCP:
            raise UserError(f"{key}: this is {Kind.DCP.value}; give it as checkpoint.initial_load_path")
        raise UserError(f"{key}: {reason}{there}; give one such as {step_folder(parent, max(steps, default=100))}")
    if faults := quick_faults(folder, step_of(folder))[1]:
        remedy = "restore what is missing, or give another step folder"
        raise UserError(*(f"{key}: {fault}; {remedy}" for fault in faults))
    if changed := differences(SHAPE_KEYS, config, folder):
        raise UserError(*(f"{key}: {line}; {CONTINUE_REMEDY}" for line in changed))


def _refuse_adapter(model: ModelConfig, adapter: AdapterConfig, path: Path) -> None:
    from glm46.storage.huggingface.peft_import import check_adapter  # imports torch, which the other checks do not need

    shape = resolve_shape(model)
    try:
        check_adapter(path, shape, set(adapter_rows(shape, adapter)))
    except UserError as error:
        raise UserError(*(f"adapter.initial_load_path = {str(path)!r}: {fault}" for fault in error.faults)) from error


def _refuse_weights(config: RunConfig, keys: str, path: Path, in_hf: bool) -> None:
    """Args: keys: what the key of the folder begins with, and at the start of a run that of its format too."""
    key, is_start = f"{keys}_path = {str(path)!r}", keys == "checkpoint.initial_load"
    takes_both = not is_start and "rewards" not in keys
    if not path.exists():
        is_of_run = path.parent.name in ("huggingface", "checkpoint")
        run = f", or start the run first whose job.dump_folder is {str(path.parent.parent)!r}" if is_of_run else ""
        wanted = "Hugging Face or step" if takes_both else "Hugging Face" if in_hf else "step"
        raise UserError(f"{key}: no such folder; give a {wanted} folder{run}")
    try:
        kind = require_kind(path, Kind.HUGGING_FACE, Kind.DCP, *(() if in_hf else (Kind.STEP,)))
    except UserError as error:
        raise UserError(*(f"{key}: {fault.removeprefix(f'{path}: ')}" for fault in error.faults)) from error
    if in_hf and kind is Kind.DCP and is_start:
        raise UserError(f"{key}: this is {kind.value}, not {Kind.HUGGING_FACE.value}; set {keys}_in_hf = false")
    if kind is Kind.DCP and config.checkpoint.initial_load_exclude and is_start:
        raise UserError(f"{key}: this is {kind.value}; to load a part, make a step folder of it with convert from-dcp")
    is_foreign = in_hf or kind is Kind.DCP or (takes_both and kind is Kind.HUGGING_FACE)
    if kind is Kind.HUGGING_FACE and not is_foreign:
        remedy = f"set {keys}_in_hf = true" if is_start else "give a step folder"
        raise UserError(f"{key}: not a step folder but a Hugging Face folder; {remedy}")
    # imports torch, which the checks before do not need
    from glm46.storage.huggingface.folder_check import check_base, check_tokenizer

    if is_foreign:
        base_dtype = None if config.adapter is None else config.adapter.base_dtype
        try:
            check_base(path, resolve_shape(config.model), base_dtype)
            if is_start:
                check_tokenizer(path, config.model.tokenizer_path)
        except UserError as error:
            at = f'{key}, adapter.base_dtype = "{base_dtype}"' if base_dtype else key
            raise UserError(*(f"{at}: {fault}" for fault in error.faults)) from error
        return
    if not real_path(path).name.removeprefix("step-").isdigit():
        switch = f", or set {keys}_in_hf = true for a Hugging Face one" if is_start else ""
        raise UserError(f"{key}: not a step folder; give one such as outputs/debug/checkpoint/step-000100{switch}")
    is_reference = not is_start
    saved = None if is_start and config.checkpoint.initial_load_exclude else saved_run(path)
    if is_start and not config.checkpoint.initial_load_exclude:
        check_tokenizer(path, config.model.tokenizer_path)
    if saved is not None:
        if saved.adapter is not None:
            raise UserError(
                f"{key}: holds adapters without their base, {saved.checkpoint.initial_load_path}; export them with "
                "convert adapter-to-hf, and give the folder that convert merge makes of base and adapters"
            )
        theirs, shape = resolve_shape(saved.model), resolve_shape(config.model)
        if is_reference:  # its prediction layers are not read
            shape = shape.model_copy(update={"num_nextn_predict_layers": 0})
        found = {name: row.shape(theirs) for name, row in named_rows(theirs).items()}
        if any(found.get(name) != row.shape(shape) for name, row in named_rows(shape).items()):
            changed = differences(SHAPE_KEYS[:-1], config, real_path(path))  # another dtype is converted
            if is_reference:
                raise UserError(*(f"{key}: {line}; give weights of the model that is trained" for line in changed))
            raise UserError(*(f"{line}; {INITIAL_REMEDY}" for line in changed))


def saved_run(folder: Path) -> RunConfig | None:
    """Configuration of the run that saved a step folder; None if there is none, or it cannot be read. Raises UserError
    as `stored_config` does."""
    try:
        return stored_config(json.loads((folder / META).read_bytes())["config"])
    except UserError as error:
        raise UserError(*(f"{folder}: {fault}" for fault in error.faults)) from None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def differences(keys: tuple[str, ...], config: RunConfig, folder: Path) -> list[str]:
    """A line for each of the first keys whose value differs from the one that a step folder was saved with."""
    saved = saved_run(folder)
    if saved is None:
        return []
    ours, theirs = _values(config), _values(saved)
    lines = [
        f"{key} = {_shown(ours.get(key))}: {folder} was saved with {_shown(theirs.get(key))}"
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key) and f"{key}.".startswith(tuple(f"{one}." for one in keys))  # or of a table
    ]
    more = len(lines) - _KEYS_SHOWN
    return [*lines[:_KEYS_SHOWN], *([f"more keys that differ from {folder}: {more}"] if more > 0 else [])]


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
    return "absent" if value is None else json.dumps(value, default=str)
