"""Gathering node-local saves on shared storage: copy, compare, publish, then remove the local files.

A local disk is fast and is lost with its node: until a save is gathered it protects against a crash of the run only.
Loading always reads the shared folder. A node-local save leaves on each node a step folder with the same
``manifest.json``, ``.metadata`` and ``meta.json``, and the tensor files that this node's ranks wrote; the parts of one
save have the same hash of their manifest. Files are copied to ``step-000123.gather`` in the shared folder and compared
there with the manifest before they get their names, so an interrupted gathering continues with what is missing.
"""

import os
import shutil
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from glm46.files.durable import FileRecord, hash_file, replace_durably, sync_folder
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

if TYPE_CHECKING:  # the script that gathers starts many processes, none of which needs torch
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
        """Collective. Ranks share a node when host name and folder are the same."""
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
    """Files that are here with the length in the manifest."""
    wanted: tuple[str, ...]
    """All files that the manifest lists."""


def gather(node: NodeFolder, output: Path, ranks: "Ranks") -> None:
    """Copy the newest save that is whole over all nodes to the shared folder, then free the local disks. Collective.

    Does nothing when no save is whole, or the shared folder has a later one of the same step.

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
    newest, mine = saves[-1], stage.values[ranks.rank]
    has_part = any(part.seal == newest.seal for part in mine)
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
        for part in mine:
            if part.step < newest.step:  # superseded by the one just gathered
                remove(step_folder(node.path, part.step))


def _raise_if(faults: list[str]) -> None:
    if faults:
        raise OSError("; ".join(faults))


def parts_in(local: Path) -> tuple[list[NodePart], list[str]]:
    """The parts in a node-local folder, oldest first, and the faults of those that cannot be used."""
    parts, faults = [], []
    for step in published_steps(local):
        path = step_folder(local, step)
        body, found = read_manifest(path, step)
        if body is None:
            faults += found
            continue
        records = records_of(body)
        here = tuple(name for name, record in sorted(records.items()) if _has_length(path / name, record))
        parts.append(NodePart(step, hash_file(path / MANIFEST).sha256, body["saved_at"], here, tuple(sorted(records))))
    return parts, faults


def _has_length(path: Path, record: FileRecord) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == record.bytes


def whole_saves(parts: Iterable[NodePart]) -> list[NodePart]:
    """The saves of which every file is on some node, oldest first, each as one part with all files."""
    held: dict[str, set[str]] = {}
    one_of: dict[str, NodePart] = {}
    for part in parts:
        held.setdefault(part.seal, set()).update(part.files)
        one_of[part.seal] = part
    whole = [replace(part, files=part.wanted) for seal, part in one_of.items() if held[seal] == set(part.wanted)]
    return sorted(whole, key=lambda part: (part.step, part.saved_at))


def copy_part(local: Path, output: Path, save: NodePart) -> list[str]:
    """Copy this node's files of a save to the ``.gather`` folder of the shared storage; whole copies there are kept.
    Raises OSError if the shared storage refuses.

    Returns:
        Faults, one line each; empty when all files of this node have arrived whole.
    """
    source = step_folder(local, save.step)
    body, faults = read_manifest(source, save.step)
    if body is None or hash_file(source / MANIFEST).sha256 != save.seal:
        return [*faults, f"{source}: is no longer the save that was asked for"]
    target = gather_folder(output, save.step)
    make_durably(target)
    # Only this node's files; the manifest lists those of all nodes.
    here = [(name, record) for name, record in records_of(body).items() if _has_length(source / name, record)]
    with ThreadPoolExecutor(_COPY_THREADS) as threads:
        arrived = threads.map(lambda file: _copy_file(source / file[0], target / file[0], file[1]), here)
        faults = [fault for found in arrived for fault in found]
    sync_folder(target)
    return faults


def _copy_file(source: Path, target: Path, record: FileRecord) -> list[str]:
    if target.is_file() and not check_hash(target, record):
        return []
    # Every node copies the small files: each writes under a name of its own.
    arriving = target.with_name(f"{target.name}.{os.uname().nodename}.{os.getpid()}.part")
    _copy_durably(source, arriving)
    found = hash_file(arriving)
    if found == record:
        os.replace(arriving, target)
        return []
    arriving.unlink()
    return [f"{source}: arrived with SHA-256 {found.sha256}, expected {record.sha256}"]


def _copy_durably(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        shutil.copyfileobj(read, write, _COPY_BYTES)
        os.fsync(write.fileno())


def gather_folder(output: Path, step: int) -> Path:
    """The folder that the files of a save are copied to until all have arrived."""
    return step_folder(output, step).with_suffix(".gather")


def publish_gathered(output: Path, step: int, manifest: bytes) -> list[str]:
    """Publish a gathered save. Lengths are compared here; the nodes have compared hashes when they copied.

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
        (draft / leftover).unlink()  # of an interrupted copy, or of another save of this step
    _, faults = quick_faults(draft, step)
    if not faults:
        rename_draft(draft, step)
    return faults


def is_gathered(output: Path, save: NodePart) -> bool:
    """True if the shared folder has this save, without faults in the quick checks."""
    path = step_folder(output, save.step)
    return not quick_faults(path, save.step)[1] and hash_file(path / MANIFEST).sha256 == save.seal


def is_superseded(output: Path, part: NodePart) -> bool:
    """True if the shared folder has a later whole save of this step."""
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
