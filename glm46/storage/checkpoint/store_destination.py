"""The prefix of an object store as the destination of saves, and as the source of loads."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from glm46.compute.distributed.ranks import Ranks
from glm46.config.errors import UserError
from glm46.files.block_digests import LEAST_BYTES, blocks_name
from glm46.files.durable import FileRecord
from glm46.files.store import OBJECTS_AT_ONCE, Store
from glm46.files.store_lease import Lease
from glm46.files.store_links import link_ranges
from glm46.files.store_ranges import Span, range_file
from glm46.files.tensor_file import Record, spans_of
from glm46.files.threads import map_in_threads
from glm46.storage.checkpoint.dcp import NeededPart, needed_parts
from glm46.storage.checkpoint.gathering import Destination, NodeFolder, NodePart
from glm46.storage.checkpoint.integrity import (
    MANIFEST,
    META,
    quick_faults,
    read_manifest,
    records_of,
    step_folder,
    step_of,
)
from glm46.storage.checkpoint.metadata import METADATA, read_checked_metadata
from glm46.storage.checkpoint.publish import LATEST
from glm46.storage.checkpoint.store_mirror import fetch_step, refresh_mirror, release_step
from glm46.storage.checkpoint.stored_values import first_byte

_END_BYTES = 4096
"""Bytes at both ends of a record that are more than its zip entries need, except the values."""


class StoreDestination(Destination):
    """The prefix of an object store that saves are gathered in; ``path`` is the mirror on this node."""

    is_partial = True

    def __init__(self, path: Path, url: str):
        super().__init__(path)
        self.store = Store(url)
        self.lease = Lease(self.store)

    def open(self, ranks: "Ranks") -> None:
        """Take the lease of the prefix on the first rank."""
        with ranks.stage("taking the lease of the prefix") as stage:
            if ranks.is_first:
                stage.value = self.lease.acquire()
        holder = stage.values[0]
        if holder is not None:
            fault = f"checkpoint.folder = {self.store.url!r}: {holder} is training in this prefix"
            raise UserError(f"{fault}; wait for it, or set another one")

    def close(self) -> None:
        """Give the lease back."""
        self.lease.release()

    def refresh(self, *, is_first: bool) -> None:
        """Read the list of checkpoints from the store."""
        refresh_mirror(self.store.url, self.path)

    def begin(self, save: NodePart) -> None:
        """Remove what interrupted uploads have left, and the checkpoint that this save replaces."""
        objects = self.store.objects()
        names = {PurePosixPath(name).parts[0] for name in objects if "/" in name}
        target = step_folder(self.path, save.step).name
        for name in sorted(names):
            # A listing may lag behind the manifest of a complete checkpoint.
            is_step = step_of(self.path / name) is not None
            if is_step and name != target and self.store.size(f"{name}/{MANIFEST}") is None:
                self.store.remove_folder(name, first=MANIFEST)
        self.store.remove([f"{target}/{MANIFEST}"])
        files = {f"{target}/{name}" for name in save.all_files}
        files |= {*map(blocks_name, files)}
        self.store.remove(name for name in objects if name.startswith(f"{target}/") and name not in files)

    def copy(self, local: Path, save: NodePart) -> list[str]:
        """Upload this node's files of a save, each read back; equal objects are not sent again."""
        source = step_folder(local, save.step)
        body, faults = read_manifest(source, save.step)
        if body is None:
            return faults
        records = records_of(body)

        def upload(name: str) -> None:
            self.store.put(source / name, f"{source.name}/{name}", records[name])

        present = [name for name, record in records.items() if _has_length(source / name, record)]
        map_in_threads(upload, present, OBJECTS_AT_ONCE)
        return []

    def publish(self, step: int, manifest: bytes) -> list[str]:
        """Write the manifest, after all other objects, and the name of the newest checkpoint."""
        name = step_folder(self.path, step).name
        if not self.lease.is_held():
            return [f"{self.store.url}: another run has taken this prefix, because this one could not reach it"]
        self.store.write(f"{name}/{MANIFEST}", manifest)
        if self.store.read(f"{name}/{MANIFEST}") != manifest:
            self.store.remove([f"{name}/{MANIFEST}"])
            return [f"{self.store.url_of(name)}/{MANIFEST}: arrived with other bytes"]
        self.store.write(LATEST, name.encode() + b"\n")
        return []

    def verify(
        self, path: Path, node: NodeFolder | None, tensors: Mapping[str, Tensor] | None, ranks: Ranks
    ) -> tuple[dict[str, Any] | None, list[str]]:
        """Fetch what this node needs of a step, and compare it with the manifest, or with the digests of its blocks.
        Of large files only ranges are read; the ranks of the node share the work."""
        if node is None or path.parent != self.path:
            return super().verify(path, node, tensors, ranks)
        with ranks.stage("listing the store") as stage:
            if node.is_leader and not path.is_dir():
                self.refresh(is_first=ranks.is_first)
            stage.value = quick_faults(path, step_of(path)) if node.is_leader else (None, [])
        body, faults = stage.values[0]
        faults = sorted({fault for _, node_faults in stage.values for fault in node_faults})
        if faults:
            return None, faults
        with ranks.stage(f"fetching the index of {path.name}") as stage:
            stage.value = _fetch(path, [META, METADATA]) if node.is_leader else []
        faults = sorted({fault for node_faults in stage.values for fault in node_faults})
        if faults:
            return None, faults
        with ranks.stage(f"selecting files of {path.name}") as stage:
            parts = _needed_parts(path, records_of(body), tensors)
            files = [*records_of(body)] if parts is None else sorted({part.file for part in parts})
            stage.value = (node.name, files)
        names = sorted({name for place, names in stage.values if place == node.name for name in names})
        with ranks.stage(f"fetching files of {path.name}") as stage:
            local_names = names[node.index :: node.count]
            stage.value = _fetch(path, local_names if parts is None else self._without_ranges(path, body, local_names))
        faults = sorted({fault for rank_faults in stage.values for fault in rank_faults})
        if faults:
            return None, faults
        with ranks.stage(f"fetching ranges of {path.name}") as stage:
            stage.value = _fetch_ranges(path, parts or [], turn=node.index / node.count)
        faults = sorted({fault for rank_faults in stage.values for fault in rank_faults})
        return (None, faults) if faults else (body, [])

    def _without_ranges(self, path: Path, body: dict[str, Any], names: list[str]) -> list[str]:
        """Prepare the ranges of large files; return the files that must be fetched whole."""
        records = records_of(body)
        whole = []
        for name in names:
            url = self.store.url_of(f"{path.name}/{name}")
            record = records[name]
            is_link = record.bytes >= LEAST_BYTES and (path / name).is_symlink()
            if not (is_link and link_ranges(path / name, url, record.bytes, "", record.sha256)):
                whole.append(name)
        return whole

    def free(self, path: Path, node: NodeFolder | None, ranks: Ranks) -> None:
        """Replace the fetched files of a step in the mirror by links."""
        if node is None or path.parent != self.path:
            return
        with ranks.stage("freeing fetched files"):
            if node.is_leader:
                release_step(path)


def _fetch(path: Path, names: list[str]) -> list[str]:
    """Fetch files of a step in a mirror. Return the fault of the first one that cannot be read or has other bytes."""
    try:
        fetch_step(path, names)
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    return []


def _needed_parts(
    path: Path, records: Mapping[str, FileRecord], tensors: Mapping[str, Tensor] | None
) -> list[NeededPart] | None:
    """Return what this rank reads of its tensors; None for all of the files, or if the index is damaged, which the load
    then reports."""
    metadata, _ = read_checked_metadata(path, records)
    return None if tensors is None or metadata is None else needed_parts(metadata, tensors)


def _fetch_ranges(path: Path, parts: list[NeededPart], turn: float) -> list[str]:
    """Fetch what this rank reads of the files that are links. Return the fault of the first range that cannot be read
    or has other bytes. ``turn``: see `RangeFile.fetch`."""
    by_file: dict[str, list[NeededPart]] = {}
    for part in parts:
        by_file.setdefault(part.file, []).append(part)
    try:
        for name, file_parts in by_file.items():
            if (ranges := range_file(path / name)) is None:
                continue
            spans = [span for part in file_parts for span in _ends_of(part)]
            ranges.fetch(spans, turn)
            ranges.fetch([span for part in file_parts for span in _values_of(ranges.data, part)], turn)
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    return []


def _ends_of(part: NeededPart) -> list[Span]:
    """Return the bytes of a record that say where its values are; all of it if all is needed."""
    stop = part.offset + part.length
    if part.is_whole or part.length <= 2 * _END_BYTES:
        return [(part.offset, stop)]
    return [(part.offset, part.offset + _END_BYTES), (stop - _END_BYTES, stop)]


def _values_of(file: Path, part: NeededPart) -> list[Span]:
    """Return the bytes of the needed values, whose record's ends are in the file; the whole record if it has another
    form than `torch.save` gives it."""
    if part.is_whole:
        return []
    first = first_byte(file, part.offset, part.length, part.sizes, part.dtype)
    if first is None:
        return [(part.offset, part.offset + part.length)]
    return list(spans_of(Record(part.dtype, part.sizes, first), part.box))


def _has_length(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.bytes
