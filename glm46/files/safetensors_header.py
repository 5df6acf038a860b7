"""Reader and writer for the header of safetensors files, without torch.

A file is eight bytes (length of the header, little-endian), the header (JSON: name -> dtype, shape, first and last
byte), then the data. The library `safetensors` does not expose the offsets of tensors, which are needed here to read
only the bytes that a process uses. Source: github.com/huggingface/safetensors.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element, by dtype."""

_LONGEST_HEADER = 100_000_000
"""In bytes; the limit of the library."""


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
    """The bytes of a header, and the position of each tensor in the file.

    Args:
        tensors: name, dtype and shape of each, in the order of the file. Put wider dtypes first, so that every tensor
            starts at a multiple of its item size.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    entries, end = {}, 0
    for name, dtype, shape in tensors:
        entry = HeaderEntry(dtype, tuple(shape), end)
        end += entry.nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [entry.start, end]}
        entries[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    placed = {name: HeaderEntry(entry.dtype, entry.shape, first + entry.start) for name, entry in entries.items()}
    return len(text).to_bytes(8, "little") + text, placed


def read_header(path: Path, remedy: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """The tensors of a file and its metadata, after checking that header and file size match exactly.

    Args:
        remedy: what the user can do about a damaged file; the end of each message.

    Raises:
        UserError: the file is missing, truncated, or not in this format.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise UserError(
                    f"{path}: not a safetensors file, or truncated ({size} bytes, header of {length}); {remedy}"
                )
            content = json.loads(file.read(length))
            metadata = content.pop("__metadata__", {})
            entries = {name: _entry(described, 8 + length) for name, described in content.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: header is corrupt ({type(error).__name__}: {error}); {remedy}") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise UserError(
                f"{path}: tensor {name} starts at byte {entry.start}, the one before it ends at {end}; {remedy}"
            )
        end += entry.nbytes
    if end != size:
        raise UserError(f"{path}: {size} bytes where its header says {end}; it is truncated or damaged; {remedy}")
    return entries, metadata


def _entry(described: dict[str, Any], first: int) -> HeaderEntry:
    start, end = described["data_offsets"]
    entry = HeaderEntry(described["dtype"], tuple(described["shape"]), first + start)
    if any(type(number) is not int or number < 0 for number in (*entry.shape, start, end)):
        raise ValueError(f"{described} has a size that is not a non-negative integer")
    if end - start != entry.nbytes:
        raise ValueError(f"{described} has {end - start} bytes")
    return entry
