"""Safetensors files of NumPy arrays: written in one call, read through one memory map."""

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from glm46.files.durable import FileRecord, replace_durably
from glm46.files.regular_file import open_regular
from glm46.files.safetensors_header import make_header, read_header
from glm46.files.store_ranges import local_data

_CODES = {"U8": "<u1", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "F32": "<f4", "F64": "<f8"}
_DTYPES: dict[str, np.dtype] = {name: np.dtype(code) for name, code in _CODES.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> FileRecord:
    """Write a file durably: complete or absent, see `replace_durably`. Raises OSError if the disk is full or not
    writable. ``arrays``: written in this order; put wider dtypes first, for alignment."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    kinds = ((name, _NAMES[array.dtype.newbyteorder("<")], array.shape) for name, array in contiguous.items())
    header, _ = make_header(kinds, metadata)
    return replace_durably(path, [header, *(array.reshape(-1).view(np.uint8) for array in contiguous.values())])


def map_arrays(path: Path, remedy: str) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, int]]:
    """Map a file. Returns read-only views of all arrays, its metadata, and the offset of each array in bytes.

    Of a link to an object of a store only the header is fetched; see `RangeFile`.

    A slice of a memory map is three times as fast as the library's slice, and processes share its memory.

    Args:
        remedy: advice for the user about a damaged file.

    Raises:
        UserError: the file is missing, truncated, damaged, or has a dtype that is not supported here.
    """
    entries, metadata = read_header(path, remedy)
    # One map for all arrays: each map holds an open file, and a process may have about a thousand.
    with open_regular(local_data(path)) as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {
        name: np.frombuffer(content, _DTYPES[entry.dtype], prod(entry.shape), entry.start).reshape(entry.shape)
        if entry.nbytes
        else np.empty(entry.shape, _DTYPES[entry.dtype])
        for name, entry in entries.items()
    }
    return arrays, metadata, {name: entry.start for name, entry in entries.items()}
