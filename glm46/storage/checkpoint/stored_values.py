"""Lazy tensors of a checkpoint in DCP's format: boxes are read from the disk directly into the target memory.

DCP's reader allocates three times the memory of a tensor, which takes most of its time. `dcp.fill_tensors` uses that
reader and gives the same values; it serves as the fallback for records of another form.
"""

import io
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from glm46.compute.distributed.ranks import ALONE, Ranks
from glm46.config.errors import UserError
from glm46.files.regular_file import open_regular
from glm46.files.tensor_file import Record, TensorFile
from glm46.run.function import NetworkFunction, function_of_meta
from glm46.storage.checkpoint.dcp import fill_tensors
from glm46.storage.checkpoint.folder_kind import Kind, require_kind
from glm46.storage.checkpoint.integrity import read_meta, records_of, step_of, verify_folder
from glm46.storage.checkpoint.metadata import read_checked_metadata

MODEL_PREFIX = "model."
"""The trainer's prefix for the names of parameters and buffers."""

_LOCAL_HEADER = 30
"""Bytes of a zip entry's local header before its name; its last four are the lengths of name and extra field."""


class DiskTensor:
    """A tensor on the disk; only the requested parts are read.

    Attributes:
        shape, dtype: of the full tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: tuple[int | slice, ...]) -> Tensor:
        """Read a part as a new tensor on the CPU; an int or a slice for each dimension. Raises what `_fill` raises."""
        slices = [item if isinstance(item, slice) else slice(item, item + 1) for item in index]
        ranges = [range(size)[item] for item, size in zip(slices, self.shape, strict=True)]
        out = torch.empty([len(places) for places in ranges], dtype=self.dtype)
        self._fill(out, ranges)
        return out[tuple(slice(None) if isinstance(item, slice) else 0 for item in index)]

    def read(self) -> Tensor:
        """Read the whole tensor. Raises what `_fill` raises."""
        return self[(slice(None),) * len(self.shape)]

    def _fill(self, out: Tensor, ranges: Sequence[range]) -> None:
        raise NotImplementedError


class StoredTensor(DiskTensor):
    """A tensor of a checkpoint. Indexing raises OSError if a file cannot be read, or ends early.

    Args:
        folder: a step folder whose files are verified.
        metadata: of the folder, checked; lists the tensor.
        name: the tensor's name in the checkpoint.
    """

    def __init__(self, folder: Path, metadata: Metadata, name: str):
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), "the metadata is checked"
        self.shape = tuple(entry.size)
        self.dtype = entry.properties.dtype
        self._folder = folder
        self._metadata = metadata
        self._name = name
        self._chunks = entry.chunks
        self._places: dict[tuple[int, ...], tuple[Path, Record] | None] = {}

    def _fill(self, out: Tensor, ranges: Sequence[range]) -> None:
        for chunk in self._chunks:
            shared = [
                (max(places.start, first), min(places.stop, first + size))
                for places, first, size in zip(ranges, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in shared):
                continue
            target = out[_slices(shared, [places.start for places in ranges])]
            if (place := self._place_of(chunk)) is None:  # only DCP can read it, and reads whole tensors
                full = torch.empty(self.shape, dtype=self.dtype)
                fill_tensors(self._folder, self._metadata, {self._name: full}, is_first=True)
                target.copy_(full[_slices(shared, [0] * len(shared))])
                continue
            path, record = place
            box = tuple(
                (start - first, stop - start) for (start, stop), first in zip(shared, chunk.offsets, strict=True)
            )
            with TensorFile(path, {self._name: record}) as file:
                file.fill(self._name, box, target)

    def _place_of(self, chunk: ChunkStorageMetadata) -> tuple[Path, Record] | None:
        """Return the file of a chunk and the position of its values there; None if only DCP can read them."""
        key = tuple(chunk.offsets)
        if key not in self._places:
            info = self._metadata.storage_data[MetadataIndex(self._name, chunk.offsets)]
            path = self._folder / info.relative_path
            sizes = tuple(chunk.sizes)
            first = first_byte(path, info.offset, info.length, sizes, self.dtype)
            self._places[key] = None if first is None else (path, Record(self.dtype, sizes, first))
        return self._places[key]


class StepTensors(dict[str, StoredTensor]):
    """The model of a step folder: its tensors by glm46 name, read from the disk when they are indexed.

    Attributes:
        meta: meta of the checkpoint.
    """

    def __init__(self, folder: Path, ranks: Ranks = ALONE):
        """Open and verify the folder. Collective over ``ranks``, which share the verification.

        Raises:
            UserError: the folder is not a checkpoint, or is damaged.
        """
        require_kind(folder, Kind.STEP)
        body, faults = verify_folder(folder, step_of(folder.absolute()), ranks)
        metadata = None
        if body is not None:
            metadata, faults = read_checked_metadata(folder, records_of(body))
        if metadata is None:
            raise UserError(*faults)
        self.meta = read_meta(folder)
        names = [name for name in metadata.state_dict_metadata if name.startswith(MODEL_PREFIX)]
        super().__init__({name.removeprefix(MODEL_PREFIX): StoredTensor(folder, metadata, name) for name in names})

    @property
    def function(self) -> NetworkFunction:
        """The function that the model was trained as, see `function_of_meta`."""
        return function_of_meta(self.meta)


def _slices(box: list[tuple[int, int]], origin: list[int]) -> tuple[slice, ...]:
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(box, origin, strict=True))


def first_byte(path: Path, offset: int, length: int, sizes: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Return the byte of a file at which a record's contiguous values begin; None if the record has another form.

    A record is what `torch.save` writes for a tensor: a zip archive, uncompressed, with a pickle that describes the
    tensor and one entry with its values. Source: torch/serialization.py, caffe2/serialize/inline_container.cc. torch
    returns the position only under `FakeTensorMode`, whose imports take 31 MB (2.13, CPU) to 115 MB (2.15, CUDA).
    """
    with open_regular(path) as file:
        record = io.BufferedReader(_Slice(file, offset, length))
        with torch.serialization.skip_data():  # allocates memory for the values without reading them
            empty = torch.load(record, map_location="cpu", weights_only=True)
        if not (isinstance(empty, Tensor) and empty.dtype == dtype and empty.shape == sizes):
            return None
        with zipfile.ZipFile(record) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            values = entries.get("data/0")
            order = entries.get("byteorder")
            if values is None or order is None or archive.read(order) != b"little":
                return None
        is_plain = empty.is_contiguous() and empty.storage_offset() == 0
        if not is_plain or values.compress_type != zipfile.ZIP_STORED or values.file_size != empty.nbytes:
            return None
        file.seek(offset + values.header_offset + _LOCAL_HEADER - 4)
        name_and_extra = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
    return offset + values.header_offset + _LOCAL_HEADER + name_and_extra


class _Slice(io.RawIOBase):
    """A range of an open file, as a file."""

    def __init__(self, file: io.BufferedReader, first: int, length: int):
        self._file = file
        self._first = first
        self._length = length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self._place = place + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._first + self._place)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._place)])
        self._place += count
        return count
