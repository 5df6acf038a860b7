"""Writes and reads tensors in the format of ``torch.distributed.checkpoint`` (DCP), without its silent failures.

Planner, file format and resharding are DCP's, so its tools read these files. This module adds: one writer thread per
rank (with more, DCP 2.13 loses write errors), hashes computed while files are written, fsync after Python's buffer is
flushed (DCP syncs ``.metadata`` before), and checks of coverage, shapes and dtypes.
"""

import hashlib
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from os import PathLike, fsync
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from glm46.compute.distributed.ranks import Ranks
from glm46.files.durable import Closer, FileRecord
from glm46.files.store_ranges import local_data
from glm46.files.tensor_file import WRITE_BYTES, Box
from glm46.storage.checkpoint.metadata import METADATA, check_metadata, read_checked_metadata, tensor_entries


class _HashedFile:
    """A file that is written and hashed: one thread hashes each piece while another one writes it."""

    def __init__(self, path: Path, hasher: ThreadPoolExecutor):
        self._file = path.open("xb", buffering=WRITE_BYTES)
        self._digest = hashlib.sha256()
        self._hasher = hasher
        self._length = 0

    def write(self, piece: Any) -> int:
        length = memoryview(piece).nbytes
        if length < WRITE_BYTES:
            self._digest.update(piece)
            self._file.write(piece)
        else:
            hashed = self._hasher.submit(self._digest.update, piece)
            try:
                for start in range(0, length, WRITE_BYTES):
                    self._file.write(memoryview(piece).cast("B")[start : start + WRITE_BYTES])
            finally:
                hashed.result()  # the memory of the piece is valid only until this call returns
        self._length += length
        return length

    def tell(self) -> int:
        return self._length

    def flush(self) -> None:
        """Do nothing, like `close`: DCP calls both at unsuitable times, or never, and would wait for the disk."""

    close = flush

    def end(self) -> FileRecord:
        """Close the file and return its record; the content is then on the disk."""
        try:
            self._file.flush()
            fsync(self._file.fileno())
        finally:
            self._file.close()
        return FileRecord(bytes=self._length, sha256=self._digest.hexdigest())


class _HashingFileSystem(FileSystem):
    """DCP's file system, which records each written file once it is on the disk."""

    def __init__(self, hasher: ThreadPoolExecutor, closer: Closer):
        self.records: dict[str, FileRecord] = {}
        self._hasher = hasher
        self._closer = closer

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            raise ValueError(f"{path}: mode {mode!r}, but a writer opens files with 'wb' only")
        file = _HashedFile(Path(path), self._hasher)

        def end() -> None:
            self.records[Path(path).name] = file.end()

        try:
            yield file
        finally:
            self._closer.close(end)

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        self._closer.finish()  # a file has its record once it is closed
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _LinkedFiles(FileSystem):
    """DCP's file system, which reads the fetched ranges of files that are links to objects of a store."""

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[Any, None, None]:
        with local_data(Path(path)).open(mode) as stream:
            yield stream


class _Writer(FileSystemWriter):
    """DCP's writer on the hashing file system."""

    fs: _HashingFileSystem

    def __init__(self, folder: Path, hasher: ThreadPoolExecutor, closer: Closer, *, file_per_tensor: bool):
        per_rank = not file_per_tensor
        super().__init__(folder, single_file_per_rank=per_rank, sync_files=False, thread_count=1, overwrite=False)
        self.fs = _HashingFileSystem(hasher, closer)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # DCP would store the path of the temporary folder, as a pickled Path


class _Planner(DefaultSavePlanner):
    """DCP's planner for the live tensors; it reads the data from their staged copies if there are any."""

    def __init__(self, staged: Mapping[str, Tensor] | None):
        super().__init__()
        self._staged = staged

    def lookup_object(self, index: MetadataIndex) -> object:
        return super().lookup_object(index) if self._staged is None else self._staged[index.fqn]


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    staged: Mapping[str, Tensor] | None = None,
    *,
    file_per_tensor: bool = False,
) -> dict[str, FileRecord]:
    """Write tensors into an empty folder that all ranks see. Collective. Raises CheckpointError on all ranks when any
    rank failed.

    Args:
        folder: exists already.
        tensors: Tensor or DTensor by name. A plain tensor under one name on several ranks must be the same everywhere.
        staged: this rank's part of each tensor in host memory, to be written instead of the live values.
        file_per_tensor: DCP holds all tensors of a file in memory; with one file each, ``staged`` may be lazy.

    Returns:
        The files written by all ranks, by name. They are on the disk.
    """
    _check_replicas(tensors, ranks, staged)
    with ThreadPoolExecutor(1) as hasher, Closer() as closer:
        planner = _Planner(staged)
        writer = _Writer(folder, hasher, closer, file_per_tensor=file_per_tensor)
        # A plan and the write results have a record of each tensor: megabytes, so only the first rank gets all of them.
        with ranks.stage("planning the save", to="first") as local_plans:
            planner.set_up_planner(dict(tensors), storage_meta=None, is_coordinator=ranks.is_first)
            writer.set_up_storage_writer(ranks.is_first)
            local_plans.value = writer.prepare_local_plan(planner.create_local_plan())
        metadata = None
        with ranks.stage("planning the save", to="each") as final_plan:
            if ranks.is_first:
                plans, metadata = planner.create_global_plan(local_plans.values)
                final_plan.value = writer.prepare_global_plan(plans)
        with ranks.stage("writing tensors", to="first") as written:
            written.value = writer.write_data(planner.finish_plan(final_plan.value), planner).value()
            closer.finish()
        with ranks.stage("writing tensors") as records:
            records.value = writer.fs.records
        files = {name: record for rank_records in records.values for name, record in rank_records.items()}
        with ranks.stage("writing metadata") as metadata_stage:
            if metadata is not None:
                results = written.values
                writer.finish(metadata, results)
                # torch 2.11 finishes a copy of the metadata.
                metadata.storage_data = {
                    result.index: result.storage_data for rank_results in results for result in rank_results
                }
                faults = check_metadata(folder, metadata, files)
                if faults:  # DCP 2.13 can report success with records missing
                    raise OSError("; ".join(faults))
                metadata_stage.value = {METADATA: writer.fs.records[METADATA]}
    return {**files, **metadata_stage.values[0]}


def _check_replicas(tensors: Mapping[str, Tensor], ranks: Ranks, staged: Mapping[str, Tensor] | None) -> None:
    """Refuse a plain tensor that differs between ranks under one name; DCP would keep one rank's value. Collective.
    Raises CheckpointError on all ranks."""
    if ranks.size == 1:
        return
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    work = "comparing replicated tensors"
    with ranks.stage(work) as stage:
        stage.value = list(plain)
    owners = Counter(chain(*stage.values))
    with ranks.stage(work) as stage:
        shared = [name for name in plain if owners[name] > 1]
        stage.value = {name: _fingerprint(plain[name] if staged is None else staged[name]) for name in shared}
    with ranks.stage(work):
        for name in shared:
            owner = next(rank for rank, fingerprints in enumerate(stage.values) if name in fingerprints)
            if stage.values[owner][name] != stage.values[ranks.rank][name]:
                raise ValueError(f"{name} differs from the one of rank {owner}; give it a name per rank")


def _fingerprint(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tuple(values.shape)} {values.dtype}".encode())
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, FileRecord],
    *,
    optional: Sequence[str],
    ranks: Ranks,
    ignored: Sequence[str] = (),
) -> list[str]:
    """Fill tensors in place from a folder whose files are verified. Collective.

    If there is a fault, no tensor is changed on any rank. Mesh and world size may differ from the save's.

    Args:
        tensors: tensors to fill; the ranks may request different names.
        files: the files of the checkpoint, as its manifest lists them.
        optional: prefixes of names that may be absent from the checkpoint (the tensor keeps its value) or stay unread.
        ignored: prefixes of names in the checkpoint that may stay unread; "" allows all.

    Returns:
        The faults of all ranks, one line each, equal on all ranks; empty when the tensors were filled.

    Raises:
        CheckpointError: on all ranks, when reading failed on any of them.
    """
    with ranks.stage("reading metadata") as stage:
        metadata, faults = read_checked_metadata(folder, files)
        stage.value = faults if metadata is None else _name_faults(folder, tensors, metadata, optional)
    faults = sorted({fault for rank_faults in stage.values for fault in rank_faults})
    if metadata is None or faults:
        return faults
    stored = sorted(metadata.state_dict_metadata)
    are_requested = ranks.any([name in tensors for name in stored])
    unread = [name for name, is_requested in zip(stored, are_requested, strict=True) if not is_requested]
    may_be_unread = (*optional, *ignored)
    if unknown := [name for name in unread if not name.startswith(may_be_unread)]:
        return [f"{folder}: holds {name}, which this run does not know" for name in unknown]
    present = {name: tensor for name, tensor in tensors.items() if name in metadata.state_dict_metadata}
    with ranks.stage("reading tensors"):
        fill_tensors(folder, metadata, present, is_first=ranks.is_first)
    return []


@torch.no_grad()
def fill_tensors(folder: Path, metadata: Metadata, tensors: Mapping[str, Tensor], *, is_first: bool) -> None:
    """Fill tensors in place; the metadata is checked and lists all of them. Not collective."""
    planner = DefaultLoadPlanner()
    reader = FileSystemReader(folder)
    reader.fs = _LinkedFiles()
    planner.set_up_planner(dict(tensors), metadata, is_first)
    reader.set_up_storage_reader(metadata, is_first)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


class NeededPart(NamedTuple):
    """The part of a stored chunk that a rank reads."""

    file: str
    offset: int
    """First byte of the chunk's record in the file."""
    length: int
    """Bytes of the record."""
    sizes: tuple[int, ...]
    """Shape of the chunk."""
    dtype: torch.dtype
    box: Box
    """Start and length of the part, for each dimension of the chunk."""

    @property
    def is_whole(self) -> bool:
        """True if the rank reads all of the chunk."""
        return self.box == tuple((0, size) for size in self.sizes)


def needed_parts(metadata: Metadata, tensors: Mapping[str, Tensor]) -> list[NeededPart]:
    """Return the stored parts of these tensors, on this rank; the metadata is checked. Tensors that it lacks, or that
    have another shape there, are skipped. Not collective."""
    entries = tensor_entries(metadata)
    present = {
        name: tensor for name, tensor in tensors.items() if name in entries and entries[name].size == tensor.shape
    }
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(present), metadata, is_coordinator=False)
    parts = []
    for item in planner.create_local_plan().items:
        entry = entries[item.storage_index.fqn]
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
        record = metadata.storage_data[item.storage_index]
        box = tuple(zip(item.storage_offsets, item.lengths, strict=True))
        place = (record.relative_path, record.offset, record.length)
        parts.append(NeededPart(*place, tuple(chunk.sizes), entry.properties.dtype, box))
    return parts


def _name_faults(folder: Path, tensors: Mapping[str, Tensor], metadata: Metadata, optional: Sequence[str]) -> list[str]:
    faults = []
    for name, tensor in tensors.items():
        entry = metadata.state_dict_metadata.get(name)
        if entry is None:
            if not name.startswith(tuple(optional)):
                faults.append(f"{folder}: lacks {name} {tuple(tensor.shape)}")
        elif not isinstance(entry, TensorStorageMetadata):
            faults.append(f"{folder}: {name} is not a tensor")
        elif tuple(entry.size) != tuple(tensor.shape):
            faults.append(f"{folder}: {name} has shape {tuple(entry.size)}, this run needs {tuple(tensor.shape)}")
        elif entry.properties.dtype != tensor.dtype:
            faults.append(f"{folder}: {name} is {entry.properties.dtype}, this run needs {tensor.dtype}")
    return faults
