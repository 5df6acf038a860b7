"""Writes tensors by all ranks concurrently into the same files of a folder, which gets its name once it is complete.

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
from glm46.storage.checkpoint.boxes import Interval, intervals_of, overlaps
from glm46.storage.checkpoint.stored_values import DiskTensor
from glm46.storage.huggingface.folder_tensors import INDEX
from glm46.storage.huggingface.import_weights import NOT_FINITE, ReportBytes
from glm46.storage.huggingface.names import HFEntry
from glm46.storage.huggingface.schemes import ERRORS_FILE, Scheme, error_of

Source = Tensor | DiskTensor
"""Where a tensor's values come from: a plain tensor, a DTensor (this rank's part of it), or a tensor on the disk."""


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
    """Make an empty folder next to `folder`, and rename it to `folder` if the block succeeds, or remove it if it fails.
    Collective; in the block a failure must reach all ranks (`Ranks.stage`). Raises UserError on all ranks if the folder
    exists, or the disk has less space than `nbytes`."""
    draft = folder.with_name(folder.name + ".tmp")
    with ranks.stage(f"checking {folder}") as stage:
        if ranks.is_first:
            exists_fault = f"{folder}: exists already; choose a new folder" if folder.exists() else None
            stage.value = exists_fault or space_fault(folder, nbytes)
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
    """Write the parts of all ranks into the files of a draft, and the small files next to them. Collective. Returns the
    bytes of tensors that this rank wrote. Raises CheckpointError on all ranks if writing failed on any of them, or a
    value is not finite.

    Args:
        entries: parts in the files by our name, in the order of the model.
        tensors: source of the values by our name, as for `export_weights`.
        contents: content by name of each small file.
    """
    names = _names_to_write(entries, tensors, ranks)
    with ranks.stage(f"making the files of {draft}"):
        if ranks.is_first:
            for file in files:
                # Only the header, not the final size: ext4 appends to a file twice as fast as it fills a hole.
                (draft / file.name).write_bytes(file.header)
    with ranks.stage(f"writing {draft}") as stage:
        with ExitStack() as opened:
            writer = _FolderWriter(draft, files, opened, scheme, router_temperature)
            writer.write([entries[name] for name in names], tensors, report)
        stage.value = writer.elements  # after closing the files, which syncs them to the disk
    with ranks.stage(f"completing {draft}"):
        _require_whole(entries, stage.values)
        if ranks.is_first:
            errors = {ERRORS_FILE: json_bytes(writer.errors)} if scheme else {}
            _complete(draft, files, {**contents, **errors})
    return writer.bytes_written


def _names_to_write(entries: Mapping[str, HFEntry], tensors: Mapping[str, Source], ranks: Ranks) -> list[str]:
    """Return the tensors that this rank writes, in the order of the model. Collective.

    If several ranks hold the same elements, only the first writes them. Placements do not show all duplicates: a
    DTensor on part of a mesh does not know its replicas on the rest.
    """
    with ranks.stage("assigning tensors to ranks") as stage:
        if unknown := sorted(set(tensors) - set(entries)):
            raise ValueError(f"{unknown[0]} is not a tensor of this model")
        # One process has no replicas, and a mapping that computes its tensors must not compute them twice.
        stage.value = {} if ranks.size == 1 else {name: _intervals(tensor) for name, tensor in tensors.items()}
    assigned = {place for intervals in stage.values[: ranks.rank] for place in intervals.items()}
    local_intervals = stage.values[ranks.rank]
    return [name for name in entries if name in tensors and (name, local_intervals.get(name)) not in assigned]


def _local(tensor: Source) -> Source:
    """Return the part of a source on this rank; a stored tensor is read completely, by one process."""
    return local_tensor(tensor) if isinstance(tensor, Tensor) else tensor


def _intervals(tensor: Source) -> tuple[tuple[Interval, ...], ...]:
    """Return, for each dimension, the intervals that this rank holds."""
    return tuple(tuple(intervals_of(index)) for index in global_indices(cast(Tensor, tensor)))


class _FolderWriter:
    """Writes local parts into the files of a draft; opens each file on first use.

    Attributes:
        elements: number of elements written by our name, repeats included.
        errors: `error_of` of each quantised weight by Hugging Face name.
    """

    def __init__(
        self, draft: Path, files: Sequence[OutputFile], opened: ExitStack, scheme: Scheme | None, temperature: float
    ):
        self._draft = draft
        self._opened = opened
        self._scheme = scheme
        self._temperature = temperature
        self.errors: dict[str, dict[str, float]] = {}
        self._file_of = {hf_name: file for file in files for hf_name in file.records}
        if scheme is not None:  # map a quantised weight to the file of its first stored tensor
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
        last_part = {self._file_of[hf_name].name: (name, hf_name) for name, hf_name in parts}
        with Closer() as closer:
            for entry in entries:
                self._write_part(entry, tensors[entry.name])
                for name, hf_name in last_part.values():
                    if name == entry.name:
                        closer.close(self._file(hf_name).close)
                if report is not None:
                    report(_local(tensors[entry.name]).nbytes)

    def _write_part(self, entry: HFEntry, tensor: Source) -> None:
        """Write this rank's part of one of our tensors under all of its Hugging Face names."""
        local = _local(tensor)
        intervals = _intervals(tensor)
        for part in entry.parts:
            if self._scheme is not None and all(
                part.hf_name + suffix in self._file_of for suffix in self._scheme.suffixes
            ):
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
            for overlap in overlaps(part.start, part.hf_shape, intervals):
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


def _require_whole(entries: Mapping[str, HFEntry], elements_by_rank: list[dict[str, int]]) -> None:
    """Raise unless every element was written: a hole in a file reads as zeros, which look like weights."""
    for name, entry in entries.items():
        expected = sum(prod(part.hf_shape) for part in entry.parts)
        written = sum(elements.get(name, 0) for elements in elements_by_rank)
        if written != expected:
            raise ValueError(f"{name}: {written:,} of {expected:,} elements were written")


def _complete(draft: Path, files: Sequence[OutputFile], contents: Mapping[str, bytes]) -> None:
    """Write the small files, and extend each tensor file to its full length: zeros at its end may not have been
    written."""
    for file in files:
        with (draft / file.name).open("r+b") as written:
            written.truncate(file.nbytes)
            os.fsync(written.fileno())
    index = {INDEX: index_of({file.name: file.records for file in files})} if len(files) > 1 else {}
    for name, content in {**contents, **index}.items():
        create_durably(draft / name, [content])


def index_of(files: Mapping[str, Mapping[str, Record]]) -> bytes:
    """Return the content of the index of a folder with several files. ``files``: records by file name."""
    weight_map = {hf_name: name for name, records in files.items() for hf_name in records}
    total = sum(record.nbytes for records in files.values() for record in records.values())
    return json_bytes({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def json_bytes(value: dict[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return json.dumps(value, indent=2).encode() + b"\n"
