"""Summaries of checkpoints and of the tensors in them; no function here changes a file."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm46.compute.distributed.ranks import ALONE
from glm46.config.errors import UserError
from glm46.storage.checkpoint.finite import stored_not_finite
from glm46.storage.checkpoint.folder_kind import Kind, checkpoint_folders, kind_of, require_kind
from glm46.storage.checkpoint.integrity import (
    META,
    check_files,
    check_hash,
    published_steps,
    read_manifest,
    records_of,
    step_folder,
    step_of,
)
from glm46.storage.checkpoint.metadata import read_checked_metadata, tensor_entries


@dataclass(frozen=True)
class CheckpointSummary:
    """One published checkpoint, from its manifest and meta."""

    path: Path
    step: int
    bytes: int | None
    """All files but the manifest; None when the manifest cannot be read, like the next three fields."""
    saved_at: float | None
    """Seconds since the epoch."""
    tokens: int | None
    validation_loss: float | None
    is_good: bool
    """True if the last step was applied, not skipped."""
    faults: tuple[str, ...]
    """Empty when the checkpoint is complete."""


@dataclass(frozen=True)
class TensorSummary:
    """A tensor of a checkpoint; sizes are those of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    parts: int
    """Number of records, one for each rank that had a shard."""


def summarise(folder: Path, *, read_contents: bool) -> list[CheckpointSummary]:
    """The published checkpoints of a folder, oldest first.

    Args:
        folder: the checkpoint folder of a run, its dump folder, or one step folder.
        read_contents: hash every file and check values for NaN and infinity; else compare lengths and names only.

    Raises:
        UserError: the folder is absent, or there is no checkpoint in it.
    """
    stated = step_of(folder.absolute())
    if stated is not None and kind_of(folder) in (Kind.STEP, Kind.OTHER):
        folders = [(folder, stated)]
    else:
        require_kind(folder, Kind.STEPS, Kind.RUN)
        folders = [(step_folder(of, step), step) for of in checkpoint_folders(folder) for step in published_steps(of)]
    return [_summary(path, step, read_contents) for path, step in folders]


def _summary(path: Path, step: int, read_contents: bool) -> CheckpointSummary:
    body, faults = read_manifest(path, step)
    if body is None:
        return CheckpointSummary(path, step, None, None, None, None, False, tuple(faults))
    records = records_of(body)
    faults = check_files(path, body)
    if read_contents and not faults:
        faults = [fault for name, record in sorted(records.items()) for fault in check_hash(path / name, record)]
        if not faults:
            faults = stored_not_finite(path, records, ALONE)
    meta = {} if check_hash(path / META, records[META]) else json.loads((path / META).read_bytes())
    return CheckpointSummary(
        path=path,
        step=step,
        bytes=sum(record.bytes for record in records.values()),
        saved_at=body["saved_at"],
        tokens=meta.get("progress", {}).get("tokens"),
        validation_loss=body["validation_loss"],
        is_good=body.get("good", True),
        faults=tuple(faults),
    )


def contents(path: Path) -> tuple[dict[str, Any], list[TensorSummary]]:
    """The meta of one checkpoint, and its tensors ordered by name.

    Raises:
        UserError: the checkpoint is absent or incomplete, or its index is damaged.
    """
    require_kind(path, Kind.STEP)
    body, faults = read_manifest(path, step_of(path.absolute()))
    if body is None:
        raise UserError(*faults)
    records = records_of(body)
    faults = check_files(path, body) or [
        fault for name in (META, ".metadata") for fault in check_hash(path / name, records[name])
    ]
    metadata = None
    if not faults:
        metadata, faults = read_checked_metadata(path, records)
    if metadata is None:
        raise UserError(*faults)
    tensors = []
    for name, entry in sorted(tensor_entries(metadata).items()):
        dtype = entry.properties.dtype
        size = math.prod(entry.size) * dtype.itemsize
        tensors.append(
            TensorSummary(name, str(dtype).removeprefix("torch."), tuple(entry.size), size, len(entry.chunks))
        )
    return json.loads((path / META).read_bytes()), tensors
