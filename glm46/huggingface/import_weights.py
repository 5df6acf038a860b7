"""Import of weights from a Hugging Face folder, directly into each rank's part of the model.

A rank reads only the bytes that it keeps. Nothing is converted on disk, and a tensor is whole in memory only on a rank
that holds it whole. All tensors of the folder are checked by name, shape and type before a weight is read.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.distributed.collective_errors import catch_user_error
from glm46.distributed.local_tensor import global_indices, local_tensor
from glm46.distributed.ranks import Ranks
from glm46.files.tensor_file import Box, Record, TensorFile, is_finite, read_records
from glm46.huggingface.boxes import Overlap, intervals_of, overlaps
from glm46.huggingface.config_json import CONFIG, read_config, shape_of
from glm46.huggingface.fp8 import Scheme as Fp8
from glm46.huggingface.fp8 import matches, scales_of_columns
from glm46.huggingface.names import HFNames, has_repeats, raise_if
from glm46.huggingface.schemes import Scheme, scheme_of
from glm46.planner.parameters import FP8_BLOCK, fp8_families, scales_name

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

ReportBytes = Callable[[int], None]
"""Called after the part of a tensor was read or written, with its size in the model, in bytes."""

NOT_FINITE = "holds NaN or infinite values: its training diverged; take weights of an earlier step"

_TENSORS_SHOWN = 10
"""Faulty tensors listed by name; the others are counted. A wrong config.json gives thousands."""

_MAY_DIFFER = ("rope_theta", "rope_scaling", "max_position_embeddings", "sliding_window", "initializer_range")
"""Keys of the config that may differ from the folder's: they stretch positions, or have no effect on given weights.
num_nextn_predict_layers may be smaller; the other prediction layers are then not read."""


def find_tensors(folder: Path) -> dict[str, tuple[Path, Record]]:
    """File and record of every tensor of a model folder, by Hugging Face name, read from the files' own headers.

    Raises:
        UserError: safetensors files or index are missing or damaged, or they disagree about the file of a tensor.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            other = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
            hint = f"; {other[0]} is a pickle, which can run any code: convert it to safetensors" if other else ""
            raise UserError(f"{folder}: neither {SINGLE_FILE} nor {INDEX} is there{hint}")
        records = read_records(folder / SINGLE_FILE)
        return {name: (folder / SINGLE_FILE, record) for name, record in records.items()}
    listed = _read_index(index)
    faults: list[str] = []
    found: dict[str, tuple[Path, Record]] = {}
    for file in sorted(set(listed.values())):
        try:
            records = read_records(folder / file)
        except UserError as error:
            faults += error.faults
            continue
        for name, record in records.items():
            if listed.get(name) != file:
                faults.append(f"{folder / file}: holds {name}, which the index lists in {listed.get(name, 'no file')}")
            found[name] = (folder / file, record)
        faults += [
            f"{folder / file}: lacks {name}, which the index lists there"
            for name, place in listed.items()
            if place == file and name not in records
        ]
    raise_if(faults)
    return found


def _read_index(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        plain = all(isinstance(file, str) and Path(file).name == file for file in listed.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: damaged ({type(error).__name__}: {error})") from error
    if not plain:
        raise UserError(f"{index}: names files outside its folder")
    return listed


class CheckedFolder(NamedTuple):
    """What a folder stores of the model."""

    names: HFNames
    found: dict[str, tuple[Path, Record]]
    """Tensors of its files by Hugging Face name, those of quantised weights included."""
    scheme: Scheme | None
    quantised: dict[str, tuple[int, ...]]
    """Quantised weights and their shapes."""


def check_folder(folder: Path, shape: ModelShape) -> CheckedFolder:
    """Check a folder against the model.

    Raises:
        UserError: all faults of config.json; if it has none, all faults of the tensors.
    """
    raw = read_config(folder)
    raise_if(_config_faults(raw, shape, folder / CONFIG))
    found = find_tensors(folder)
    layers = shape.num_hidden_layers + shape.num_nextn_predict_layers
    skipped = tuple(f"model.layers.{i}." for i in range(layers, shape_of(raw).num_nextn_predict_layers + layers))
    found = {name: place for name, place in found.items() if not (skipped and name.startswith(skipped))}
    if _lacks_mtp(found, shape):
        raise UserError(
            f"{folder}: lacks the multi-token prediction layers (transformers does not save them), but "
            f"model.num_nextn_predict_layers = {shape.num_nextn_predict_layers}; set it to 0"
        )
    names = HFNames(shape, repeat_shared=has_repeats(found, shape))
    scheme = scheme_of(raw, str(folder / CONFIG))
    # Some tools save tensors without elements, such as the shared experts if n_shared_experts = 0; others omit them.
    empty = {name for name, (_, record) in found.items() if name not in names.places and not prod(record.shape)}
    if isinstance(scheme, Fp8):
        empty |= {name + scheme.suffix for name in empty}  # one scale per row is not empty
    found = {name: place for name, place in found.items() if name not in empty}
    records = {name: record for name, (_, record) in found.items()}
    quantised, stored_names, faults = scheme.weights_in(records, names) if scheme else ({}, set(), [])
    weights = {name: (record.shape, record.dtype) for name, record in records.items() if name not in stored_names}
    weights |= {name: (size, torch.bfloat16) for name, size in quantised.items()}
    faults += names.name_faults(weights)
    unfit: list[str] = []
    for name, (size, dtype) in weights.items():
        if name in names.places and (fault := names.fault(name, size, dtype)) is not None:
            unfit.append(fault)
    faults += unfit[:_TENSORS_SHOWN]
    if len(unfit) > _TENSORS_SHOWN:
        faults.append(f"{len(unfit) - _TENSORS_SHOWN} more tensors differ in shape or type from the model's")
    raise_if([f"{folder}: {fault}" for fault in faults])
    return CheckedFolder(names, found, scheme, quantised)


def check_fp8_folder(folder: Path, shape: ModelShape) -> None:
    """`check_folder`, and that the weights which `fp8_families` names are stored in FP8, with a scale for each row or
    for blocks whose columns are a multiple of 128.

    Raises:
        UserError: see `check_folder`; or they are not.
    """
    checked, families = check_folder(folder, shape), fp8_families(shape)
    remedy = "take the published FP8 model, or write one by `python -m glm46 convert to-hf --dtype fp8-block`"
    if not isinstance(checked.scheme, Fp8) or checked.scheme.grid(FP8_BLOCK)[1] % FP8_BLOCK:
        raise UserError(
            f"{folder}: has no FP8 weights with scales of rows or of blocks of {FP8_BLOCK} columns; {remedy}"
        )
    wanted = (name for name, (entry, _) in checked.names.places.items() if entry.row.fp8_family in families)
    if missing := [name for name in wanted if name not in checked.quantised]:
        raise UserError(f"{folder}: {missing[0]} and {len(missing) - 1} more tensors are not in FP8; {remedy}")


def stored_shape(folder: Path) -> ModelShape:
    """The model shape of a folder's config.json, with 0 prediction layers if the files have none.

    `transformers` saves a model without prediction layers and still counts them in the config.

    Raises:
        UserError: config.json or the files are damaged.
    """
    shape = shape_of(read_config(folder), str(folder / CONFIG))
    return (
        shape.model_copy(update={"num_nextn_predict_layers": 0}) if _lacks_mtp(find_tensors(folder), shape) else shape
    )


def _lacks_mtp(hf_names: Iterable[str], shape: ModelShape) -> bool:
    first = f"model.layers.{shape.num_hidden_layers}."
    return shape.num_nextn_predict_layers > 0 and not any(name.startswith(first) for name in hf_names)


def _config_faults(raw: Mapping[str, Any], shape: ModelShape, file: Path) -> list[str]:
    theirs = shape_of(raw, str(file))
    faults = []
    for name in ModelShape.model_fields:
        ours, there = getattr(shape, name), getattr(theirs, name)
        if name in _MAY_DIFFER or ours == there:
            continue
        if name == "num_nextn_predict_layers" and ours < there:
            continue
        faults.append(f"{file}: {name} = {there!r}, but the config has model.{name} = {ours!r}; set it to the folder's")
    return faults


@torch.no_grad()
def import_weights(
    folder: Path, shape: ModelShape, tensors: Mapping[str, Tensor], *, report: ReportBytes | None = None
) -> int:
    """Fill this rank's parts of parameters and buffers from a Hugging Face folder. Collective.

    Args:
        tensors: our name -> Tensor or DTensor, any type and device; ranks may hold different names (pipeline stages).
            Frozen weights in FP8 are as in `model/fp8_weights.py`, beside their scales.

    Returns:
        Bytes that this rank read.

    Raises:
        UserError: on all ranks. Either all faults of the folder, before a tensor is changed; or tensors that hold NaN
            or infinity, and repeats of embedding and head that differ from them.
        CheckpointError: on all ranks, if reading failed on any of them.
    """
    ranks = Ranks.of_this_run()
    with ranks.stage(f"checking {folder}") as stage:
        if ranks.is_first:
            in_fp8 = any(scales_name(name) in tensors for name in tensors)
            _, error = catch_user_error(lambda: (check_fp8_folder if in_fp8 else check_folder)(folder, shape))
            stage.value = error and error.faults
    raise_if(stage.values[0] or [])
    with ranks.stage(f"reading {folder}") as stage, FolderReader(folder, shape) as reader:
        differing = []
        of_weights = {scales_name(name) for name in tensors}
        for name, tensor in tensors.items():
            if report is not None:
                report(local_tensor(tensor).nbytes)
            if name in of_weights:
                continue
            scales = tensors.get(scales_name(name))
            scales = None if scales is None else local_tensor(scales)
            differing += reader.fill(name, local_tensor(tensor), global_indices(tensor), scales)
        stage.value = differing
    faults = sorted({f"{folder}: {fault}" for faults in stage.values for fault in faults})
    more = [f"{folder}: {len(faults) - _TENSORS_SHOWN} more tensors are faulty"] if faults[_TENSORS_SHOWN:] else []
    raise_if(faults[:_TENSORS_SHOWN] + more)
    return reader.bytes_read


class FolderReader:
    """Fills local parts of our tensors from a folder. It checks the folder first, and opens each file on first use.

    Attributes:
        names: of the folder's tensors that the model has.
        found: Hugging Face name -> file and record, scales included.
        scheme: of its quantised weights, or None.

    Raises:
        UserError: see `check_folder`.
    """

    def __init__(self, folder: Path, shape: ModelShape):
        self.names, self.found, self.scheme, self._quantised = check_folder(folder, shape)
        self._records: dict[Path, dict[str, Record]] = {}
        for name, (path, record) in self.found.items():
            self._records.setdefault(path, {})[name] = record
        self._open: dict[Path, TensorFile] = {}

    def __enter__(self) -> "FolderReader":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_moved for file in self._open.values())

    def fill(self, name: str, local: Tensor, held: list[Tensor], scales: Tensor | None = None) -> list[str]:
        """Fill one local part.

        Args:
            held: int64 per dimension, see `global_indices`.
            scales: of a frozen weight that is kept in FP8; filled too.

        Returns:
            Faults: values that are not finite, repeats that differ.
        """
        intervals = [intervals_of(index) for index in held]
        filled, faults = 0, []
        for part in self.names.entries[name].parts:
            differs, finite = False, True
            if part.is_repeat and part.hf_name not in self.found:
                continue
            for overlap in overlaps(part, intervals):
                target = local[overlap.local]
                if part.is_repeat:
                    differs |= not self._equals(part.hf_name, overlap.box, target)
                else:
                    if scales is None:
                        self.read(part.hf_name, overlap.box, target)
                        finite &= is_finite(target)
                    else:
                        finite &= self._read_fp8(part.hf_name, overlap, target, scales)
                    filled += target.numel()
            if not finite:
                faults.append(f"tensor {part.hf_name} {NOT_FINITE}")
            if differs:
                faults.append(f"tensor {part.hf_name} differs from {name}, which it must repeat")
        assert filled == local.numel(), f"{name}: {filled} of {local.numel()} elements were read"
        return faults

    def read(self, hf_name: str, box: Box, target: Tensor) -> None:
        """Read a box of a weight into memory of any type; quantised values are converted through FP32."""
        shape = self._quantised.get(hf_name)
        if shape is None:
            self._file(hf_name).fill(hf_name, box, target)
        else:
            assert self.scheme is not None
            target.copy_(self.scheme.dequantise(self._parts(hf_name, box), shape, box))

    def _read_fp8(self, hf_name: str, overlap: Overlap, values: Tensor, scales: Tensor) -> bool:
        """Read a box of a weight without converting it; returns whether it is finite."""
        assert isinstance(self.scheme, Fp8)
        parts, columns = self._parts(hf_name, overlap.box), self._quantised[hf_name][1]
        *rows, held = overlap.local
        groups = slice(held.start // FP8_BLOCK, held.stop // FP8_BLOCK)
        found = scales_of_columns(parts[self.scheme.suffix], self.scheme, columns, overlap.box, FP8_BLOCK)
        values.copy_(parts[""].view(torch.uint8))
        scales[(*rows, groups)] = found.view(torch.int32).to(scales.device)
        return is_finite(found) and is_finite(parts[""].float())

    def _equals(self, hf_name: str, box: Box, target: Tensor) -> bool:
        """Whether a box of a repeat equals the values read before; in FP8, up to rounding."""
        if hf_name not in self._quantised:
            return torch.equal(target, self._file(hf_name).read(hf_name, box).to(target))
        scheme = self.scheme
        assert isinstance(scheme, Fp8)  # no other scheme quantises repeats
        parts, columns = self._parts(hf_name, box), self._quantised[hf_name][1]
        return matches(target.float().cpu(), parts[""], parts[scheme.suffix], scheme, columns, box)

    def _parts(self, hf_name: str, box: Box) -> dict[str, Tensor]:
        """What a box of a quantised weight needs, by suffix."""
        assert self.scheme is not None
        boxes = self.scheme.boxes(self._quantised[hf_name], box).items()
        return {suffix: self._file(hf_name + suffix).read(hf_name + suffix, part) for suffix, part in boxes}

    def _file(self, hf_name: str) -> TensorFile:
        path = self.found[hf_name][0]
        if path not in self._open:
            self._open[path] = TensorFile(path, self._records[path])
        return self._open[path]
