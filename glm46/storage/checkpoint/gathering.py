"""Gathers node-local saves on shared storage: copy, compare, publish, then remove the local files.

A local disk is fast and is lost with its node: until a save is gathered, it only protects against a crash of the run.
Loading always reads the shared folder. A node-local save leaves on each node a step folder with the same
``manifest.json``, ``.metadata`` and ``meta.json``, and the tensor files that this node's ranks wrote; the parts of one
save have the same hash of their manifest. Files are copied to ``step-000123.gather`` in the shared folder and compared
there with the manifest before they get their names, so an interrupted gathering continues with what is missing.
"""

import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
)
from glm46.storage.checkpoint.publish import make_durably, remove, rename_draft, repair

if TYPE_CHECKING:  # scripts/consolidate_checkpoints.py starts many processes, none of which needs torch
    from glm46.compute.distributed.ranks import Ranks

_COPY_BYTES = 1 << 22
_COPY_THREADS = 8


@dataclass(frozen=True)
class NodeFolder:
    """The local folder of this rank's node, and whether this rank acts for the node."""

    path: Path
    is_leader: bool

    @classmethod
    def of_this_rank(cls, path: Path, ranks: "Ranks") -> "NodeFolder":
        """Return the folder of this rank's node. Collective. Ranks share a node if host name and folder are the
        same."""
        node = (socket.gethostname(), str(Path(path).absolute()))
        return cls(Path(path), is_leader=ranks.all_gather(node).index(node) == ranks.rank)


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
    wanted: tuple[str, ...]
    """All files that the manifest lists."""


def gather(node: NodeFolder, output: Path, ranks: "Ranks") -> None:
    """Copy the newest save that is complete over all nodes to the shared folder, then free the local disks. Collective.

    Does nothing when no save is complete, or the shared folder has a later save of the same step.

    Args:
        output: the shared checkpoint folder.

    Raises:
        CheckpointError: on all ranks. The local files stay; the next gathering continues.
    """
    with ranks.stage("listing node-local saves") as stage:
        stage.value = []
        if node.is_leader:
            if node.path.is_dir():
                repair(node.path)
            if ranks.is_first and output.is_dir():
                repair(output)
            stage.value = parts_in(node.path)[0]
    saves = whole_saves(part for parts in stage.values for part in parts)
    if not saves:
        return
    newest = saves[-1]
    local_parts = stage.values[ranks.rank]
    has_part = any(part.seal == newest.seal for part in local_parts)
    with ranks.stage("looking at the shared folder") as shared:
        if ranks.is_first:
            shared.value = is_gathered(output, newest), is_superseded(output, newest)
    gathered, superseded = shared.values[0]
    if superseded:
        return
    if not gathered:
        with ranks.stage("copying to shared storage") as stage:
            if has_part:
                _raise_if(copy_part(node.path, output, newest))
                stage.value = (step_folder(node.path, newest.step) / MANIFEST).read_bytes()
        manifest = next(value for value in stage.values if value is not None)
        with ranks.stage("publishing on shared storage"):
            if ranks.is_first:
                _raise_if(publish_gathered(output, newest.step, manifest))
    with ranks.stage("removing node-local files"):
        if has_part:
            _raise_if(remove_part(node.path, output, newest))
        for part in local_parts:
            if part.step < newest.step:  # superseded by the gathered save
                remove(step_folder(node.path, part.step))


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
        replace(part, files=part.wanted)
        for seal, part in part_by_seal.items()
        if files_by_seal[seal] == set(part.wanted)
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
