"""Gathers node-local saves on shared storage: copy, compare, publish, then remove the local files.

A local disk is fast and is lost with its node: until a save is gathered, it only protects against a crash of the run.
Loading always reads the shared folder. A node-local save leaves on each node a step folder with the same
``manifest.json``, ``.metadata`` and ``meta.json``, and the tensor files that this node's ranks wrote; the parts of one
save have the same hash of their manifest. Files are copied to ``step-000123.gather`` in the shared folder and compared
there with the manifest before they get their names, so an interrupted gathering continues with what is missing. An
object store is a destination too, see `glm46.storage.checkpoint.store_mirror`.
"""

import os
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm46.files.durable import FileRecord, hash_file, replace_durably, sync_folder
from glm46.files.threads import map_in_threads
from glm46.storage.checkpoint.integrity import (
    MANIFEST,
    check_hash,
    published_steps,
    quick_faults,
    read_manifest,
    records_of,
    step_folder,
    step_of,
    verify_folder,
)
from glm46.storage.checkpoint.publish import make_durably, remove, rename_draft, repair

if TYPE_CHECKING:  # scripts/consolidate_checkpoints.py starts many processes, none of which needs torch
    from torch import Tensor

    from glm46.compute.distributed.ranks import Ranks

_COPY_BYTES = 1 << 22
_COPY_THREADS = 8


@dataclass(frozen=True)
class NodeFolder:
    """The local folder of this rank's node, and whether this rank acts for the node."""

    path: Path
    is_leader: bool
    name: tuple[str, str] = ("", "")
    """Host name and path."""
    index: int = 0
    """Number of this rank among the ranks of its node."""
    count: int = 1
    """Number of ranks of the node."""

    @classmethod
    def of_this_rank(cls, path: Path, ranks: "Ranks") -> "NodeFolder":
        """Return the folder of this rank's node. Collective. Ranks share a node if host name and folder are the
        same."""
        node = (socket.gethostname(), str(Path(path).absolute()))
        nodes = ranks.all_gather(node)
        members = [rank for rank, other in enumerate(nodes) if other == node]
        index = members.index(ranks.rank)
        return cls(Path(path), is_leader=index == 0, name=node, index=index, count=len(members))


@dataclass(frozen=True)
class NodePart:
    """The files of one save on one node."""

    step: int
    seal: str
    """SHA-256 of the manifest file: equal on all nodes of one save."""
    saved_at: float
    """Seconds since the epoch."""
    files: tuple[str, ...]
    """Files on this node with the length in the manifest."""
    all_files: tuple[str, ...]
    """All files that the manifest lists."""


class Destination:
    """The shared folder that saves are gathered in."""

    is_partial = False
    """True if `verify` makes readable only what it is told."""

    def __init__(self, path: Path):
        self.path = path

    def open(self, ranks: "Ranks") -> None:
        """Take what must belong to one run alone. Collective. Raises UserError on all ranks if another run has it."""

    def close(self) -> None:
        """Give back what `open` has taken. Idempotent."""

    def refresh(self, *, is_first: bool) -> None:
        """Complete what an interrupted gathering has left. One rank of each node calls it."""
        if is_first and self.path.is_dir():
            repair(self.path)

    def begin(self, save: NodePart) -> None:
        """Prepare for the files of a save; the first rank calls it, before any file is copied."""

    def copy(self, local: Path, save: NodePart) -> list[str]:
        """See `copy_part`."""
        return copy_part(local, self.path, save)

    def publish(self, step: int, manifest: bytes) -> list[str]:
        """See `publish_gathered`."""
        return publish_gathered(self.path, step, manifest)

    def verify(
        self, path: Path, node: NodeFolder | None, tensors: "Mapping[str, Tensor] | None", ranks: "Ranks"
    ) -> tuple[dict[str, Any] | None, list[str]]:
        """Return the manifest of a step folder, None if there are faults, and the faults; see `verify_folder`.
        Collective. ``tensors``: those that will be read; None: all."""
        return verify_folder(path, step_of(path), ranks)

    def free(self, path: Path, node: NodeFolder | None, ranks: "Ranks") -> None:
        """Remove copies of files that `verify` has made. Collective."""


def gather(node: NodeFolder, destination: Destination, ranks: "Ranks") -> None:
    """Copy the newest save that is complete over all nodes to the shared folder, then free the local disks. Collective.

    Does nothing when no save is complete, or the shared folder has a later save of the same step.

    Raises:
        CheckpointError: on all ranks. The local files stay; the next gathering continues.
    """
    with ranks.stage("listing node-local saves") as stage:
        stage.value = []
        if node.is_leader:
            if node.path.is_dir():
                repair(node.path)
            destination.refresh(is_first=ranks.is_first)
            stage.value = parts_in(node.path)[0]
    saves = whole_saves(part for parts in stage.values for part in parts)
    if not saves:
        return
    newest = saves[-1]
    output = destination.path
    local_parts = stage.values[ranks.rank]
    has_part = any(part.seal == newest.seal for part in local_parts)
    with ranks.stage("looking at the shared folder") as shared:
        if ranks.is_first:
            shared.value = is_gathered(output, newest), is_superseded(output, newest)
    gathered, superseded = shared.values[0]
    if superseded:
        return
    if not gathered:
        _copy_and_publish(node, destination, newest, ranks, has_part=has_part)
    with ranks.stage("removing node-local files"):
        if has_part:
            _raise_if(remove_part(node.path, output, newest))
        for part in local_parts:
            if part.step < newest.step:  # superseded by the gathered save
                remove(step_folder(node.path, part.step))


def _copy_and_publish(
    node: NodeFolder, destination: Destination, save: NodePart, ranks: "Ranks", *, has_part: bool
) -> None:
    """Copy the files of a save from all nodes, then publish it. Collective. ``has_part``: this rank acts for a node
    that has files of the save."""
    with ranks.stage("preparing shared storage"):
        if ranks.is_first:
            destination.begin(save)
    with ranks.stage("copying to shared storage") as stage:
        if has_part:
            _raise_if(destination.copy(node.path, save))
            stage.value = (step_folder(node.path, save.step) / MANIFEST).read_bytes()
    manifest = next(value for value in stage.values if value is not None)
    with ranks.stage("publishing on shared storage"):
        if ranks.is_first:
            _raise_if(destination.publish(save.step, manifest))
    with ranks.stage("listing shared storage"):
        if node.is_leader:
            destination.refresh(is_first=ranks.is_first)


def _raise_if(faults: list[str]) -> None:
    if faults:
        raise OSError("; ".join(faults))


def parts_in(local: Path) -> tuple[list[NodePart], list[str]]:
    """Return the parts in a node-local folder, oldest first, and the faults of parts that cannot be used."""
    parts = []
    faults = []
    for step in published_steps(local):
        path = step_folder(local, step)
        body, part_faults = read_manifest(path, step)
        if body is None:
            faults += part_faults
            continue
        records = records_of(body)
        complete_files = tuple(name for name, record in sorted(records.items()) if _has_length(path / name, record))
        parts.append(
            NodePart(step, hash_file(path / MANIFEST).sha256, body["saved_at"], complete_files, tuple(sorted(records)))
        )
    return parts, faults


def _has_length(path: Path, record: FileRecord) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == record.bytes


def whole_saves(parts: Iterable[NodePart]) -> list[NodePart]:
    """Return the saves whose files are all on some node, oldest first, each as one part with all files."""
    files_by_seal: dict[str, set[str]] = {}
    part_by_seal: dict[str, NodePart] = {}
    for part in parts:
        files_by_seal.setdefault(part.seal, set()).update(part.files)
        part_by_seal[part.seal] = part
    saves = [
        replace(part, files=part.all_files)
        for seal, part in part_by_seal.items()
        if files_by_seal[seal] == set(part.all_files)
    ]
    return sorted(saves, key=lambda part: (part.step, part.saved_at))


def copy_part(local: Path, output: Path, save: NodePart) -> list[str]:
    """Copy this node's files of a save to the ``.gather`` folder of the shared storage; complete copies there are kept.
    Raises OSError if the shared storage refuses.

    Returns:
        Faults, one line each; empty when all files of this node were copied completely.
    """
    source = step_folder(local, save.step)
    body, faults = read_manifest(source, save.step)
    if body is None or hash_file(source / MANIFEST).sha256 != save.seal:
        return [*faults, f"{source}: is no longer the save that was asked for"]
    target = gather_folder(output, save.step)
    make_durably(target)
    # Only this node's files; the manifest lists the files of all nodes.
    local_files = [(name, record) for name, record in records_of(body).items() if _has_length(source / name, record)]
    file_faults = map_in_threads(
        lambda file: _copy_file(source / file[0], target / file[0], file[1]), local_files, _COPY_THREADS
    )
    faults = [fault for one_file in file_faults for fault in one_file]
    sync_folder(target)
    return faults


def _copy_file(source: Path, target: Path, record: FileRecord) -> list[str]:
    if target.is_file() and not check_hash(target, record):  # whole, from an interrupted gathering
        return []
    # Every node copies the small files, so each writes under a different name.
    draft = target.with_name(f"{target.name}.{os.uname().nodename}.{os.getpid()}.part")
    _copy_durably(source, draft)
    copied = hash_file(draft)
    if copied == record:
        os.replace(draft, target)
        return []
    draft.unlink()
    return [f"{source}: arrived with SHA-256 {copied.sha256}, expected {record.sha256}"]


def _copy_durably(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        shutil.copyfileobj(read, write, _COPY_BYTES)
        os.fsync(write.fileno())


def gather_folder(output: Path, step: int) -> Path:
    """Return the folder that the files of a save are copied to until all are there."""
    return step_folder(output, step).with_suffix(".gather")


def publish_gathered(output: Path, step: int, manifest: bytes) -> list[str]:
    """Publish a gathered save. Only lengths are compared; the nodes compared hashes when they copied.

    Args:
        manifest: content of the manifest, equal on all nodes.

    Returns:
        Faults; empty when the checkpoint is published.
    """
    draft = gather_folder(output, step)
    replace_durably(draft / MANIFEST, [manifest])
    body, faults = read_manifest(draft, step)
    if body is None:
        return faults
    for leftover in {path.name for path in draft.iterdir()} - set(records_of(body)) - {MANIFEST}:
        (draft / leftover).unlink()  # from an interrupted copy, or from another save of this step
    _, faults = quick_faults(draft, step)
    if not faults:
        rename_draft(draft, step)
    return faults


def is_gathered(output: Path, save: NodePart) -> bool:
    """Return True if the shared folder has this save, without faults in the quick checks."""
    path = step_folder(output, save.step)
    return not quick_faults(path, save.step)[1] and hash_file(path / MANIFEST).sha256 == save.seal


def is_superseded(output: Path, part: NodePart) -> bool:
    """Return True if the shared folder has a later complete save of this step."""
    body, _ = quick_faults(step_folder(output, part.step), part.step)
    return body is not None and body["saved_at"] > part.saved_at


def remove_part(local: Path, output: Path, save: NodePart) -> list[str]:
    """Remove this node's files of a save, if the shared folder has it. Returns the reason if they were not removed."""
    path = step_folder(local, save.step)
    if not is_gathered(output, save):
        return [f"{path}: kept, because {step_folder(output, save.step)} is not this save or not whole"]
    if (path / MANIFEST).is_file() and hash_file(path / MANIFEST).sha256 == save.seal:
        remove(path)
    return []
