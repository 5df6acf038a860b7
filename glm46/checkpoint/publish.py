"""A checkpoint is complete or invisible: the folder gets its name only when all of it is on the disk.

A save works in ``step-000123.tmp``. When tensors, meta and manifest are synced, the folder is renamed to
``step-000123``, the parent folder is synced, then ``latest`` is replaced. A published folder is never written again.
A step that is saved a second time moves the first one aside to ``step-000123.old`` until the new one has the name;
``repair`` ends an exchange that was cut. Removal renames to ``step-000123.trash`` first, so that no half-removed
folder looks published.
Only rank 0 calls these functions.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from glm46.checkpoint.integrity import META, check_files, read_manifest, write_manifest
from glm46.files.durable import FileRecord, create_durably, replace_durably, sync_folder

LATEST = "latest"
_PUBLISHED = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"step-\d{6,}\.(tmp|trash)")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return folder / f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name claims, or None when it is not the name of a published checkpoint."""
    match = _PUBLISHED.fullmatch(path.name)
    return int(match[1]) if match and step_folder(path.parent, int(match[1])) == path else None


def published_steps(folder: Path) -> list[int]:
    """Steps with a published folder, oldest first, whatever its state."""
    if not folder.is_dir():
        return []
    steps = (step_of(path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(step for step in steps if step is not None)


def complete_steps(folder: Path) -> list[int]:
    """Steps whose manifest is whole and whose files are there with the right length; contents are not read."""
    return [step for step in published_steps(folder) if not incomplete(step_folder(folder, step), step)]


def incomplete(path: Path, step: int | None) -> list[str]:
    """What the cheap checks find wrong with a published checkpoint."""
    body, faults = read_manifest(path, step)
    return faults if body is None else check_files(path, body)


def open_draft(folder: Path, step: int) -> Path:
    """An empty folder for a save to work in; what an earlier, cut save of any step left is removed.

    Raises:
        OSError: when the file system refuses.
    """
    make_durably(folder)
    repair(folder)
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)
    draft = step_folder(folder, step).with_suffix(".tmp")
    draft.mkdir()
    return draft


def make_durably(folder: Path) -> None:
    """Make a folder and its parents; after a power loss a checkpoint in it would else be whole and out of reach."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def publish(draft: Path, step: int, files: dict[str, FileRecord], meta: dict[str, Any], facts: dict[str, Any]) -> Path:
    """Seal a draft whose tensor files are on the disk, give it its name, and point ``latest`` at it.

    Raises:
        OSError: when the file system refuses; the checkpoints there before are untouched.
    """
    record = create_durably(draft / META, [meta])
    write_manifest(draft, step, {**files, META: record}, facts)
    return give_name(draft, step)


def give_name(draft: Path, step: int) -> Path:
    """Publish a folder that is whole, manifest and all. The moment of truth of every save and every gathering."""
    sync_folder(draft)
    target = step_folder(draft.parent, step)
    aside = target.with_suffix(".old")
    if target.exists():
        target.rename(aside)
    draft.rename(target)
    sync_folder(draft.parent)
    replace_durably(draft.parent / LATEST, [target.name.encode() + b"\n"])
    if aside.exists():
        remove(aside)
    return target


def repair(folder: Path) -> None:
    """End an exchange of one step's checkpoint that was cut: the old one returns unless the new one has the name."""
    for aside in folder.glob("step-*.old"):
        target = aside.with_suffix("")
        if target.exists():
            remove(aside)
        else:
            aside.rename(target)
            sync_folder(folder)


def set_aside(path: Path) -> Path:
    """Rename a published checkpoint so that no run takes it for its own; returns where it is."""
    aside = path.with_suffix(".abandoned")
    if aside.exists():
        remove(aside)
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def remove(path: Path) -> None:
    """Delete a checkpoint folder so that it is invisible from the first moment on."""
    trash = path.with_suffix(".trash")
    if trash.exists():
        shutil.rmtree(trash)
    os.rename(path, trash)
    sync_folder(path.parent)
    shutil.rmtree(trash)
