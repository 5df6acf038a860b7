"""Checks of the folders of weights that a run reads at its start, without the values of the weights."""

from pathlib import Path

from glm46.config.adapter import AdapterConfig
from glm46.config.errors import UserError
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.engine.training.origin import has_checkpoint
from glm46.engine.training.saved_config import INITIAL_REMEDY, SHAPE_KEYS, differences, saved_run
from glm46.files.local_disk import real_path
from glm46.run.parameters import adapter_rows, named_rows
from glm46.storage.checkpoint.folder_kind import Kind, kind_of, require_kind


def refuse_weights(config: RunConfig) -> None:
    """Check the folders of weights that a start would read: frozen weights at every start, the others if the run has
    no checkpoint yet. Needs no process group and writes nothing.

    Raises:
        UserError: a folder is missing, or of another kind or model.
    """
    initial = "checkpoint.initial_load"
    is_new = not has_checkpoint(config)
    for key, (path, in_hf) in config.read_weights.items():
        if is_new or key != initial or config.keeps_its_start:
            _refuse_weights(config, key, path, in_hf)
    if is_new and config.adapter is not None and config.adapter.initial_load_path is not None:
        _refuse_adapter(config.model, config.adapter, Path(config.adapter.initial_load_path))


def _refuse_adapter(model: ModelConfig, adapter: AdapterConfig, path: Path) -> None:
    from glm46.storage.huggingface.peft_import import check_adapter  # imports torch

    shape = resolve_shape(model)
    try:
        check_adapter(path, shape, set(adapter_rows(shape, adapter)))
    except UserError as error:
        raise UserError(*(f"adapter.initial_load_path = {str(path)!r}: {fault}" for fault in error.faults)) from error


def _refuse_weights(config: RunConfig, keys: str, path: Path, in_hf: bool) -> None:
    """Raise UserError if weights cannot be read from a folder.

    Args:
        keys: prefix of the config key of the folder (and of its format, for the initial weights of a run).
    """
    key = f"{keys}_path = {str(path)!r}"
    is_start = keys == "checkpoint.initial_load"
    takes_both = not is_start and "rewards" not in keys
    if not path.exists():
        is_of_run = path.parent.name in ("huggingface", "checkpoint")
        run = f", or start the run first whose job.dump_folder is {str(path.parent.parent)!r}" if is_of_run else ""
        expected_kind = "Hugging Face or step" if takes_both else "Hugging Face" if in_hf else "step"
        raise UserError(f"{key}: no such folder; give a {expected_kind} folder{run}")
    if in_hf and is_start and kind_of(path) is Kind.DCP:
        raise UserError(f"{key}: this is {Kind.DCP.value}, not {Kind.HUGGING_FACE.value}; set {keys}_in_hf = false")
    try:
        kind = require_kind(path, Kind.HUGGING_FACE, *(() if in_hf else (Kind.DCP, Kind.STEP)))
    except UserError as error:
        raise UserError(*(f"{key}: {fault.removeprefix(f'{path}: ')}" for fault in error.faults)) from error
    if kind is Kind.DCP and config.checkpoint.initial_load_exclude and is_start:
        raise UserError(f"{key}: this is {kind.value}; to load a part, make a step folder of it with convert from-dcp")
    from glm46.storage.huggingface.folder_check import check_base, check_tokenizer  # imports torch

    is_foreign = in_hf or kind is Kind.DCP or (takes_both and kind is Kind.HUGGING_FACE)
    if kind is Kind.HUGGING_FACE and not is_foreign:
        remedy = f"set {keys}_in_hf = true" if is_start else "give a step folder"
        raise UserError(f"{key}: not a step folder but a Hugging Face folder; {remedy}")
    if is_foreign:
        base_dtype = None if config.adapter is None else config.adapter.base_dtype
        try:
            check_base(path, resolve_shape(config.model), base_dtype)
            if is_start:
                check_tokenizer(path, config.model.tokenizer_path)
        except UserError as error:
            prefix = f'{key}, adapter.base_dtype = "{base_dtype}"' if base_dtype else key
            raise UserError(*(f"{prefix}: {fault}" for fault in error.faults)) from error
        return
    _refuse_step_folder(config, keys, path)
    if is_start and not config.checkpoint.initial_load_exclude:
        check_tokenizer(path, config.model.tokenizer_path)


def _refuse_step_folder(config: RunConfig, keys: str, path: Path) -> None:
    """Raise UserError if weights cannot be read from a step folder; arguments as in `_refuse_weights`."""
    key = f"{keys}_path = {str(path)!r}"
    is_start = keys == "checkpoint.initial_load"
    if not real_path(path).name.removeprefix("step-").isdigit():
        switch = f", or set {keys}_in_hf = true for a Hugging Face one" if is_start else ""
        raise UserError(f"{key}: not a step folder; give one such as outputs/debug/checkpoint/step-000100{switch}")
    is_reference = not is_start
    saved = None if is_start and config.checkpoint.initial_load_exclude else saved_run(path)
    if saved is not None:
        if saved.adapter is not None:
            raise UserError(
                f"{key}: holds adapters without their base, {saved.checkpoint.initial_load_path}; export them with "
                "convert adapter-to-hf, and give the folder that convert merge makes of base and adapters"
            )
        theirs = resolve_shape(saved.model)
        shape = resolve_shape(config.model)
        if is_reference:  # its prediction layers are not read
            shape = shape.model_copy(update={"num_nextn_predict_layers": 0})
        their_shapes = {name: row.shape(theirs) for name, row in named_rows(theirs).items()}
        if any(their_shapes.get(name) != row.shape(shape) for name, row in named_rows(shape).items()):
            changed = differences(SHAPE_KEYS[:-1], config, real_path(path))  # another dtype is converted
            if is_reference:
                raise UserError(*(f"{key}: {line}; give weights of the model that is trained" for line in changed))
            raise UserError(*(f"{line}; {INITIAL_REMEDY}" for line in changed))
