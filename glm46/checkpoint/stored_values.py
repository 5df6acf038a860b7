"""Tensors of a checkpoint in DCP's format, read from the disk in boxes, directly into the target memory.

DCP's reader allocates three times the memory of a tensor, which takes most of its time. `dcp.fill_tensors` uses that
reader and gives the same values; it serves as the fallback for records of another form.
"""

from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from glm46 import compat
from glm46.checkpoint.dcp import fill_tensors
from glm46.files.tensor_file import Record, TensorFile


class StoredTensor:
    """A tensor on the disk. Indexing with an int or a slice for each dimension reads that part.

    Args:
        folder: a step folder whose files are verified.
        metadata: of the folder, checked; lists the tensor.
        name: the tensor's name in the checkpoint.

    Attributes:
        shape, dtype, nbytes: of the whole tensor.
    """

    def __init__(self, folder: Path, metadata: Metadata, name: str):
        entry = metadata.state_dict_metadata[name]
        self.shape, self.dtype = tuple(entry.size), entry.properties.dtype
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        self._folder, self._metadata, self._name = folder, metadata, name
        self._chunks = entry.chunks
        self._places: dict[tuple[int, ...], tuple[Path, Record] | None] = {}

    def __getitem__(self, index: tuple[int | slice, ...]) -> Tensor:
        """A new tensor on the CPU.

        Raises:
            OSError: a file cannot be read, or ends early.
        """
        ranges = [
            range(size)[one] if isinstance(one, slice) else range(one, one + 1)
            for one, size in zip(index, self.shape, strict=True)
        ]
        out = torch.empty([len(places) for places in ranges], dtype=self.dtype)
        for chunk in self._chunks:
            shared = [
                (max(places.start, first), min(places.stop, first + size))
                for places, first, size in zip(ranges, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in shared):
                continue
            target = out[_slices(shared, [places.start for places in ranges])]
            place = self._place_of(chunk)
            if place is None:
                target.copy_(self._by_dcp()[_slices(shared, [0] * len(shared))])
                continue
            path, record = place
            box = tuple(
                (start - first, stop - start) for (start, stop), first in zip(shared, chunk.offsets, strict=True)
            )
            with TensorFile(path, {self._name: record}) as file:
                file.fill(self._name, box, target)
        return out[tuple(slice(None) if isinstance(one, slice) else 0 for one in index)]

    def _place_of(self, chunk: ChunkStorageMetadata) -> tuple[Path, Record] | None:
        """File of a chunk and the position of its values there; None when only DCP can read them."""
        key = tuple(chunk.offsets)
        if key not in self._places:
            info = self._metadata.storage_data[MetadataIndex(self._name, chunk.offsets)]
            path, sizes = self._folder / info.relative_path, tuple(chunk.sizes)
            with path.open("rb") as file:
                described, first = compat.find_saved_tensor(file, info.offset, info.length)
            is_plain = described.is_contiguous() and described.storage_offset() == 0
            fits = is_plain and described.dtype == self.dtype and described.shape == sizes
            self._places[key] = (path, Record(self.dtype, sizes, info.offset + first)) if fits else None
        return self._places[key]

    def _by_dcp(self) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        fill_tensors(self._folder, self._metadata, {self._name: whole}, is_first=True)
        return whole


def _slices(box: list[tuple[int, int]], origin: list[int]) -> tuple[slice, ...]:
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(box, origin, strict=True))
