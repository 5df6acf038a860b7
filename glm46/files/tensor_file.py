"""Safetensors files of torch tensors, read and written in boxes, so that only the bytes that a rank needs are moved.

The library maps complete files into memory and writes complete files. Here many ranks read and write pieces of the same
files, with reads and writes at an offset, directly from and to existing memory.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.files.regular_file import open_descriptor
from glm46.files.safetensors_header import HeaderEntry, make_header, read_header
from glm46.files.store_ranges import local_data, range_file

Box = tuple[tuple[int, int], ...]
"""Start and length for each dimension."""

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}

WRITE_BYTES = 1 << 18
"""Maximum bytes per write call. On Linux 6.18 with ext4, writes of 256 KiB were three times as fast as writes of 1 or
8 MiB, for which the kernel looks for large contiguous memory."""


@dataclass(frozen=True)
class Record:
    """Dtype, shape and position of a tensor in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """First byte, from the start of the file."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def lay_out(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, Record]]:
    """Return the header of a file with these tensors, and the position of each tensor in the file."""
    ordered = sorted(tensors, key=lambda item: -item[1].itemsize)  # so each starts at a multiple of its item size
    named = ((name, _NAMES[dtype], shape) for name, dtype, shape in ordered)
    header, entries = make_header(named, {"format": "pt"})  # transformers refuses files without "format"
    return header, _records(entries)


def read_records(path: Path) -> dict[str, Record]:
    """Return the tensors of a file; see `read_header`. Raises UserError if the file is missing, truncated, or not in
    this format."""
    entries, _ = read_header(path, "copy or download it again")
    unsupported = [f"{path}: tensor {name} has dtype {e.dtype}" for name, e in entries.items() if e.dtype not in _TYPES]
    if unsupported:
        raise UserError(*(f"{fault}, which torch cannot read; convert it first" for fault in unsupported))
    return _records(entries)


def _records(entries: dict[str, HeaderEntry]) -> dict[str, Record]:
    return {name: Record(_TYPES[entry.dtype], entry.shape, entry.start) for name, entry in entries.items()}


def is_finite(values: Tensor) -> bool:
    """Return True if no value is NaN or infinite; allocates no memory."""
    return values.numel() == 0 or all(bool(extreme.isfinite()) for extreme in values.aminmax())


class TensorFile:
    """An open file whose tensors are read and written in boxes.

    Attributes:
        bytes_moved: bytes read and written so far.
    """

    def __init__(self, path: Path, records: dict[str, Record], *, writable: bool = False):
        self.path = path
        self.records = records
        self._writable = writable
        self.bytes_moved = 0
        self._ranges = None if writable else range_file(path)
        self._descriptor = os.open(path, os.O_RDWR) if writable else open_descriptor(local_data(path))

    def read(self, name: str, box: Box) -> Tensor:
        """Read a box of a tensor as a new tensor on the CPU. Raises OSError if the file ends before the box does, or
        the disk fails."""
        out = torch.empty([length for _, length in box], dtype=self.records[name].dtype)
        self.fill(name, box, out)
        return out

    def fill(self, name: str, box: Box, target: Tensor) -> None:
        """Read a box of a tensor into an existing tensor, without a copy if dtype, device and strides allow. Raises
        OSError if the file ends before the box does, or the disk fails.

        Args:
            target: shape of the box; any dtype, device and strides.
        """
        record = self.records[name]
        if target.dtype != record.dtype or target.device.type != "cpu" or not target.is_contiguous():
            target.copy_(self.read(name, box))
            return
        if self._ranges is not None and target.numel():
            self._ranges.fetch(spans_of(record, box))
        for offset, piece in _pieces(record, box, target):
            done = 0
            while done < len(piece):
                count = os.preadv(self._descriptor, [piece[done:]], offset + done)
                if count == 0:
                    raise OSError(f"{self.path}: ends inside tensor {name}")
                done += count
            self.bytes_moved += done

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Write values into a box of a tensor. ``values``: shape of the box, dtype of the tensor, contiguous, on the
        CPU."""
        record = self.records[name]
        assert values.dtype == record.dtype and values.is_contiguous()
        for offset, piece in _pieces(record, box, values):
            done = 0
            while done < len(piece):
                done += os.pwritev(self._descriptor, [piece[done : done + WRITE_BYTES]], offset + done)
            self.bytes_moved += done

    def close(self) -> None:
        """Close the file; the written bytes are then on the disk."""
        if self._descriptor < 0:
            return
        try:
            if self._writable:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(record: Record, box: Box, values: Tensor) -> Iterable[tuple[int, memoryview]]:
    """Yield runs of bytes that are contiguous in the file and in `values`: (offset in the file, memory)."""
    if values.numel() == 0:
        return
    memory = values.detach().reshape(-1).view(torch.uint8).numpy().data
    for number, (start, stop) in enumerate(spans_of(record, box)):
        run = stop - start
        yield start, memory[number * run : (number + 1) * run]


def spans_of(record: Record, box: Box) -> Iterable[tuple[int, int]]:
    """Yield the first byte and the exclusive end of the runs of a box that are contiguous in the file, all of the same
    length."""
    size = record.dtype.itemsize
    first_full = len(record.shape)  # the box has all of the dimensions from this one on, so they are contiguous
    while first_full > 0 and box[first_full - 1] == (0, record.shape[first_full - 1]):
        first_full -= 1
    outer = max(first_full - 1, 0)
    run = prod(length for _, length in box[outer:]) * size
    strides = [prod(record.shape[dim + 1 :]) * size for dim in range(len(record.shape))]
    base = record.offset + sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    rows = zip(box[:outer], strides[:outer], strict=True)
    for start in product(*(range(0, length * stride, stride) for (_, length), stride in rows)):
        yield base + sum(start), base + sum(start) + run
