"""Implements the kinds of ``python -m glm46 checkpoint``."""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.printable import printable
from glm46.files.store import store_of
from glm46.files.store_lease import Lease
from glm46.storage.checkpoint.folder_kind import Kind, checkpoint_folders, kind_of, require_kind
from glm46.storage.checkpoint.integrity import (
    META,
    check_files,
    check_hash,
    has_undated_loss,
    published_steps,
    read_manifest,
    read_meta,
    records_of,
    step_folder,
    step_of,
)
from glm46.storage.checkpoint.publish import Retention, remove, steps_to_remove
from glm46.storage.checkpoint.store_mirror import shown

_EXIT_DAMAGED = 1
_LONGEST_SHOWN = 200
"""Maximum characters shown of a value in the meta; for longer values only the length is printed."""


@dataclass(frozen=True)
class CheckpointSummary:
    """One published checkpoint, from its manifest and meta. Fields that cannot be read are None."""

    path: Path
    step: int
    faults: tuple[str, ...]
    """Empty when the checkpoint is complete."""
    bytes: int | None = None
    """Size of all files except the manifest."""
    saved_at: float | None = None
    """Seconds since the epoch."""
    tokens: int | None = None
    validation_loss: float | None = None
    is_loss_undated: bool = False
    """True if an earlier version saved the loss, which may have been measured at an earlier step."""
    is_good: bool = False
    """True if the last step was applied, not skipped."""


def summarise(folder: Path, *, read_contents: bool) -> list[CheckpointSummary]:
    """Summarise the published checkpoints of a folder, oldest first. Changes no file.

    Args:
        folder: the checkpoint folder of a run, its dump folder, or one step folder.
        read_contents: hash every file and check values for NaN and infinity; else compare lengths and names only.

    Raises:
        UserError: the folder is absent, or has no checkpoint.
    """
    folder_step = step_of(folder.absolute())
    if folder_step is not None and kind_of(folder) in (Kind.STEP, Kind.OTHER):
        folders = [(folder, folder_step)]
    else:
        require_kind(folder, Kind.STEPS, Kind.RUN)
        folders = [
            (step_folder(steps_folder, step), step)
            for steps_folder in checkpoint_folders(folder)
            for step in published_steps(steps_folder)
        ]
    return [_summary(path, step, read_contents) for path, step in folders]


def _summary(path: Path, step: int, read_contents: bool) -> CheckpointSummary:
    body, faults = read_manifest(path, step)
    if body is None:
        return CheckpointSummary(path, step, tuple(faults))
    records = records_of(body)
    faults = check_files(path, body)
    if read_contents and not faults:
        from glm46.operate.models.checkpoint_contents import content_faults  # imports torch, which a list does not need

        faults = content_faults(path, records)
    meta = {} if check_hash(path / META, records[META]) else read_meta(path)
    return CheckpointSummary(
        path,
        step,
        tuple(faults),
        bytes=sum(record.bytes for record in records.values()),
        saved_at=body["saved_at"],
        tokens=meta.get("progress", {}).get("tokens"),
        validation_loss=body["validation_loss"],
        is_loss_undated=has_undated_loss(body),
        is_good=body.get("good", True),
    )


def list_steps(arguments: argparse.Namespace) -> int:
    """Print a line for each checkpoint of a folder. Return the exit code."""
    summaries = summarise(arguments.folder, read_contents=arguments.read_contents)
    print(f"{'step':>10} {'saved':19} {'tokens':>18} {'val. loss':>9} {'size':>10}  state")
    for summary in summaries:
        _print_summary(summary, "verified" if arguments.read_contents else "complete")
    if any(summary.is_loss_undated for summary in summaries):
        print("?: saved by an earlier version; the loss may have been measured at an earlier step")
    return _EXIT_DAMAGED if any(summary.faults for summary in summaries) else 0


def _print_summary(summary: CheckpointSummary, good: str) -> None:
    saved = "-" if summary.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.saved_at))
    tokens = "-" if summary.tokens is None else f"{summary.tokens:,}"
    mark = "?" if summary.is_loss_undated else ""
    loss = "-" if summary.validation_loss is None else f"{summary.validation_loss:.4f}{mark}"
    size = "-" if summary.bytes is None else _size(summary.bytes)
    state = "DAMAGED" if summary.faults else good if summary.is_good else f"{good}, but its last step was skipped"
    print(f"{summary.step:>10} {saved:19} {tokens:>18} {loss:>9} {size:>10}  {state}")
    for fault in summary.faults:
        print(f"{'':>10} {printable(fault.replace(str(summary.path), shown(summary.path)))}")


def _size(count: int | None) -> str:
    count = count or 0
    power = min(int(math.log(count, 1024)), 5) if count else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def show(arguments: argparse.Namespace) -> int:
    """Print the meta and the tensors of a checkpoint. Return the exit code."""
    require_kind(arguments.folder, Kind.STEP)
    body, faults = read_manifest(arguments.folder, step_of(arguments.folder.absolute()))
    if body is not None:
        faults = check_files(arguments.folder, body)
    if body is None or faults:
        raise UserError(*faults)
    from glm46.operate.models.checkpoint_contents import stored_tensors  # imports torch: refusals come before it

    tensors = stored_tensors(arguments.folder, records_of(body))
    for key, value in read_meta(arguments.folder).items():
        text = value if isinstance(value, str) else json.dumps(value)
        if "\n" in text or len(text) > _LONGEST_SHOWN:
            text = f"{len(text):,} characters, in {shown(arguments.folder)}/{META}"
        print(printable(f"{key:20} {text}"))
    width = max((len(tensor.name) for tensor in tensors), default=0)
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        line = f"{tensor.dtype:9} {shape:24} {_size(tensor.bytes):>10}  {tensor.parts} part(s)"
        print(f"{printable(tensor.name):{width}}  {line}")
    print(f"{len(tensors)} tensors, {_size(sum(tensor.bytes for tensor in tensors))}")
    return 0


def prune(arguments: argparse.Namespace) -> int:
    """Remove old checkpoints, or print which would be removed. Return the exit code."""
    require_kind(arguments.folder, Kind.STEPS)
    rule = Retention(arguments.keep_latest_k, arguments.keep_every, arguments.keep_best_k)
    summaries = summarise(arguments.folder, read_contents=False)
    complete = {summary.step: summary for summary in summaries if not summary.faults}
    losses = {step: summary.validation_loss for step, summary in complete.items()}
    doubtful = [step for step, summary in complete.items() if not summary.is_good]
    undated = [step for step, summary in complete.items() if summary.is_loss_undated]
    removed = steps_to_remove(losses, rule, doubtful=doubtful, undated=undated)
    if not removed:
        print("nothing to remove")
        return 0
    newest = step_folder(arguments.folder, max(complete))
    faults = summarise(newest, read_contents=True)[0].faults
    if faults:
        raise UserError(
            *faults, f"{newest}: the newest checkpoint is damaged, so no older one is removed; remove it first"
        )
    store = store_of(arguments.folder)
    lease = None if store is None or not arguments.yes else Lease(store)
    if lease is not None and (holder := lease.acquire()):
        raise UserError(f"{arguments.folder}: {holder} is training in this prefix; wait for it")
    for step in removed:
        place = shown(complete[step].path)
        print(f"{'removed' if arguments.yes else 'would remove'} {place} ({_size(complete[step].bytes)})")
        if arguments.yes:
            remove(complete[step].path)
    if lease is not None:
        lease.release()
    if not arguments.yes:
        print("nothing was removed; add --yes to remove them")
    return 0
