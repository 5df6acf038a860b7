"""One shard: a safetensors file with the tokens of whole documents, read through memory maps.

``doc_ends`` I64 [documents] holds the offset behind each document's last token (its ``<|endoftext|>``), ``tokens`` U32
[tokens] the ids, ``checksums`` U32 the CRC-32 of each block of `BLOCK_BYTES` of the first, then of the second. Any
safetensors reader opens it. ``__metadata__`` says what it is and how much it holds.
"""

import hashlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm46.config.errors import UserError

FORMAT = "glm46-shard-2"
FORMAT_WITHOUT_CHECKSUMS = "glm46-shard-1"

BLOCK_BYTES = 4096
"""What one checksum covers. Whole blocks are read and compared, so a smaller one makes short reads cheaper."""

_DTYPES = {"U8": np.dtype("<u1"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8"), "U64": np.dtype("<u8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_REMEDY = "remove the folder and run 'python -m glm46 prepare' again"


@dataclass(frozen=True)
class Shard:
    """Memory maps of one shard.

    Attributes:
        tokens: uint32 [tokens].
        doc_ends: int64 [documents], ascending; the last one equals the number of tokens.
        metadata: the strings of the header.
        checksums: uint32, CRC-32 of each block of ``doc_ends``, then of ``tokens``; None in the older format.
        places: first byte of each tensor in the file, by name.
    """

    tokens: np.ndarray
    doc_ends: np.ndarray
    metadata: dict[str, str]
    checksums: np.ndarray | None
    places: dict[str, int]


def block_checksums(array: np.ndarray) -> np.ndarray:
    """CRC-32 of each block of `BLOCK_BYTES` of an array's bytes, the last one perhaps shorter; uint32 [blocks]."""
    data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return np.array([zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)], np.uint32)


def write_tensors(file: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    """Write a safetensors file as `write_whole` does.

    Tensors are written in the order given; put wider types first, so that each starts at a multiple of its item size.
    """
    header, offset = {"__metadata__": metadata}, 0
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    for name, array in arrays.items():
        dtype = _NAMES[array.dtype.newbyteorder("<")]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    blocks = (array.reshape(-1).view(np.uint8) for array in arrays.values())
    return write_whole(file, [len(text).to_bytes(8, "little") + text, *blocks])


def write_whole(file: Path, blocks: Iterable[bytes | np.ndarray]) -> str:
    """Write a file that is either complete and durable or absent; returns the SHA-256 of its bytes in hex.

    Raises:
        OSError: the disk is full or not writable; no file of the final name exists then.
    """
    digest = hashlib.sha256()
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            for block in blocks:
                digest.update(block)
                handle.write(block)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(file.parent)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the bytes behind them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def map_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Memory maps of all tensors of a safetensors file, and its metadata.

    The header is parsed here because a slice of a memory map is three times as fast as safetensors' own slice.

    Raises:
        UserError: missing, empty, truncated, or not a safetensors file.
    """
    entries, metadata = _read_header(file)
    # One map for all: each costs an open file, of which a process may have about a thousand.
    with file.open("rb") as handle:
        content = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {
        name: np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
        if math.prod(shape)
        else np.empty(shape, dtype)
        for name, (dtype, shape, start, _) in entries.items()
    }
    return tensors, metadata


def _read_header(file: Path) -> tuple[dict[str, tuple], dict[str, str]]:
    """Dtype, shape, first byte and end of each tensor of a safetensors file, and its metadata."""
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{file}: missing; {_REMEDY}") from None
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(f"{file}: {size} bytes, which is empty or truncated; {_REMEDY}")
        try:
            header = json.loads(handle.read(length))
            metadata = header.pop("__metadata__", {})
            entries = {
                name: (_DTYPES[e["dtype"]], e["shape"], *(8 + length + int(place) for place in e["data_offsets"]))
                for name, e in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: header is corrupt ({type(error).__name__}: {error}); {_REMEDY}") from error
    expected = max((end for *_, end in entries.values()), default=8 + length)
    if size != expected:
        raise UserError(f"{file}: {size} bytes where its header says {expected}; it is truncated or damaged; {_REMEDY}")
    return entries, metadata


def write_shard(file: Path, tokens: np.ndarray, doc_ends: np.ndarray, metadata: dict[str, str]) -> str:
    """Write one shard atomically; returns its SHA-256 in hex. ``tokens`` uint32 [n], ``doc_ends`` int64 [d]."""
    counts = {"format": FORMAT, "tokens": str(len(tokens)), "documents": str(len(doc_ends))}
    tokens, doc_ends = tokens.astype("<u4", copy=False), doc_ends.astype("<i8", copy=False)
    checksums = np.concatenate([block_checksums(doc_ends), block_checksums(tokens)])
    tensors = {"doc_ends": doc_ends, "tokens": tokens, "checksums": checksums}
    return write_tensors(file, tensors, metadata | counts)


def open_shard(file: Path) -> Shard:
    """Open one shard as memory maps.

    Raises:
        UserError: missing, truncated, no shard of ours, or its document ends do not fit its tokens.
    """
    tensors, metadata = map_tensors(file)
    names = {FORMAT: {"tokens", "doc_ends", "checksums"}, FORMAT_WITHOUT_CHECKSUMS: {"tokens", "doc_ends"}}
    if set(tensors) != names.get(metadata.get("format")):
        raise UserError(f"{file}: not a {FORMAT} file (format {metadata.get('format')!r}); {_REMEDY}")
    tokens, ends = tensors["tokens"], tensors["doc_ends"]
    if tokens.dtype != _DTYPES["U32"] or ends.dtype != _DTYPES["I64"]:
        raise UserError(f"{file}: tokens are {tokens.dtype} and doc_ends {ends.dtype}, expected U32 and I64; {_REMEDY}")
    if not len(ends) or ends[-1] != len(tokens):
        raise UserError(f"{file}: document ends do not cover its {len(tokens)} tokens; {_REMEDY}")
    checksums = tensors.get("checksums")
    blocks = sum(-(-array.nbytes // BLOCK_BYTES) for array in (ends, tokens))
    if checksums is not None and (checksums.dtype, checksums.shape) != (_DTYPES["U32"], (blocks,)):
        raise UserError(f"{file}: its checksums do not cover its {blocks} blocks; {_REMEDY}")
    places = {name: start for name, (_, _, start, _) in _read_header(file)[0].items()}
    return Shard(tokens, ends, metadata, checksums, places)


def hash_file(file: Path) -> str:
    """SHA-256 of a file's bytes in hex."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
