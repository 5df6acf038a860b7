"""One save from the first folder to the last removal, in the calling thread or behind the back of training."""

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from glm46.checkpoint.dcp import write_tensors
from glm46.checkpoint.finite import refuse_not_finite
from glm46.checkpoint.integrity import read_manifest
from glm46.checkpoint.node_local import NodeFolder, gather, save_locally
from glm46.checkpoint.publish import complete_steps, open_draft, publish, remove, step_folder
from glm46.checkpoint.retention import Retention, steps_to_remove
from glm46.checkpoint.snapshot import Snapshot
from glm46.checkpoint.verification import verify_folder
from glm46.distributed.ranks import CheckpointError, Ranks


@dataclass(frozen=True)
class SaveOutcome:
    """What a finished save cost."""

    step: int
    bytes: int
    """All files of the checkpoint, over all ranks."""
    save_seconds: float
    """From the call until it was published and old ones were removed."""
    stall_seconds: float
    """How long training waited for it."""


@dataclass(frozen=True)
class Place:
    """Where a run's checkpoints go, and which of them stay."""

    folder: Path
    rule: Retention
    node: NodeFolder | None
    """A local disk to write to first."""


def save_now(place: Place, content: Snapshot, ranks: Ranks, in_use: Collection[int], staged: dict | None = None) -> int:
    """Write, publish, and remove what is too old. Collective.

    Returns:
        The bytes of all files.

    Raises:
        CheckpointError: on all ranks, naming the ranks that failed. Earlier checkpoints are untouched.
        NotFiniteError: the tensors hold values that are not finite.
    """
    refuse_not_finite(content.tensors if staged is None else staged, ranks)
    if place.node is None:
        size = _save_shared(place.folder, content, ranks, staged)
    else:
        size = save_locally(place.node, content, ranks, staged)
        gather(place.node, place.folder, ranks)
    _remove_old(place, content.step, ranks, in_use)
    return size


def _save_shared(folder: Path, content: Snapshot, ranks: Ranks, staged: dict | None) -> int:
    with ranks.stage("making the checkpoint folder") as stage:
        if ranks.is_first:
            stage.value = open_draft(folder, content.step)
    draft = stage.values[0]
    try:
        files = write_tensors(draft, content.tensors, ranks, staged)
        with ranks.stage("publishing"):
            if ranks.is_first:
                publish(draft, content.step, files, content.meta, content.facts(ranks.size, is_finite=True))
    except CheckpointError:
        if ranks.is_first:  # the others have left the folder: a full disk gets its space back
            shutil.rmtree(draft, ignore_errors=True)
        raise
    return sum(record.bytes for record in files.values())


def _remove_old(place: Place, saved: int, ranks: Ranks, in_use: Collection[int]) -> None:
    folder = place.folder
    with ranks.stage("listing old checkpoints") as stage:
        if ranks.is_first:
            bodies = {step: read_manifest(step_folder(folder, step), step)[0] for step in complete_steps(folder)}
            losses = {step: body["validation_loss"] for step, body in bodies.items()}
            doubtful = {step for step, body in bodies.items() if not body.get("good", True)}
            stage.value = steps_to_remove(losses, place.rule, in_use, doubtful)
    going = stage.values[0]
    # A disk can lose what it was given. Until the new checkpoint was read back, the old ones are all there is.
    if going and (faults := verify_folder(step_folder(folder, saved), saved, ranks)):
        raise CheckpointError(*faults)
    with ranks.stage("removing old checkpoints"):
        if ranks.is_first:
            for step in going:
                remove(step_folder(folder, step))
