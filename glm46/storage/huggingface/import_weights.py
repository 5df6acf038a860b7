"""Import of weights from a Hugging Face folder, or from one of another program in DCP's format, directly into each
rank's part of the model.

A rank reads only the bytes that it keeps. Nothing is converted on disk, and a tensor is whole in memory only on a rank
that holds it whole. All tensors of the folder are checked by name, shape and type before a weight is read.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collective_errors import catch_user_error
from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.ranks import Ranks
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.model import ModelShape
from glm46.files.file_content import read_json_object
from glm46.files.tensor_file import Box, Record, TensorFile, is_finite, read_records
from glm46.run.parameters import FP8_BLOCK, PARAMETERS, fp8_families, scales_name
from glm46.storage.checkpoint.folder_kind import Kind, kind_of, require_kind
from glm46.storage.huggingface.boxes import Overlap, intervals_of, overlaps
from glm46.storage.huggingface.config_json import CONFIG, read_config, shape_of
from glm46.storage.huggingface.dcp_folder import DcpFolder
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.fp8 import matches, scales_of_columns
from glm46.storage.huggingface.names import Form, HFNames, has_repeats, listed, raise_if, stacked_name
from glm46.storage.huggingface.schemes import Scheme, scheme_of

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

ReportBytes = Callable[[int], None]
"""Called after the part of a tensor was read or written, with its size in the model, in bytes."""

NOT_FINITE = "holds NaN or infinite values: its training diverged; take weights of an earlier step"

_LOG = logging.getLogger(__name__)

_STACKED = tuple(stacked_name(row) for row in PARAMETERS if row.is_expert)

_EXTRA = re.compile(r"rotary_emb\.\w+|(\w+\.)?[qkv]_scale|(\w+\.)?(input|output)_scale|_extra_state")
"""Ends of names behind a module: what others store beside weights, and this model computes itself or without."""

_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")

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
    require_kind(folder, Kind.HUGGING_FACE)
    index = folder / INDEX
    if not index.is_file():
        return _without_index(folder)
    listed_in = _read_index(index)
    faults: list[str] = []
    found: dict[str, tuple[Path, Record]] = {}
    remedy = f"copy or download both again, or remove {INDEX}: the files alone are then read"
    for file in sorted(set(listed_in.values())):
        try:
            records = read_records(folder / file)
        except UserError as error:
            faults += error.faults
            continue
        for name, record in records.items():
            if (place := listed_in.get(name)) != file:
                faults.append(f"{folder / file}: holds {name}, which the index lists in {place or 'no file'}; {remedy}")
            found[name] = (folder / file, record)
        faults += [
            f"{folder / file}: lacks {name}, which the index lists there; {remedy}"
            for name, place in listed_in.items()
            if place == file and name not in records
        ]
    raise_if(faults)
    return found


def _without_index(folder: Path) -> dict[str, tuple[Path, Record]]:
    """As `find_tensors`, of the one file of a folder, or of all its files."""
    single = folder / SINGLE_FILE
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        other = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
        hint = f"; {other[0]} is a pickle, which can run any code: convert it to safetensors" if other else ""
        raise UserError(f"{folder}: neither {SINGLE_FILE} nor {INDEX} is there{hint or '; download the weights'}")
    names = {path.name for path in paths}
    faults = []
    for match in filter(None, map(_NUMBERED.fullmatch, sorted(names))):
        stem, number, count = match.groups()
        missing = [
            name
            for i in range(1, int(count) + 1)
            if (name := f"{stem}-{i:0{len(number)}d}-of-{count}.safetensors") not in names
        ]
        faults = [f"{folder}: lacks {listed(missing)}; copy or download what is missing"] if missing else []
    raise_if(faults)
    found: dict[str, tuple[Path, Record]] = {}
    for path in paths:
        for name, record in read_records(path).items():
            if name in found:
                faults.append(f"{path}: holds {name}, as does {found[name][0].name}; remove one, or add {INDEX}")
            found[name] = (path, record)
    raise_if(faults[:_TENSORS_SHOWN])
    return found


def _is_extra(name: str) -> bool:
    return any(_EXTRA.fullmatch(name, match.end()) for match in re.finditer(r"\.|^", name))


def _read_index(index: Path) -> dict[str, str]:
    remedy = "copy it again, or remove it: the files alone are read"
    listed = read_json_object(index, remedy).get("weight_map")
    if not isinstance(listed, dict):
        raise UserError(f"{index}: damaged (weight_map = {listed!r:.40}); {remedy}")
    if not all(isinstance(file, str) and Path(file).name == file for file in listed.values()):
        raise UserError(f"{index}: names files outside its folder")
    return listed


class CheckedFolder(NamedTuple):
    """The weights that a folder stores of the model."""

    names: HFNames
    found: dict[str, tuple[Path, Record]]
    """Tensors of its files by Hugging Face name, those of quantised weights included; of DCP by the names of `form`."""
    scheme: Scheme | None
    quantised: dict[str, tuple[int, ...]]
    """Quantised weights and their shapes."""
    notes: tuple[str, ...] = ()
    """What a user should know of the folder, a line each."""
    dcp: DcpFolder | None = None
    """Reads the tensors, if another program wrote the folder in DCP's format."""


def check_folder(folder: Path, shape: ModelShape) -> CheckedFolder:
    """Check a folder against the model.

    Raises:
        UserError: all faults of config.json; if it has none, all faults of the tensors.
    """
    dcp, raw, notes = None, {}, []
    if kind_of(folder) is Kind.DCP:
        dcp = DcpFolder(folder, shape)
        found, form = {name: (folder, record) for name, record in dcp.records.items()}, dcp.form
        notes.append(dcp.note)
    else:
        raw = read_config(folder)
        raise_if(_config_faults(raw, shape, folder / CONFIG))
        found = find_tensors(folder)
        form = Form.STACKED if any(name.endswith(_STACKED) for name in found) else Form.PER_EXPERT
    if _lacks_mtp(found, shape):
        raise UserError(
            f"{folder}: lacks the multi-token prediction layers (transformers does not save them), but "
            f"model.num_nextn_predict_layers = {shape.num_nextn_predict_layers}; set it to 0"
        )
    names = HFNames(shape, repeat_shared=has_repeats(found, shape), form=form)
    scheme = scheme_of(raw, str(folder / CONFIG))
    more = shape_of(raw).num_nextn_predict_layers - shape.num_nextn_predict_layers if raw else 0
    found, lines = _without_extras(found, names, more)
    notes += [f"{folder}: {line}" for line in lines]
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
    rounded: list[str] = []
    for name, (size, dtype) in weights.items():
        if name not in names.places:
            continue
        if (fault := names.fault(name, size, dtype)) is not None:
            unfit.append(fault)
        elif names.places[name][0].is_fp32 and dtype.itemsize < torch.float32.itemsize:
            rounded.append(name)
    faults += unfit[:_TENSORS_SHOWN]
    if len(unfit) > _TENSORS_SHOWN:
        faults.append(f"{len(unfit) - _TENSORS_SHOWN} more tensors differ in shape or type from the model's")
    raise_if([f"{folder}: {fault}" for fault in faults])
    if rounded:
        dtype = str(records[rounded[0]].dtype).removeprefix("torch.")
        notes.append(f"{folder}: {len(rounded)} selection biases of routers were stored rounded, in {dtype}")
    return CheckedFolder(names, found, scheme, quantised, tuple(notes), dcp)


def _without_extras(
    found: Mapping[str, tuple[Path, Record]],
    names: HFNames,
    more: int,
) -> tuple[dict[str, tuple[Path, Record]], list[str]]:
    """The tensors without those that are known not to be read, and lines about these.

    Args:
        more: prediction layers that config.json has more than the model, which its user left out.
    """
    of_layers = {name.removesuffix("eh_proj.weight") for name in found if name.endswith(".eh_proj.weight")}
    skipped = tuple(prefix for prefix in of_layers if prefix + "eh_proj.weight" not in names.places)
    of_layers = {name for name in found if skipped and name.startswith(skipped)}
    extra = sorted(name for name in set(found) - set(names.places) - of_layers if _is_extra(name))
    notes = []
    if len(skipped) > more:
        notes.append(f"holds {counted(len(skipped), 'prediction layer')} beyond those of its config.json: not read")
    if extra:
        notes.append(f"not read: {counted(len(extra), 'tensor')}, as this model computes without them: {listed(extra)}")
    return {name: place for name, place in found.items() if name not in of_layers and name not in extra}, notes


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


def stored_shape(folder: Path, shape: ModelShape | None = None) -> ModelShape:
    """A model shape, with 0 prediction layers if the files of a folder have none.

    `transformers` saves a model without prediction layers and still counts them in the config.

    Args:
        shape: None: that of the folder's config.json.

    Raises:
        UserError: config.json or the files are damaged.
    """
    shape = shape or shape_of(read_config(folder), str(folder / CONFIG))
    found = DcpFolder(folder, shape).records if kind_of(folder) is Kind.DCP else find_tensors(folder)
    return shape.model_copy(update={"num_nextn_predict_layers": 0}) if _lacks_mtp(found, shape) else shape


def files_of_weights(folder: Path, shape: ModelShape) -> list[Path]:
    """The files that hold the weights of a folder and describe them."""
    if kind_of(folder) is Kind.DCP:
        return DcpFolder(folder, shape).files
    return sorted({folder / CONFIG, *(path for path, _ in find_tensors(folder).values())})


def _lacks_mtp(names: Iterable[str], shape: ModelShape) -> bool:
    first = (f"model.layers.{shape.num_hidden_layers}.", "mtp.0.")
    return shape.num_nextn_predict_layers > 0 and not any(name.startswith(first) for name in names)


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
            Frozen weights in FP8 are as in `compute/model/fp8_weights.py`, beside their scales.

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
        self.names, self.found, self.scheme, self._quantised, notes, dcp = check_folder(folder, shape)
        self._records: dict[Path, dict[str, Record]] = {}
        for name, (path, record) in self.found.items():
            self._records.setdefault(path, {})[name] = record
        self._open: dict[Path, TensorFile | DcpFolder] = {} if dcp is None else {folder: dcp}
        if not dist.is_initialized() or dist.get_rank() == 0:
            for note in notes:
                _LOG.warning(note)

    def __enter__(self) -> "FolderReader":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_moved for file in self._open.values())

    def is_plain(self, hf_name: str) -> bool:
        """True if a weight is stored as it is, not quantised."""
        return hf_name not in self._quantised

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
        """True if a box of a repeat equals the values read before; in FP8, up to rounding."""
        if hf_name not in self._quantised:
            return torch.equal(target, self._file(hf_name).read(hf_name, box).to(target))
        scheme = self.scheme
        assert isinstance(scheme, Fp8)  # no other scheme quantises repeats
        parts, columns = self._parts(hf_name, box), self._quantised[hf_name][1]
        return matches(target.float().cpu(), parts[""], parts[scheme.suffix], scheme, columns, box)

    def _parts(self, hf_name: str, box: Box) -> dict[str, Tensor]:
        """Tensors that a box of a quantised weight needs, by suffix."""
        assert self.scheme is not None
        boxes = self.scheme.boxes(self._quantised[hf_name], box).items()
        return {suffix: self._file(hf_name + suffix).read(hf_name + suffix, part) for suffix, part in boxes}

    def stored(self, name: str) -> "FolderTensor":
        """One of our tensors, whose parts are read when they are indexed."""
        return FolderTensor(self, name)

    def _file(self, hf_name: str) -> TensorFile | DcpFolder:
        path = self.found[hf_name][0]
        if path not in self._open:
            self._open[path] = TensorFile(path, self._records[path])
        return self._open[path]


@dataclass(frozen=True)
class FolderTensor:
    """One of our tensors in a folder. Indexing with an int or a slice for each dimension reads that part."""

    reader: FolderReader
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.names.entries[self.name].shape

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the stored values; FP32 if they are quantised or of several types."""
        parts = [part.hf_name for part in self.reader.names.entries[self.name].parts if not part.is_repeat]
        types = {self.reader.found[name][1].dtype if self.reader.is_plain(name) else torch.float32 for name in parts}
        return types.pop() if len(types) == 1 else torch.float32

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: tuple[int | slice, ...]) -> Tensor:
        """A new tensor on the CPU.

        Raises:
            UserError: it holds NaN or infinity, or differs from its repeat.
        """
        pairs = zip(index, self.shape, strict=True)
        held = [torch.arange(size)[one if isinstance(one, slice) else slice(one, one + 1)] for one, size in pairs]
        out = torch.empty([len(places) for places in held], dtype=self.dtype)
        raise_if(self.reader.fill(self.name, out, held))
        return out[tuple(slice(None) if isinstance(one, slice) else 0 for one in index)]
