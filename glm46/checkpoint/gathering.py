"""From parts on the disks of several nodes to one checkpoint on shared storage: copy, compare, publish, then remove.

A node-local save leaves on each node a step folder with the same ``manifest.json``, ``.metadata`` and ``meta.json``,
and those tensor files that this node's ranks wrote. The parts of one save are known by the seal of their manifest.
Copies gather in ``step-000123.gather`` of the shared folder; each is compared with the manifest where it arrived,
before it gets its name, so an interrupted gathering goes on with what is missing. Local copies go last of all.
"""

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from glm46.checkpoint.integrity import MANIFEST, check_hash, read_manifest, records_of
from glm46.checkpoint.publish import give_name, incomplete, make_durably, published_steps, remove, step_folder
from glm46.files.durable import FileRecord, hash_file, replace_durably, sync_folder

_COPY_BYTES = 1 << 22
_COPY_THREADS = 8


@dataclass(frozen=True)
class NodePart:
    """What one node holds of one save."""

    step: int
    seal: str
    """Hash of the manifest file: the same on all nodes of one save."""
    saved_at: float
    """Seconds since the epoch."""
    files: tuple[str, ...]
    """Tensor files that are here, of the length that the manifest says."""
    wanted: tuple[str, ...]
    """All files that the manifest lists."""


def parts_in(local: Path) -> tuple[list[NodePart], list[str]]:
    """The parts in a node-local folder, oldest first, and what is wrong with those that cannot be used."""
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
    """The saves of which all files are somewhere, oldest first, as a part that holds all of it."""
    held: dict[str, set[str]] = {}
    one_of: dict[str, NodePart] = {}
    for part in parts:
        held.setdefault(part.seal, set()).update(part.files)
        one_of[part.seal] = part
    whole = [replace(part, files=part.wanted) for seal, part in one_of.items() if held[seal] == set(part.wanted)]
    return sorted(whole, key=lambda part: (part.step, part.saved_at))


def copy_part(local: Path, output: Path, save: NodePart) -> list[str]:
    """Copy this node's files of a save into the shared folder's gathering place; what is there already is kept.

    Returns:
        What is wrong, one line each; empty when all files of this node have arrived whole.

    Raises:
        OSError: when the shared storage refuses.
    """
    source = step_folder(local, save.step)
    body, faults = read_manifest(source, save.step)
    if body is None or hash_file(source / MANIFEST).sha256 != save.seal:
        return [*faults, f"{source}: is no longer the save that was asked for"]
    place = gathering_place(output, save.step)
    make_durably(place)
    # Files of other nodes are not here.
    here = [(name, record) for name, record in records_of(body).items() if _has_length(source / name, record)]
    with ThreadPoolExecutor(_COPY_THREADS) as threads:
        arrived = threads.map(lambda file: _copy_file(source / file[0], place / file[0], file[1]), here)
        faults = [fault for found in arrived for fault in found]
    sync_folder(place)
    return faults


def _copy_file(source: Path, target: Path, record: FileRecord) -> list[str]:
    if target.is_file() and not check_hash(target, record):
        return []
    # Every node brings the small files: each works under a name of its own.
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


def gathering_place(output: Path, step: int) -> Path:
    """Where the files of a save gather until all are there."""
    return step_folder(output, step).with_suffix(".gather")


def publish_gathered(output: Path, step: int, manifest: bytes) -> list[str]:
    """Give a gathered save its name; lengths were compared here, hashes by whoever copied.

    Args:
        manifest: the manifest's bytes, as on every node.

    Returns:
        What is missing or wrong; empty when the checkpoint is published.
    """
    place = gathering_place(output, step)
    replace_durably(place / MANIFEST, [manifest])
    body, faults = read_manifest(place, step)
    if body is None:
        return faults
    for leftover in {path.name for path in place.iterdir()} - set(records_of(body)) - {MANIFEST}:
        (place / leftover).unlink()  # of a copy that was cut, or of another save of this step
    faults = incomplete(place, step)
    if not faults:
        give_name(place, step)
    return faults


def is_gathered(output: Path, save: NodePart) -> bool:
    """Whether the shared folder has this very save, whole by the cheap checks."""
    path = step_folder(output, save.step)
    return path.is_dir() and not incomplete(path, save.step) and hash_file(path / MANIFEST).sha256 == save.seal


def is_superseded(output: Path, part: NodePart) -> bool:
    """Whether the shared folder has another whole save of this step, and a later one."""
    path = step_folder(output, part.step)
    body, _ = read_manifest(path, part.step)
    return body is not None and body["saved_at"] > part.saved_at and not incomplete(path, part.step)


def remove_part(local: Path, output: Path, save: NodePart) -> list[str]:
    """Remove this node's files of a save, if the shared folder has it.

    Returns:
        Why it was not removed.
    """
    path = step_folder(local, save.step)
    if not is_gathered(output, save):
        return [f"{path}: stays, because {step_folder(output, save.step)} is not this save or not whole"]
    if (path / MANIFEST).is_file() and hash_file(path / MANIFEST).sha256 == save.seal:
        remove(path)
    return []
