"""Summaries of checkpoints and of the tensors in them; no function here changes a file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from glm46.checkpoint.integrity import (
    META,
    check_hash,
    published_steps,
    quick_faults,
    records_of,
    step_folder,
    step_of,
    verify_folder,
)
from glm46.checkpoint.metadata import METADATA, read_checked_metadata
from glm46.config.errors import UserError
from glm46.distributed.ranks import ALONE


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
    """Whether the last step was applied, not skipped."""
    faults: tuple[str, ...]
    """Empty when the checkpoint is complete."""


def summarise(folder: Path, *, read_contents: bool) -> list[CheckpointSummary]:
    """The published checkpoints of a folder, oldest first.

    Args:
        folder: the checkpoint folder of a run, or one step folder.
        read_contents: hash every file; else compare lengths and names only.

    Raises:
        UserError: the folder is absent.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    own = step_of(folder.absolute())
    steps = (
        [(folder, own)] if own is not None else [(step_folder(folder, step), step) for step in published_steps(folder)]
    )
    return [_summary(path, step, read_contents) for path, step in steps]


def _summary(path: Path, step: int, read_contents: bool) -> CheckpointSummary:
    body, faults = verify_folder(path, step, ALONE) if read_contents else quick_faults(path, step)
    if body is None:
        return CheckpointSummary(path, step, None, None, None, None, False, tuple(faults))
    records = records_of(body)
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


def contents(path: Path) -> tuple[dict[str, Any], dict[str, TensorStorageMetadata]]:
    """The meta of one checkpoint, and DCP's description of each tensor by name.

    Raises:
        UserError: the checkpoint is absent or incomplete, or its index is damaged.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    body, faults = quick_faults(path, step_of(path.absolute()))
    if not faults:
        records = records_of(body)
        faults = [fault for name in (META, METADATA) for fault in check_hash(path / name, records[name])]
    if not faults:
        metadata, faults = read_checked_metadata(path, records)
    if faults:
        raise UserError(*faults)
    return json.loads((path / META).read_bytes()), metadata.state_dict_metadata
