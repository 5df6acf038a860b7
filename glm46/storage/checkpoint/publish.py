"""Publishing and removing checkpoints: a checkpoint is complete or invisible.

A save works in ``step-000123.tmp``. When tensors, meta and manifest are synced, the folder is renamed to
``step-000123``, the parent folder is synced, then ``latest`` is replaced. A published folder is never written again.
A step that is saved a second time moves the first one to ``step-000123.old`` until the new one has the name; ``repair``
completes such an exchange after an interruption. Removal renames to ``step-000123.trash`` first, so that no
half-removed folder looks published. Only one rank calls these functions for a folder: rank 0 or, for a folder on the
disk of a node, one rank of that node.
"""

import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm46.files.durable import FileRecord, create_durably, replace_durably, sync_folder
from glm46.files.store import store_of
from glm46.storage.checkpoint.integrity import MANIFEST, META, step_folder, write_manifest

LATEST = "latest"
LEFTOVER = re.compile(r"step-\d{6,}\.(tmp|trash)")
"""Folders that a save removes before it writes."""


def draft_folder(folder: Path, step: int) -> Path:
    """Return the folder that a save of a step works in."""
    return step_folder(folder, step).with_suffix(".tmp")


def open_draft(folder: Path, step: int) -> Path:
    """Make an empty folder for a save to work in, and remove what interrupted saves of any step have left. Raises
    OSError if the file system refuses."""
    make_durably(folder)
    repair(folder)
    for path in folder.iterdir():
        if LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)
    draft = draft_folder(folder, step)
    draft.mkdir()
    return draft


def make_durably(folder: Path) -> None:
    """Make a folder and its parents; without the sync, a power loss could remove the path to a complete checkpoint."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def publish(draft: Path, step: int, files: dict[str, FileRecord], meta: bytes, facts: dict[str, Any]) -> Path:
    """Write meta and manifest into a draft whose tensor files are on the disk, and rename it. Raises OSError if the
    file system refuses; earlier checkpoints are untouched."""
    record = create_durably(draft / META, [meta])
    write_manifest(draft, step, {**files, META: record}, facts)
    return rename_draft(draft, step)


def rename_draft(draft: Path, step: int) -> Path:
    """Atomically rename a complete folder, manifest included, to its published name, and update ``latest``."""
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
    """Complete interrupted replacements of a step's checkpoint: the old one returns unless the new one has the name."""
    for aside in folder.glob("step-*.old"):
        target = aside.with_suffix("")
        if target.exists():
            remove(aside)
        else:
            aside.rename(target)
            sync_folder(folder)


def set_aside(path: Path) -> Path:
    """Rename a published checkpoint to ``.abandoned``, so that no run loads it, in its store too. Returns the new
    path."""
    if (store := store_of(path.parent)) is not None:
        store.move_folder(path.name, f"{path.name}.abandoned", first=MANIFEST)
    return _renamed(path, ".abandoned")


def remove(path: Path) -> None:
    """Delete a checkpoint folder, in its store too; it is invisible before the first file is deleted."""
    if (store := store_of(path.parent)) is not None:
        store.remove_folder(path.name, first=MANIFEST)
    shutil.rmtree(_renamed(path, ".trash"))


def _renamed(path: Path, suffix: str) -> Path:
    target = path.with_suffix(suffix)
    if target.exists():
        shutil.rmtree(target)
    path.rename(target)
    sync_folder(path.parent)
    return target


@dataclass(frozen=True)
class Retention:
    """The complete checkpoints to keep. The newest one is always kept."""

    keep_latest_k: int
    """Number of newest checkpoints; 0 keeps all."""
    keep_every: int = 0
    """Multiples of this step; 0 adds none."""
    keep_best_k: int = 0
    """Number of checkpoints with the lowest validation loss, among those validated at their step; 0 adds none."""


def steps_to_remove(
    complete: Mapping[int, float | None],
    rule: Retention,
    in_use: Collection[int] = (),
    doubtful: Collection[int] = (),
    undated: Collection[int] = (),
) -> list[int]:
    """Return the steps to delete after a save, oldest first. A pure function, so that any history can be tested.

    Args:
        complete: validation loss (None: not measured) by step, of the complete checkpoints and of no others.
        in_use: steps to keep whatever their age, such as the one the run started from.
        doubtful: steps saved while steps were being skipped. The newest of the others is kept, whatever its age.
        undated: steps whose loss may have been measured at an earlier step. They do not compete with the others; the
            best of them are kept as well, because an earlier version kept them for their loss.
    """
    if rule.keep_latest_k == 0:
        return []
    steps = sorted(complete)
    dated = {step: loss for step, loss in complete.items() if step not in undated}
    undated_losses = {step: loss for step, loss in complete.items() if step in undated}
    kept = {*steps[-rule.keep_latest_k :], *in_use}
    kept |= {*_best(dated, rule.keep_best_k), *_best(undated_losses, rule.keep_best_k)}
    good = [step for step in steps if step not in doubtful]
    kept |= {*good[-1:]}
    if rule.keep_every:
        kept |= {step for step in steps if step % rule.keep_every == 0}
    return [step for step in steps if step not in kept]


def _best(losses: Mapping[int, float | None], count: int) -> list[int]:
    """Return the steps with the lowest losses; among equal losses the later step."""
    # Only NaN differs from itself: a step with this loss is never among the best.
    measured = sorted((loss, -step) for step, loss in losses.items() if loss is not None and loss == loss)
    return [-negative for _, negative in measured[:count]]
