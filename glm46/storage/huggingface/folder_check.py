"""Compares a folder of weights with a model by the names, shapes and types of all tensors, before a weight is read."""

import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glm46.config.adapter import BASE_FORMATS
from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted, show
from glm46.config.model import ModelShape
from glm46.files.file_content import read_json_object
from glm46.run.parameters import PARAMETERS, base_families
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.integrity import META
from glm46.storage.data.tokenizer import TOKENIZER_KEY, load_tokenizer, tokenizer_file
from glm46.storage.huggingface.config_json import CONFIG, read_config, shape_of
from glm46.storage.huggingface.dcp_folder import DcpFolder
from glm46.storage.huggingface.folder_tensors import Places, find_tensors
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import MOST_SHOWN, Form, HFNames, has_repeats, listed, stacked_name
from glm46.storage.huggingface.schemes import Scheme, scheme_of

_STACKED = tuple(stacked_name(row) for row in PARAMETERS if row.is_expert)

_EXTRA = re.compile(r"rotary_emb\.\w+|(\w+\.)?[qkv]_scale|(\w+\.)?(input|output)_scale|_extra_state")
"""Ends of names, after a module, of tensors that other programs store and that this model computes or does not need."""

_MAY_DIFFER = ("rope_theta", "rope_scaling", "max_position_embeddings", "sliding_window", "initializer_range")
"""Config keys that may differ from the folder's: they stretch positions, or have no effect on given weights.
num_nextn_predict_layers may be smaller; the other prediction layers are then not read."""

_KEYS_SHOWN = 3
"""Maximum number of config keys shown in faults: if more differ, the folder is of another model."""


class CheckedFolder(NamedTuple):
    """Tensors of the model that a folder stores."""

    names: HFNames
    places: Places
    """File and record of each tensor, including the parts of quantised weights. For DCP folders, by names in the
    folder's `Form`."""
    scheme: Scheme | None
    quantised: dict[str, tuple[int, ...]]
    """Quantised weights and their shapes."""
    notes: tuple[str, ...] = ()
    """Facts that the user should know about the folder, one line each."""
    dcp: DcpFolder | None = None
    """Reads the tensors, if another program wrote the folder in DCP's format."""


def check_folder(folder: Path, shape: ModelShape) -> CheckedFolder:
    """Check a folder against the model. Raises UserError with all faults of config.json, or else of the
    tensors."""
    dcp = None
    raw = {}
    notes = []
    if kind_of(folder) is Kind.DCP:
        dcp = DcpFolder(folder, shape)
        places = {name: (folder, record) for name, record in dcp.records.items()}
        form = dcp.form
        notes.append(dcp.note)
    else:
        raw = read_config(folder)
        raise_if(_config_faults(raw, shape, folder / CONFIG))
        places = find_tensors(folder)
        form = Form.STACKED if any(name.endswith(_STACKED) for name in places) else Form.PER_EXPERT
    if _lacks_mtp(places, shape):
        raise UserError(
            f"{folder}: lacks the multi-token prediction layers (transformers does not save them), but "
            f"model.shape.num_nextn_predict_layers = {shape.num_nextn_predict_layers}; set it to 0"
        )
    names = HFNames(shape, repeat_shared=has_repeats(places, shape), form=form)
    scheme = scheme_of(raw, str(folder / CONFIG))
    num_extra_layers = shape_of(raw).num_nextn_predict_layers - shape.num_nextn_predict_layers if raw else 0
    places, lines = _without_extras(places, names, num_extra_layers)
    notes += [f"{folder}: {line}" for line in lines]
    # Some tools save tensors without elements, such as the shared experts if n_shared_experts = 0; others omit them.
    empty = {name for name, (_, record) in places.items() if name not in names.places and not prod(record.shape)}
    if isinstance(scheme, Fp8):
        empty |= {name + scheme.suffix for name in empty}  # one scale per row is not empty
    places = {name: place for name, place in places.items() if name not in empty}
    records = {name: record for name, (_, record) in places.items()}
    quantised, stored_names, faults = scheme.weights_in(records, names) if scheme else ({}, set(), [])
    weights = {name: (record.shape, record.dtype) for name, record in records.items() if name not in stored_names}
    weights |= {name: (size, torch.bfloat16) for name, size in quantised.items()}
    faults += names.name_faults(weights)
    checked = {name: size_and_dtype for name, size_and_dtype in weights.items() if name in names.places}
    misfits = [
        fault for name, size_and_dtype in checked.items() if (fault := names.fault(name, *size_and_dtype)) is not None
    ]
    faults += misfits[:MOST_SHOWN]
    if len(misfits) > MOST_SHOWN:
        faults.append(f"{len(misfits) - MOST_SHOWN} more tensors differ in shape or type from the model's")
    raise_if([f"{folder}: {fault}" for fault in faults])
    rounded = [dtype for name, (_, dtype) in checked.items() if names.places[name][0].is_fp32 and dtype.itemsize < 4]
    if rounded:
        dtype = str(rounded[0]).removeprefix("torch.")
        notes.append(f"{folder}: {len(rounded)} selection biases of routers were stored rounded, in {dtype}")
    return CheckedFolder(names, places, scheme, quantised, tuple(notes), dcp)


def _without_extras(places: Places, names: HFNames, more: int) -> tuple[Places, list[str]]:
    """Drop the tensors that are known to be unneeded. Returns the others, and lines about the dropped ones. ``more``:
    number of prediction layers in config.json that the user excluded from the model."""
    layer_names = {name.removesuffix("eh_proj.weight") for name in places if name.endswith(".eh_proj.weight")}
    skipped = tuple(prefix for prefix in layer_names if prefix + "eh_proj.weight" not in names.places)
    layer_names = {name for name in places if skipped and name.startswith(skipped)}
    unknown = set(places) - set(names.places) - layer_names
    extra = sorted(n for n in unknown if any(_EXTRA.fullmatch(n, at.end()) for at in re.finditer(r"\.|^", n)))
    notes = []
    if len(skipped) > more:
        notes.append(f"holds {counted(len(skipped), 'prediction layer')} beyond those of its config.json: not read")
    if extra:
        notes.append(f"not read: {counted(len(extra), 'tensor')}, as this model computes without them: {listed(extra)}")
    return {name: place for name, place in places.items() if name not in layer_names and name not in extra}, notes


def check_base(folder: Path, shape: ModelShape, base_dtype: str | None) -> CheckedFolder:
    """Run `check_folder`, and check that a base in this format can be read from the folder. FP8: the weights in
    `base_families` must be stored in FP8, with a scale per row or per block of a multiple of the base's columns. INT4:
    any weights will do; if they are INT4, values and scales must be usable unchanged. Raises UserError like
    `check_folder`, or if the base cannot be read."""
    weights = check_folder(folder, shape)
    if base_dtype == "int4" and isinstance(weights.scheme, Int4):
        _check_int4(folder, weights, weights.scheme.group)
    if base_dtype != "float8":
        return weights
    columns = BASE_FORMATS["float8"].columns
    remedy = "take the published FP8 model, or write one by `python -m glm46 convert to-hf --dtype fp8-block`"
    if not isinstance(weights.scheme, Fp8) or weights.scheme.grid(columns)[1] % columns:
        raise UserError(
            f"{folder}: has no FP8 weights with scales of rows or of blocks of {columns} columns; {remedy}, or set "
            'adapter.base_dtype = "nf4", which takes any'
        )
    families = base_families(shape, "float8")
    expected = (name for name, (entry, _) in weights.names.places.items() if entry.row.fp8_family in families)
    if missing := [name for name in expected if name not in weights.quantised]:
        raise UserError(f"{folder}: {missing[0]} and {len(missing) - 1} more tensors are not in FP8; {remedy}")
    return weights


def check_tokenizer(folder: Path, path: str) -> None:
    """Raise UserError if the tokenizer of a Hugging Face folder (if tiktoken can represent it) has other ids for tokens
    that the configured tokenizer has too; or if a step folder was trained with another tokenizer."""
    ours = load_tokenizer(path)
    meta = folder / META
    if meta.is_file() and read_json_object(meta, "take another checkpoint").get(TOKENIZER_KEY, ours.fingerprint) != (
        ours.fingerprint
    ):
        raise UserError(
            f"{folder}: was trained with another tokenizer than model.tokenizer_path = {path!r}; set it to that of the "
            "run that saved it, or leave embedding and head out with checkpoint.initial_load_exclude"
        )
    if not tokenizer_file(str(folder)).is_file():
        return
    try:
        theirs = load_tokenizer(str(folder))
    except UserError:
        return
    moved: list[bytes | str] = [token for token, id_ in ours.ranks.items() if theirs.ranks.get(token, id_) != id_]
    moved += [name for name, id_ in ours.special.items() if theirs.special.get(name, id_) != id_]
    if moved:
        raise UserError(
            f"{folder}: its tokenizer has other ids for {counted(len(moved), 'token')} than model.tokenizer_path = "
            f"{path!r}, such as {moved[-1]!r}; set model.tokenizer_path = {str(folder)!r}"
        )


def _check_int4(folder: Path, checked: CheckedFolder, group: int) -> None:
    columns = BASE_FORMATS["int4"].columns
    remedy = 'take another folder, or set adapter.base_dtype = "nf4"'
    if group % columns:
        raise UserError(f"{folder}: its INT4 weights have groups of {group}, not of a multiple of {columns}; {remedy}")
    for name in checked.quantised:
        if (dtype := checked.places[f"{name}_scale"][1].dtype) != torch.bfloat16:
            raise UserError(f"{folder}: the scales of {name} are {dtype}, those of a base are BF16; {remedy}")


def stored_shape(folder: Path, shape: ModelShape | None = None) -> ModelShape:
    """Return a model shape, with 0 prediction layers if the files of a folder have no prediction layers.

    `transformers` saves a model without prediction layers and still counts them in the config.

    Args:
        shape: the shape; None: read it from the folder's config.json.

    Raises:
        UserError: config.json or the files are damaged.
    """
    shape = shape or shape_of(read_config(folder), str(folder / CONFIG))
    names = DcpFolder(folder, shape).records if kind_of(folder) is Kind.DCP else find_tensors(folder)
    return shape.model_copy(update={"num_nextn_predict_layers": 0}) if _lacks_mtp(names, shape) else shape


def files_of_weights(folder: Path, shape: ModelShape) -> list[Path]:
    """Return the files that hold the weights of a folder and describe them."""
    if kind_of(folder) is Kind.DCP:
        return DcpFolder(folder, shape).files
    return sorted({folder / CONFIG, *(path for path, _ in find_tensors(folder).values())})


def _lacks_mtp(names: Iterable[str], shape: ModelShape) -> bool:
    first = (f"model.layers.{shape.num_hidden_layers}.", "mtp.0.")
    return shape.num_nextn_predict_layers > 0 and not any(name.startswith(first) for name in names)


def _config_faults(raw: Mapping[str, Any], shape: ModelShape, file: Path) -> list[str]:
    theirs = shape_of(raw, str(file))
    values = [(name, getattr(shape, name), getattr(theirs, name)) for name in ModelShape.model_fields]
    faults = [
        f"{file}: {name} = {_shown(value)}, but the config has model.shape.{name} = {_shown(ours)}; "
        "set it to the folder's"
        for name, ours, value in values
        if ours != value and name not in _MAY_DIFFER and not (name == "num_nextn_predict_layers" and ours < value)
    ]
    if len(faults) <= _KEYS_SHOWN:
        return faults
    more = f"{file}: more keys of [model.shape] that differ: {len(faults) - _KEYS_SHOWN}, so it is another model"
    return [*faults[:_KEYS_SHOWN], f"{more}; set model.flavor and these keys to the folder's, or take another folder"]


def _shown(value: object) -> str:
    return "absent" if value is None else show(value)
