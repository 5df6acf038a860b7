"""Tensors written by all ranks at once into the same files of a folder, which appears under its name when it is whole.

The offset of every tensor follows from its file's header, so each rank writes the boxes that it holds, and no value is
sent between ranks.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.ranks import Ranks
from glm46.compute.model.router import folded
from glm46.config.errors import raise_if
from glm46.files.durable import Closer, create_durably, sync_folder
from glm46.files.local_disk import space_fault
from glm46.files.tensor_file import Record, TensorFile, is_finite
from glm46.storage.checkpoint.stored_values import DiskTensor
from glm46.storage.huggingface.boxes import Interval, intervals_of, overlaps
from glm46.storage.huggingface.folder_tensors import INDEX
from glm46.storage.huggingface.import_weights import NOT_FINITE, ReportBytes
from glm46.storage.huggingface.names import HFEntry
from glm46.storage.huggingface.schemes import ERRORS_FILE, Scheme, error_of

Source = Tensor | DiskTensor
"""Source of a tensor's values: a plain tensor, a DTensor (this rank's part of it), or a tensor on the disk."""


@dataclass(frozen=True)
class OutputFile:
    """One file of the folder: its header, and the records of its tensors."""

    name: str
    header: bytes
    records: dict[str, Record]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(record.nbytes for record in self.records.values())


@contextmanager
def drafted_folder(folder: Path, nbytes: int, ranks: Ranks) -> Iterator[Path]:
    """An empty folder beside `folder`, which gets this name if the block succeeds, and is removed if it fails.
    Collective; in the block a failure must reach all ranks (`Ranks.stage`). Raises UserError on all ranks if the folder
    exists, or the disk has less space than `nbytes`."""
    draft = folder.with_name(folder.name + ".tmp")
    with ranks.stage(f"checking {folder}") as stage:
        if ranks.is_first:
            taken = f"{folder}: exists already; choose a new folder" if folder.exists() else None
            stage.value = taken or space_fault(folder, nbytes)
    raise_if([fault for fault in stage.values[:1] if fault])
    try:
        with ranks.stage(f"making {draft}"):
            if ranks.is_first:
                if draft.exists():  # left by an export that was killed
                    shutil.rmtree(draft)
                draft.mkdir(parents=True)
        yield draft
        with ranks.stage(f"completing {folder}"):
            if ranks.is_first:
                sync_folder(draft)
                os.rename(draft, folder)
                sync_folder(folder.parent)
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def write_tensors(
    draft: Path,
    entries: Mapping[str, HFEntry],
    files: Sequence[OutputFile],
    tensors: Mapping[str, Source],
    ranks: Ranks,
    contents: Mapping[str, bytes],
    *,
    scheme: Scheme | None = None,
    router_temperature: float = 1.0,
    report: ReportBytes | None = None,
) -> int:
    """Write the parts of all ranks into the files of a draft, and the small files beside them. Collective. Returns the
    bytes of tensors that this rank wrote. Raises CheckpointError on all ranks if writing failed on any of them, or a
    value is not finite.

    Args:
        entries: our name -> its parts in the files, in the order of the model.
        tensors: our name -> source of its values, as for `export_weights`.
        contents: name of a small file -> its content.
    """
    mine = _names_to_write(entries, tensors, ranks)
    with ranks.stage(f"making the files of {draft}"):
        if ranks.is_first:
            for file in files:
                # Only the header, not the final size: ext4 appends to a file twice as fast as it fills a hole.
                (draft / file.name).write_bytes(file.header)
    with ranks.stage(f"writing {draft}") as stage:
        with ExitStack() as opened:
            writer = _FolderWriter(draft, files, opened, scheme, router_temperature)
            writer.write([entries[name] for name in mine], tensors, report)
        stage.value = writer.elements  # after closing the files, which syncs them to the disk
    with ranks.stage(f"completing {draft}"):
        _require_whole(entries, stage.values)
        if ranks.is_first:
            errors = {ERRORS_FILE: json_bytes(writer.errors)} if scheme else {}
            _complete(draft, files, {**contents, **errors})
    return writer.bytes_written


def _names_to_write(entries: Mapping[str, HFEntry], tensors: Mapping[str, Source], ranks: Ranks) -> list[str]:
    """The tensors that this rank writes, in the order of the model. Collective.

    Of several ranks that hold the same elements, only the first writes. Placements do not show all of them: a DTensor
    on part of a mesh does not know its replicas on the rest.
    """
    with ranks.stage("assigning tensors to ranks") as stage:
        if unknown := sorted(set(tensors) - set(entries)):
            raise ValueError(f"{unknown[0]} is not a tensor of this model")
        # One process has no replicas, and a mapping that computes its tensors must not compute them twice.
        stage.value = {} if ranks.size == 1 else {name: _intervals(tensor) for name, tensor in tensors.items()}
    taken = {place for of_rank in stage.values[: ranks.rank] for place in of_rank.items()}
    mine = stage.values[ranks.rank]
    return [name for name in entries if name in tensors and (name, mine.get(name)) not in taken]


def _local(tensor: Source) -> Source:
    """The part of a source on this rank; a stored tensor is read whole, by one process."""
    return local_tensor(tensor) if isinstance(tensor, Tensor) else tensor


def _intervals(tensor: Source) -> tuple[tuple[Interval, ...], ...]:
    """For each dimension, the intervals that this rank holds."""
    return tuple(tuple(intervals_of(index)) for index in global_indices(cast(Tensor, tensor)))


class _FolderWriter:
    """Writes local parts into the files of a draft; opens each file on first use.

    Attributes:
        elements: our name -> elements written, repeats included.
        errors: Hugging Face name -> `error_of` of each quantised weight.
    """

    def __init__(
        self, draft: Path, files: Sequence[OutputFile], opened: ExitStack, scheme: Scheme | None, temperature: float
    ):
        self._draft, self._opened, self._scheme, self._temperature = draft, opened, scheme, temperature
        self.errors: dict[str, dict[str, float]] = {}
        self._file_of = {hf_name: file for file in files for hf_name in file.records}
        if scheme is not None:  # a quantised weight is in the file of what stores it
            first = scheme.suffixes[0]
            self._file_of |= {name.removesuffix(first): file for name, file in self._file_of.items()}
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
        local, intervals = _local(tensor), _intervals(tensor)
        for part in entry.parts:
            if self._scheme is not None and all(part.hf_name + one in self._file_of for one in self._scheme.suffixes):
                weight = local[part.index()].float().cpu()
                _require_finite(part.hf_name, weight)
                stored = self._scheme.quantise(weight)
                self.errors[part.hf_name] = error_of(weight, stored, self._scheme)
                for suffix, values in stored.items():
                    name = part.hf_name + suffix
                    self._file(name).write(name, tuple((0, size) for size in values.shape), values)
                self.elements[entry.name] = self.elements.get(entry.name, 0) + prod(part.hf_shape)
                continue
            dtype = self._file_of[part.hf_name].records[part.hf_name].dtype
            for overlap in overlaps(part, intervals):
                values = folded(entry.name, local[overlap.local], self._temperature).to(dtype).cpu().contiguous()
                _require_finite(part.hf_name, values)
                self._file(part.hf_name).write(part.hf_name, overlap.box, values)
                self.elements[entry.name] = self.elements.get(entry.name, 0) + values.numel()

    def _file(self, hf_name: str) -> TensorFile:
        file = self._file_of[hf_name]
        if file.name not in self._open:
            writable = TensorFile(self._draft / file.name, file.records, writable=True)
            self._open[file.name] = self._opened.enter_context(writable)
        return self._open[file.name]


def _require_finite(hf_name: str, values: Tensor) -> None:
    if not is_finite(values):
        raise ValueError(f"tensor {hf_name} {NOT_FINITE}")


def _require_whole(entries: Mapping[str, HFEntry], of_ranks: list[dict[str, int]]) -> None:
    """Raise unless every element was written: a hole in a file reads as zeros, which look like weights."""
    for name, entry in entries.items():
        expected = sum(prod(part.hf_shape) for part in entry.parts)
        written = sum(elements.get(name, 0) for elements in of_ranks)
        if written != expected:
            raise ValueError(f"{name}: {written:,} of {expected:,} elements were written")


def _complete(draft: Path, files: Sequence[OutputFile], contents: Mapping[str, bytes]) -> None:
    """Write the small files, and give each file of tensors its whole length: zeros at its end may not be written."""
    for file in files:
        with (draft / file.name).open("r+b") as written:
            written.truncate(file.nbytes)
            os.fsync(written.fileno())
    index = {INDEX: index_of({file.name: file.records for file in files})} if len(files) > 1 else {}
    for name, content in {**contents, **index}.items():
        create_durably(draft / name, [content])


def index_of(files: Mapping[str, Mapping[str, Record]]) -> bytes:
    """Content of the index of a folder with several files: name of each file -> its tensors."""
    weight_map = {hf_name: name for name, records in files.items() for hf_name in records}
    total = sum(record.nbytes for records in files.values() for record in records.values())
    return json_bytes({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def json_bytes(value: dict[str, Any]) -> bytes:
    """Content of a JSON file."""
    return json.dumps(value, indent=2).encode() + b"\n"
