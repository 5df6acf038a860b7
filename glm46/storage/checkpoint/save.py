"""One save, from its snapshot to the removal of old checkpoints, in the calling thread or in a background one."""

import json
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.ranks import CheckpointError, Ranks
from glm46.files.durable import create_durably
from glm46.files.store import store_of
from glm46.storage.checkpoint.dcp import write_tensors
from glm46.storage.checkpoint.finite import refuse_not_finite
from glm46.storage.checkpoint.gathering import Destination, NodeFolder, gather
from glm46.storage.checkpoint.integrity import (
    VALIDATION_STEP,
    complete_steps,
    has_undated_loss,
    read_manifest,
    step_folder,
    verify_folder,
)
from glm46.storage.checkpoint.metadata import METADATA
from glm46.storage.checkpoint.publish import Retention, draft_folder, open_draft, publish, remove, steps_to_remove


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint, fixed when the save is requested."""

    step: int
    tensors: Mapping[str, Tensor]
    meta: bytes
    """Encoded by `encode_meta` when the save is requested, because the trainer changes the values afterwards."""
    validation_loss: float | None = None
    """The value for ``keep_best_k``, measured at this step; None if the run did not validate at this step."""
    is_good: bool = True
    """True if the last step was applied. A step is skipped when its metrics are bad, and then the state may be bad."""
    before_publishing: Callable[[], None] = lambda: None
    """Called on the first rank just before the checkpoint is published."""

    def facts(self, world_size: int, *, is_finite: bool) -> dict[str, Any]:
        """Return the fields of the manifest except the files, for people and for retention. ``is_finite``: every value
        was checked, and is finite."""
        origin = {"saved_at": time.time(), "world_size": world_size, "torch": torch.__version__, "finite": is_finite}
        validation = {
            "validation_loss": self.validation_loss,
            VALIDATION_STEP: None if self.validation_loss is None else self.step,
        }
        return origin | validation | {"good": self.is_good}


def encode_meta(meta: dict[str, Any]) -> bytes:
    """Return the content of ``meta.json``. Raises TypeError if ``meta`` holds values that JSON cannot hold."""
    return json.dumps(meta, indent=1).encode() + b"\n"


@dataclass(frozen=True)
class SaveOutcome:
    """Size and time of a finished save."""

    step: int
    bytes: int
    """Total size of all files of the checkpoint, over all ranks."""
    save_seconds: float
    """Seconds from the call until the checkpoint was published and old ones were removed."""
    stall_seconds: float
    """Seconds that training waited."""


@dataclass(frozen=True)
class SaveTarget:
    """The folders of a run's checkpoints, and the rule by which old ones are removed."""

    destination: Destination
    rule: Retention
    node: NodeFolder | None
    """A local disk that saves are written to first."""

    @property
    def folder(self) -> Path:
        return self.destination.path


def save_now(
    target: SaveTarget,
    snapshot: Snapshot,
    ranks: Ranks,
    in_use: Collection[int],
    staged: dict[str, Tensor] | None = None,
) -> int:
    """Write and publish a checkpoint, then remove old ones. Collective. Returns the bytes of all files.

    Raises:
        CheckpointError: on all ranks, naming the ranks that failed. Earlier checkpoints are untouched.
        NotFiniteError: the tensors hold values that are not finite.
        RankLostError: a rank has ended or does not answer.
    """
    with ranks.stage(f"saving step {snapshot.step}"):  # for a rank that fails between the inner stages
        to_be_saved = snapshot.tensors if staged is None else staged
        refuse_not_finite(to_be_saved, ranks)
        if target.node is None:
            size = _write(target.folder, ranks.is_first, snapshot, ranks, staged)
        else:
            size = _write(target.node.path, target.node.is_leader, snapshot, ranks, staged)
            gather(target.node, target.destination, ranks)
        _remove_old(target, snapshot.step, ranks, in_use)
    return size


def _write(folder: Path, is_leader: bool, snapshot: Snapshot, ranks: Ranks, staged: dict[str, Tensor] | None) -> int:
    """Write and publish a checkpoint; with local disks, each node writes its part. Collective. Returns the bytes of all
    files, over all nodes.

    Args:
        folder: the folder of step folders that this rank sees.
        is_leader: True on one of the ranks that see the same folder, on rank 0 in any case.
    """
    draft = draft_folder(folder, snapshot.step)
    with ranks.stage("making the checkpoint folder") as leaders:
        leaders.value = is_leader
        if is_leader:
            open_draft(folder, snapshot.step)
    try:
        files = write_tensors(draft, snapshot.tensors, ranks, staged)
        with ranks.stage("reading the index") as stage:
            if ranks.is_first:
                # Only this rank's folder has DCP's metadata. With local disks the other leaders copy it.
                metadata = (draft / METADATA).read_bytes() if sum(leaders.values) > 1 else None
                stage.value = metadata, snapshot.meta, snapshot.facts(ranks.size, is_finite=True)
        metadata, meta, facts = stage.values[0]
        with ranks.stage("publishing"):
            if ranks.is_first:
                snapshot.before_publishing()
            if is_leader:
                if not ranks.is_first:
                    create_durably(draft / METADATA, [metadata])
                publish(draft, snapshot.step, files, meta, facts)
    except CheckpointError:
        if is_leader:  # no rank writes any more; a full disk gets its space back
            shutil.rmtree(draft, ignore_errors=True)
        raise
    return sum(record.bytes for record in files.values())


def _remove_old(target: SaveTarget, saved: int, ranks: Ranks, in_use: Collection[int]) -> None:
    folder = target.folder
    with ranks.stage("listing old checkpoints") as stage:
        if ranks.is_first:
            manifests = ((step, read_manifest(step_folder(folder, step), step)[0]) for step in complete_steps(folder))
            bodies = {step: body for step, body in manifests if body is not None}
            losses = {step: body["validation_loss"] for step, body in bodies.items()}
            doubtful = {step for step, body in bodies.items() if not body.get("good", True)}
            undated = {step for step, body in bodies.items() if has_undated_loss(body)}
            stage.value = steps_to_remove(losses, target.rule, in_use, doubtful, undated)
    old = stage.values[0]
    # A disk can lose data that it has accepted: old checkpoints stay until the new one was read back. The objects of a
    # store were read back by their uploads.
    is_read_back = store_of(folder) is not None
    if old and not is_read_back and (faults := verify_folder(step_folder(folder, saved), saved, ranks)[1]):
        raise CheckpointError(*faults)
    with ranks.stage("removing old checkpoints"):
        if ranks.is_first:
            for step in old:
                remove(step_folder(folder, step))
