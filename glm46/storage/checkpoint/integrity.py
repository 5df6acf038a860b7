"""Checkpoint folders as they are read: their names, their manifest, and the checks of their files against it.

``manifest.json`` is one canonical JSON text: ``{"body": {...}, "sha256": hash of the canonical body}``. A file whose
bytes are not exactly the canonical text of its content is refused, so a change of any byte is found.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm46.files.durable import FileRecord, create_durably, hash_file
from glm46.files.file_content import known_fault, read_json_object
from glm46.files.regular_file import is_file_name, read_regular
from glm46.files.store import linked_object
from glm46.files.store_links import stated_sha256
from glm46.files.threads import map_in_threads

if TYPE_CHECKING:  # the launcher reads the names of steps before torch is imported
    from glm46.compute.distributed.ranks import Ranks

MANIFEST = "manifest.json"
META = "meta.json"
FORMAT = 2
VALIDATION_STEP = "validation_step"
"""Key of the step at which the validation loss of a manifest was measured."""
_PUBLISHED = re.compile(r"step-(\d{6,})")
_FILES_AT_ONCE = 8


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step in a folder's name, or None if it is not the name of a published checkpoint."""
    match = _PUBLISHED.fullmatch(path.name)
    if match is None:
        return None
    step = int(match[1])
    return step if step_folder(path.parent, step) == path else None  # else it has more zeros than a save writes


def published_steps(folder: Path) -> list[int]:
    """Return the steps with a published folder, oldest first, complete or not."""
    if not folder.is_dir():
        return []
    steps = (step_of(path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(step for step in steps if step is not None)


def complete_steps(folder: Path) -> list[int]:
    """Return the steps whose manifest is complete and whose files have the right length; contents are not read."""
    return [step for step in published_steps(folder) if not quick_faults(step_folder(folder, step), step)[1]]


def write_manifest(folder: Path, step: int, files: dict[str, FileRecord], facts: dict[str, Any]) -> None:
    """Write ``manifest.json``, the last file of a checkpoint. ``facts`` are further JSON values."""
    body = {**facts, "format": FORMAT, "step": step, "files": {name: asdict(record) for name, record in files.items()}}
    seal = hashlib.sha256(_canonical(body)).hexdigest()
    create_durably(folder / MANIFEST, [_canonical({"body": body, "sha256": seal})])


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"


def read_manifest(folder: Path, step: int | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the body of a folder's manifest, or None, and the faults.

    Args:
        folder: a published checkpoint.
        step: the step in the folder's name; None accepts any.
    """
    path = folder / MANIFEST
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None, [f"{path}: missing, so the checkpoint is incomplete"]
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror}"]
    try:
        sealed = json.loads(content)
        body = sealed["body"]
        seal = sealed["sha256"]
        digest = hashlib.sha256(_canonical(body)).hexdigest()
        is_canonical = content == _canonical(sealed)
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, [f"{path}: {known_fault(path) or f'damaged ({type(error).__name__}: {error})'}"]
    if digest != seal or not is_canonical:
        return None, [f"{path}: damaged: its content has SHA-256 {digest}, it states {seal}"]
    if body["format"] != FORMAT:
        return None, [f"{path}: format {body['format']}, but this version of glm46 reads format {FORMAT}"]
    if step is not None and body["step"] != step:
        return None, [f"{path}: manifest is for step {body['step']}, the folder name says step {step}"]
    outside = [f"{path}: names a file outside its folder: {name!r}" for name in files if not is_file_name(name)]
    return None if outside else body, outside


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the meta of a step folder. Raises UserError if it is missing or damaged."""
    return read_json_object(folder / META, "take another checkpoint")


def records_of(body: dict[str, Any]) -> dict[str, FileRecord]:
    """Return the files that a manifest lists."""
    return {name: FileRecord(**record) for name, record in body["files"].items()}


def has_undated_loss(body: dict[str, Any]) -> bool:
    """Return True if a manifest has a validation loss without its step. Earlier versions wrote the last loss of the
    run, which may have been measured at an earlier step."""
    return body["validation_loss"] is not None and VALIDATION_STEP not in body


def quick_faults(path: Path, step: int | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the manifest's body, None if there are faults, and the faults that can be found without reading the other
    files. Not collective."""
    if not path.is_dir():
        steps = ", ".join(map(str, published_steps(path.parent))) or "none"
        return None, [f"{path}: no such checkpoint; steps in {path.parent}: {steps}"]
    body, faults = read_manifest(path, step)
    faults = faults if body is None else check_files(path, body)
    return None if faults else body, faults


def check_files(folder: Path, body: dict[str, Any]) -> list[str]:
    """Check that a folder holds exactly the listed files, each an ordinary file of the listed length. Returns the
    faults."""
    records = records_of(body)
    present = {entry.name: entry for entry in os.scandir(folder)}
    faults = [f"{folder / name}: not in the manifest" for name in sorted(set(present) - set(records) - {MANIFEST})]
    for name, record in sorted(records.items()):
        entry = present.get(name)
        if entry is None:
            faults.append(f"{folder / name}: missing")
        elif linked_object(folder / name) is not None:
            continue  # its length was compared when the mirror was made
        elif not entry.is_file(follow_symlinks=False):
            faults.append(f"{folder / name}: not an ordinary file")
        elif entry.stat().st_size != record.bytes:
            # DCP's files are zip archives and a pickle, which are no faults here.
            cause = known_fault(folder / name, allowed=(b"pk\x03\x04", b"\x80"))
            faults.append(f"{folder / name}: {cause or f'{entry.stat().st_size} bytes, expected {record.bytes}'}")
    return faults


def check_hash(path: Path, record: FileRecord) -> list[str]:
    """Compare one file's content with its record. Returns its fault, if any."""
    target = linked_object(path)
    place = path if target is None else target[0].url_of(target[1])
    try:
        actual = hash_file(path) if target is None else target[0].hash(target[1], record.bytes)
    except OSError as error:
        return [f"{place}: cannot be read: {error.strerror}"]
    return [] if actual == record else [f"{place}: SHA-256 {actual.sha256}, expected {record.sha256}"]


def _files_at_once(ranks: "Ranks") -> int:
    """Return how many files a rank hashes in parallel: many ranks on one machine already keep its cores busy."""
    return min(_FILES_AT_ONCE, max(1, (os.cpu_count() or 1) // ranks.size))


def _sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file; of a link to an object the one that its store states, else that of its content."""
    target = linked_object(file)
    if target is None:
        return hash_file(file).sha256
    store, name = target
    return stated_sha256(file) or store.hash(name, store.size(name) or 0).sha256


def hash_files(files: Sequence[Path], ranks: "Ranks") -> dict[str, str]:
    """Return the SHA-256 of each file by its name; each rank reads its share, several files at a time. Collective.
    Raises CheckpointError on all ranks if a file cannot be read."""
    local_files = files[ranks.rank :: ranks.size]
    with ranks.stage(f"hashing {files[0].parent}") as stage:
        hashes = map_in_threads(_sha256_of, local_files, _files_at_once(ranks))
        stage.value = {file.name: sha256 for file, sha256 in zip(local_files, hashes, strict=True)}
    return {name: value for hashes in stage.values for name, value in sorted(hashes.items())}


def verify_folder(path: Path, step: int | None, ranks: "Ranks") -> tuple[dict[str, Any] | None, list[str]]:
    """Return the manifest's body, None if there are faults, and all faults of a checkpoint, one line each, equal on all
    ranks. Collective.

    Rank 0 makes the quick checks; each rank then hashes its share of the files.

    Args:
        path: the step folder.
        step: the step that the manifest must have; None accepts any.
    """
    with ranks.stage(f"verifying {path}") as stage:
        if ranks.is_first:
            stage.value = quick_faults(path, step)
    body, faults = stage.values[0]
    if faults:
        return None, faults
    with ranks.stage(f"verifying {path}") as stage:
        largest_first = sorted(records_of(body).items(), key=lambda item: -item[1].bytes)
        local_files = largest_first[ranks.rank :: ranks.size]
        checked = map_in_threads(lambda item: check_hash(path / item[0], item[1]), local_files, _files_at_once(ranks))
        stage.value = [fault for faults in checked for fault in faults]
    faults = [fault for faults in stage.values for fault in faults]
    return None if faults else body, faults
