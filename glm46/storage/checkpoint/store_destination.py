"""The prefix of an object store as the destination of saves, and as the source of loads."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from glm46.compute.distributed.ranks import Ranks
from glm46.config.errors import UserError
from glm46.files.durable import FileRecord
from glm46.files.store import OBJECTS_AT_ONCE, Store
from glm46.files.store_lease import Lease
from glm46.files.threads import map_in_threads
from glm46.storage.checkpoint.dcp import files_of
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
        """Fetch the files of a step that this node needs, and compare them with the manifest; its ranks share the work.
        Files that hold no part of the tensors of any rank of the node stay links."""
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
            stage.value = (node.name, _needed_files(path, records_of(body), tensors))
        names = sorted({name for place, names in stage.values if place == node.name for name in names})
        with ranks.stage(f"fetching {path.name}") as stage:
            stage.value = _fetch(path, names[node.index :: node.count])
        faults = sorted({fault for rank_faults in stage.values for fault in rank_faults})
        return (None, faults) if faults else (body, [])

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


def _needed_files(path: Path, records: Mapping[str, FileRecord], tensors: Mapping[str, Tensor] | None) -> list[str]:
    """Return the files that hold parts of this rank's tensors; all files for None, or if the index is damaged, which
    the load then reports."""
    metadata, _ = read_checked_metadata(path, records)
    return [*records] if tensors is None or metadata is None else sorted(files_of(metadata, tensors))


def _has_length(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.bytes
