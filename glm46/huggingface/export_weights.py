"""Export of a model as a Hugging Face folder, written by all ranks at once into the same files.

The offset of every tensor follows from the model's shape, so each rank writes the boxes that it holds, and no weight is
sent between ranks. The folder is renamed to its final name after all of it is on the disk.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.checkpoint.stored_values import StoredTensor
from glm46.config.model import ModelShape
from glm46.distributed.local_tensor import global_indices, local_tensor
from glm46.distributed.ranks import Ranks
from glm46.files.durable import Closer, create_durably, sync_folder
from glm46.files.tensor_file import Record, TensorFile, is_finite, lay_out
from glm46.huggingface.boxes import Interval, intervals_of, overlaps
from glm46.huggingface.config_json import CONFIG
from glm46.huggingface.fp8 import ERRORS_FILE, Scheme, error_of, quantise, quantised_names
from glm46.huggingface.import_weights import INDEX, NOT_FINITE, SINGLE_FILE, ReportBytes
from glm46.huggingface.names import HFEntry, HFNames, raise_if

Source = Tensor | StoredTensor
"""Source of a tensor's values: a plain tensor, a DTensor (this rank's part of it), or a tensor on the disk."""


@dataclass(frozen=True)
class ExportOptions:
    """Format of an export."""

    dtype: torch.dtype = torch.bfloat16
    """Type of the weights. The routers' selection biases are always FP32."""
    fp8: Scheme | None = None
    """Store projections in FP8 with these scales. One process only: a scale needs its whole block."""
    repeat_shared: bool = False
    """Repeat embedding and head in the prediction layers, as GLM-4.5 and GLM-4.5-Air do; GLM-4.6 does not."""
    max_file_bytes: int = 5_000_000_000
    """Most bytes of tensors in one file; a larger tensor has its own file."""
    other_files: Mapping[str, bytes] = field(default_factory=dict)
    """File name -> content: tokenizer, generation config and others."""


@torch.no_grad()
def export_weights(
    folder: Path,
    shape: ModelShape,
    config: dict[str, Any],
    tensors: Mapping[str, Source],
    *,
    options: ExportOptions = ExportOptions(),  # noqa: B008 - frozen
    report: ReportBytes | None = None,
) -> int:
    """Write a folder that `transformers`, vLLM and SGLang open. Collective.

    Args:
        folder: must not exist; on a disk that all ranks share.
        config: content of config.json, from `config_of`.
        tensors: our name -> source of its values; ranks may hold different names. The ranks' parts must cover every
            element of the model.

    Returns:
        Bytes of tensors that this rank wrote.

    Raises:
        UserError: the folder exists, or the disk has too little space.
        CheckpointError: on all ranks, if writing failed on any of them, or a weight is not finite. Nothing is left on
            the disk.
    """
    ranks = Ranks.of_this_run()
    assert options.fp8 is None or ranks.size == 1
    names = HFNames(shape, repeat_shared=options.repeat_shared)
    files = _lay_out_files(names, options)
    draft = folder.with_name(folder.name + ".tmp")
    with ranks.stage(f"checking {folder}") as stage:
        if ranks.is_first:
            stage.value = _target_faults(folder, sum(file.nbytes for file in files))
    raise_if(stage.values[0])
    mine = _names_to_write(names, tensors, ranks)
    try:
        with ranks.stage(f"making {draft}"):
            if ranks.is_first:
                _make_draft(draft, files)
        with ranks.stage(f"writing {draft}") as stage:
            with ExitStack() as opened:
                writer = _FolderWriter(draft, files, opened, options.fp8)
                writer.write([names.entries[name] for name in mine], tensors, report)
            stage.value = writer.elements  # after closing the files, which syncs them to the disk
        with ranks.stage(f"completing {folder}"):
            _require_whole(names, stage.values)
            if ranks.is_first:
                errors = {ERRORS_FILE: json.dumps(writer.errors, indent=2).encode() + b"\n"} if options.fp8 else {}
                _complete(draft, folder, files, config, {**options.other_files, **errors})
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    return writer.bytes_written


@dataclass(frozen=True)
class _File:
    """One file of the folder: its header, and the records of its tensors."""

    name: str
    header: bytes
    records: dict[str, Record]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(record.nbytes for record in self.records.values())


def _lay_out_files(names: HFNames, options: ExportOptions) -> list[_File]:
    """Assign tensors to files, in the order of the model; start a new file if the next tensor does not fit."""
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    filled = 0
    in_fp8 = quantised_names(names, options.fp8)
    for entry in names.entries.values():
        dtype = torch.float32 if entry.is_fp32 else options.dtype
        for part in entry.parts:
            stored = [(part.hf_name, dtype, part.hf_shape)]
            if options.fp8 is not None and part.hf_name in in_fp8:
                scales = (part.hf_name + options.fp8.suffix, torch.float32, options.fp8.scale_shape(part.hf_shape))
                stored = [(part.hf_name, torch.float8_e4m3fn, part.hf_shape), scales]
            nbytes = sum(prod(size) * kind.itemsize for _, kind, size in stored)
            if groups[-1] and filled + nbytes > options.max_file_bytes:
                groups.append([])
                filled = 0
            groups[-1] += stored
            filled += nbytes
    groups[-1] += [(name, options.dtype, size) for name, size in names.empty.items()]
    if len(groups) == 1:
        return [_File(SINGLE_FILE, *lay_out(groups[0]))]
    numbered = enumerate(groups, start=1)
    return [_File(f"model-{i:05d}-of-{len(groups):05d}.safetensors", *lay_out(group)) for i, group in numbered]


def _target_faults(folder: Path, nbytes: int) -> list[str]:
    if folder.exists():
        return [f"{folder}: exists already; choose a new folder"]
    there = next(parent for parent in folder.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        return [f"{folder}: the export takes {nbytes:,} bytes, but {there} has {free:,} free; choose another disk"]
    return []


def _make_draft(draft: Path, files: list[_File]) -> None:
    if draft.exists():  # left by an export that was killed
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    for file in files:
        # Only the header, not the final size: ext4 appends to a file twice as fast as it fills a hole.
        (draft / file.name).write_bytes(file.header)


def _names_to_write(names: HFNames, tensors: Mapping[str, Source], ranks: Ranks) -> list[str]:
    """The tensors that this rank writes, in the order of the model. Collective.

    Of several ranks that hold the same elements, only the first writes. Placements do not show all of them: a DTensor
    on part of a mesh does not know its replicas on the rest.
    """
    with ranks.stage("assigning tensors to ranks") as stage:
        unknown = sorted(set(tensors) - set(names.entries))
        if unknown:
            raise ValueError(f"{unknown[0]} is not a tensor of this model")
        # One process has no replicas, and a mapping that computes its tensors must not compute them twice.
        stage.value = {} if ranks.size == 1 else {name: _intervals(tensor) for name, tensor in tensors.items()}
    taken = {place for of_rank in stage.values[: ranks.rank] for place in of_rank.items()}
    mine = stage.values[ranks.rank]
    return [name for name in names.entries if name in tensors and (name, mine.get(name)) not in taken]


def _local(tensor: Source) -> Source:
    """The part of a source on this rank; a stored tensor is read whole, by one process."""
    return tensor if isinstance(tensor, StoredTensor) else local_tensor(tensor)


def _intervals(tensor: Source) -> tuple[tuple[Interval, ...], ...]:
    """For each dimension, the intervals that this rank holds."""
    return tuple(tuple(intervals_of(index)) for index in global_indices(tensor))


class _FolderWriter:
    """Writes local parts into the files of a draft; opens each file on first use.

    Attributes:
        elements: our name -> elements written, repeats included.
        errors: Hugging Face name -> `fp8.error_of` of each quantised tensor.
    """

    def __init__(self, draft: Path, files: list[_File], opened: ExitStack, fp8: Scheme | None):
        self._draft, self._opened, self._fp8 = draft, opened, fp8
        self.errors: dict[str, dict[str, float]] = {}
        self._file_of = {hf_name: file for file in files for hf_name in file.records}
        self._open: dict[str, TensorFile] = {}
        self.elements: dict[str, int] = {}

    @property
    def bytes_written(self) -> int:
        return sum(file.bytes_moved for file in self._open.values())

    def write(self, entries: Sequence[HFEntry], tensors: Mapping[str, Source], report: ReportBytes | None) -> None:
        """Write this rank's parts of our tensors; a complete file is synced while the next ones are written."""
        parts = [(entry.name, part.hf_name) for entry in entries for part in entry.parts]
        last = {self._file_of[hf_name].name: (name, hf_name) for name, hf_name in parts}
        with Closer() as closer:
            for entry in entries:
                self._write_part(entry, tensors[entry.name])
                for name, hf_name in last.values():
                    if name == entry.name:
                        closer.close(self._file(hf_name).close)
                if report is not None:
                    report(_local(tensors[entry.name]).nbytes)

    def _write_part(self, entry: HFEntry, tensor: Source) -> None:
        """Write this rank's part of one of our tensors under all of its Hugging Face names."""
        local = _local(tensor)
        intervals = _intervals(tensor)
        for part in entry.parts:
            dtype = self._file_of[part.hf_name].records[part.hf_name].dtype
            if self._fp8 is not None and dtype == torch.float8_e4m3fn:
                weight = local[part.index()].float().cpu()
                self._require_finite(part.hf_name, weight)
                self._quantise(part.hf_name, weight, self._fp8)
                self.elements[entry.name] = self.elements.get(entry.name, 0) + prod(part.hf_shape)
                continue
            for overlap in overlaps(part, intervals):
                values = local[overlap.local].to(dtype).cpu().contiguous()
                self._require_finite(part.hf_name, values)
                self._file(part.hf_name).write(part.hf_name, overlap.box, values)
                self.elements[entry.name] = self.elements.get(entry.name, 0) + values.numel()

    @staticmethod
    def _require_finite(hf_name: str, values: Tensor) -> None:
        if not is_finite(values):
            raise ValueError(f"tensor {hf_name} {NOT_FINITE}")

    def _quantise(self, hf_name: str, weight: Tensor, scheme: Scheme) -> None:
        values, scales = quantise(weight, scheme)
        self.errors[hf_name] = error_of(weight, values, scales, scheme)
        for name, stored in ((hf_name, values), (hf_name + scheme.suffix, scales)):
            self._file(name).write(name, tuple((0, size) for size in stored.shape), stored)

    def _file(self, hf_name: str) -> TensorFile:
        file = self._file_of[hf_name]
        if file.name not in self._open:
            writable = TensorFile(self._draft / file.name, file.records, writable=True)
            self._open[file.name] = self._opened.enter_context(writable)
        return self._open[file.name]


def _require_whole(names: HFNames, of_ranks: list[dict[str, int]]) -> None:
    """Raise unless every element was written: a hole in a file reads as zeros, which look like weights."""
    for name, entry in names.entries.items():
        expected = sum(prod(part.hf_shape) for part in entry.parts)
        written = sum(elements.get(name, 0) for elements in of_ranks)
        if written != expected:
            raise ValueError(f"{name}: {written:,} of {expected:,} elements were written")


def _complete(
    draft: Path, folder: Path, files: list[_File], config: dict[str, Any], other: Mapping[str, bytes]
) -> None:
    """Write the small files and rename the draft to the final folder."""
    contents = {CONFIG: json.dumps(config, indent=2).encode() + b"\n", **other}
    if len(files) > 1:
        weight_map = {hf_name: file.name for file in files for hf_name in file.records}
        total = sum(record.nbytes for file in files for record in file.records.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        contents[INDEX] = json.dumps(index, indent=2).encode() + b"\n"
    for name, content in contents.items():
        create_durably(draft / name, [content])
    sync_folder(draft)
    os.rename(draft, folder)
    sync_folder(folder.parent)
