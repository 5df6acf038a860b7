"""Reader and writer for the header of safetensors files, without torch.

A file is eight bytes (length of the header, little-endian), the header (JSON: name -> dtype, shape, first and last
byte), then the data. The library `safetensors` reads headers; offsets follow from its order of the tensors. It can only
write complete files from tensors in memory, so headers of files that are written in pieces are made here.
Source: github.com/huggingface/safetensors.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from glm46.config.errors import UserError
from glm46.files.file_content import known_fault
from glm46.files.regular_file import open_regular
from glm46.files.store_ranges import local_data, range_file

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by dtype."""

_LONGEST_HEADER = 100_000_000
"""Maximum length of a header in bytes, as in the library."""


@dataclass(frozen=True)
class HeaderEntry:
    """Dtype, shape and position of a tensor in a file."""

    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, HeaderEntry]]:
    """Return the bytes of a header, and the position of each tensor in the file. ``tensors``: name, dtype and shape of
    each, in the order of the file. Put wider dtypes first, so that every tensor starts at a multiple of its item
    size."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        start = end
        end += prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first_byte = 8 + len(text)
    entries = {
        name: HeaderEntry(value["dtype"], tuple(value["shape"]), first_byte + value["data_offsets"][0])
        for name, value in header.items()
        if name != "__metadata__"
    }
    return len(text).to_bytes(8, "little") + text, entries


def read_header(path: Path, remedy: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Return the tensors of a file and its metadata, after checking that header and file size match exactly. Raises
    UserError if the file is missing, truncated, or not in this format.

    Args:
        remedy: advice for the user; ends the messages about a missing or damaged file.
    """
    try:
        if (ranges := range_file(path)) is not None:
            length = int.from_bytes(ranges.read(0, 8), "little")
            ranges.fetch([(8, min(8 + length, ranges.length))])
        data = local_data(path)
        with open_regular(data) as file, safe_open(data, "np") as reader:
            start = 8 + int.from_bytes(file.read(8), "little")
            entries = {}
            for name in reader.offset_keys():  # the library has checked that there are no gaps between them
                tensor = reader.get_slice(name)
                if (dtype := tensor.get_dtype()) not in ITEM_BYTES:
                    raise UserError(f"{path}: tensor {name} has dtype {dtype}, which glm46 cannot read; convert it")
                entries[name] = HeaderEntry(dtype, tuple(tensor.get_shape()), start)
                start += entries[name].nbytes
            return entries, reader.metadata() or {}
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    except (OSError, SafetensorError) as error:
        if (cause := known_fault(path, error)) is not None:
            raise UserError(f"{path}: {cause}") from error
        size_fault = _wrong_size(path) or f"not a safetensors file, or its header is corrupt ({error})"
        raise UserError(f"{path}: {size_fault}; {remedy}") from error


def _wrong_size(path: Path) -> str | None:
    """Return how the size of a file contradicts its header; None if it agrees, or if the header cannot be parsed."""
    size = path.stat().st_size
    if size < 8:
        return f"truncated: {size} bytes"
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _LONGEST_HEADER:
                return None
            text = file.read(length)
            if len(text) < length:
                return f"truncated: its header takes {8 + length:,} bytes, the file has {size:,}"
            ends = [entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if size == expected:
        return None
    return f"{'truncated' if size < expected else 'damaged'}: {size:,} bytes, its header describes {expected:,}"
