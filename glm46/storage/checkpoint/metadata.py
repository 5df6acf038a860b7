"""DCP's ``.metadata``: read without running code from it, and checked before tensors are loaded through it.

The file is a pickle. Unpickling calls any function that it names, so only the classes of DCP's metadata are allowed.
DCP itself does not check that the stored chunks cover a tensor, or that a file name stays in the folder.
"""

import enum
import io
import math
import pickle
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from glm46.files.durable import FileRecord
from glm46.files.file_content import known_fault
from glm46.files.store import read_linked

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint."
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = {
    *((_DCP + "metadata", name) for name in _CLASSES),
    (_DCP + "filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
# DCP's own writer stores the path that it wrote to. Python 3.13 has these classes in another module.
_PATHS = {
    (module, kind + name): pure
    for module in ("pathlib", "pathlib._local")
    for name, pure in (("PosixPath", PurePosixPath), ("WindowsPath", PureWindowsPath))
    for kind in ("", "Pure")
}
_FOREIGN_OPERATIONS = (
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.INST,
    pickle.OBJ,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)
# All that a damaged or hostile pickle can raise.
_BROKEN_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    RecursionError,
    SystemError,
    RuntimeError,
)


def _enum_member(owner: object, name: str) -> enum.Enum:
    """Replacement of `getattr`: some Pythons, such as 3.11.2, pickle a member of an enum as ``getattr(enum, name)``."""
    if not (isinstance(owner, enum.EnumMeta) and name in owner.__members__):
        raise pickle.UnpicklingError("it names builtins.getattr for more than a member of an enum; nothing was run")
    return owner[name]


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickler that makes the objects of DCP metadata and no others.

    It is based on Python's own unpickler, not the one in C: that one lets a pickle set attributes of the allowed
    classes, and allocates as much memory as a pickle claims. Reading takes about three times as long.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return _PATHS[module, name]
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):  # the second up to protocol 2
            return _enum_member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP metadata does not use; nothing was run")

    def _build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]  # typeshed lacks it
        kind = type(target)
        if (kind.__module__, kind.__qualname__) not in _ALLOWED or isinstance(target, enum.Enum):
            raise pickle.UnpicklingError(
                f"it changes {target!r:.80}, which is no part of DCP metadata; nothing was run"
            )
        self.load_build()  # type: ignore[attr-defined]  # typeshed lacks it

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has an operation that DCP metadata does not use; nothing was run")

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _build,
        # Reserves memory before it reads.
        pickle.BYTEARRAY8[0]: _refuse,
        # Make or fetch objects without find_class, or by classes of other pickles.
        **dict.fromkeys((code[0] for code in _FOREIGN_OPERATIONS), _refuse),
    }


def read_metadata(folder: Path) -> tuple[Metadata | None, list[str]]:
    """Read DCP's metadata of a checkpoint folder: the metadata, or None, and the faults. Never runs code from the file.

    Source: torch/distributed/checkpoint/filesystem.py, ``FileSystemReader.read_metadata``.
    """
    path = folder / METADATA
    try:
        metadata = _MetadataUnpickler(io.BytesIO(read_linked(path))).load()
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror}"]
    except _BROKEN_PICKLE as error:
        if (fault := known_fault(path, allowed=b"\x80")) is not None:
            return None, [f"{path}: {fault}"]
        remedy = f"take another checkpoint; if a newer torch than this one ({torch.__version__}) wrote it, install that"
        return None, [f"{path}: refused: {type(error).__name__}: {error}; {remedy}"]
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        return None, [f"{path}: refused: it is not DCP metadata"]
    return metadata, []


def read_checked_metadata(folder: Path, files: Mapping[str, FileRecord]) -> tuple[Metadata | None, list[str]]:
    """Read metadata like `read_metadata`, and check that it fits the files of its checkpoint; see `check_metadata`."""
    metadata, faults = read_metadata(folder)
    faults = faults if metadata is None else check_metadata(folder, metadata, files)
    return None if faults else metadata, faults


def tensor_entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the tensors that metadata lists, by name; for checked metadata these are all entries."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def check_metadata(
    folder: Path, metadata: Metadata, files: Mapping[str, FileRecord], names: Collection[str] | None = None
) -> list[str]:
    """Return faults with which DCP would load wrong values without an error: holes, overlaps, missing or misplaced
    records. ``names``: entries to check; None: all."""
    try:
        return _metadata_faults(folder, metadata, files, metadata.state_dict_metadata if names is None else names)
    except (TypeError, AttributeError, ValueError, MemoryError) as error:  # fields of other types than DCP writes
        return [f"{folder / METADATA}: refused: {type(error).__name__}: {error}"]


def _metadata_faults(
    folder: Path, metadata: Metadata, files: Mapping[str, FileRecord], names: Collection[str]
) -> list[str]:
    faults = []
    for name in names:
        entry = metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            faults.append(f"{folder}: {name} is a pickled object; glm46 saves and loads tensors only")
            continue
        if fault := _coverage_fault(tuple(entry.size), entry.chunks):
            faults.append(f"{folder}: {name} {tuple(entry.size)}: {fault}")
        for chunk in entry.chunks:
            info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if fault := _record_fault(info, math.prod(chunk.sizes) * entry.properties.dtype.itemsize, files):
                faults.append(f"{folder}: {name} at {tuple(chunk.offsets)}: {fault}")
    return faults


def _record_fault(info: Any, min_bytes: int, files: Mapping[str, FileRecord]) -> str | None:
    """Return the fault of a record that must hold at least ``min_bytes``; None if there is no fault."""
    if info is None:
        return "no stored record"
    if (record := files.get(info.relative_path)) is None:
        return f"stored in {info.relative_path!r}, which is not a file of this checkpoint"
    if getattr(info, "transform_descriptors", None):
        return f"stored through {', '.join(info.transform_descriptors)}; save it without such extensions"
    if not (info.offset >= 0 and info.length >= min_bytes and info.offset + info.length <= record.bytes):
        return f"bytes {info.offset} to {info.offset + info.length} of {info.relative_path} cannot hold it"
    return None


def _coverage_fault(size: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> str | None:
    """Return None if the chunks hold every element exactly once, else the fault. The edges of all chunks divide the
    tensor into cells; each cell must lie in exactly one chunk."""
    boxes = [
        tuple((start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in chunks
        if math.prod(chunk.sizes) > 0
    ]
    if any(len(box) != len(size) for box in boxes):
        return "a chunk has another number of dimensions"
    if any(start < 0 or stop > extent for box in boxes for (start, stop), extent in zip(box, size, strict=True)):
        return "a chunk lies outside the tensor"
    if math.prod(size) == 0:
        return None
    edges_by_dim = [
        np.unique([0, extent, *(edge for box in boxes for edge in box[dim])]) for dim, extent in enumerate(size)
    ]
    chunks_of_cell = np.zeros([len(edges) - 1 for edges in edges_by_dim], dtype=np.int32)
    for box in boxes:
        cells = tuple(slice(*np.searchsorted(edges, side)) for edges, side in zip(edges_by_dim, box, strict=True))
        chunks_of_cell[cells] += 1
    if (chunks_of_cell == 0).any():
        return "some elements were never saved"
    return "some elements were saved twice" if (chunks_of_cell > 1).any() else None
