"""The kinds of ``python -m glm46 checkpoint``."""

import argparse
import json
import math
import time

from glm46.config.errors import UserError
from glm46.storage.checkpoint.folder_kind import Kind, require_kind
from glm46.storage.checkpoint.inspection import CheckpointSummary, contents, summarise
from glm46.storage.checkpoint.integrity import step_folder
from glm46.storage.checkpoint.publish import Retention, remove, steps_to_remove

_EXIT_DAMAGED = 1
_LONGEST_SHOWN = 200
"""Characters of a value of the meta; longer values are only counted."""


def list_steps(arguments: argparse.Namespace) -> int:
    """Print a line for each checkpoint of a folder. Returns the exit code."""
    summaries = summarise(arguments.folder, read_contents=arguments.read_contents)
    print(f"{'step':>10} {'saved':19} {'tokens':>18} {'val. loss':>9} {'size':>10}  state")
    for summary in summaries:
        _print_summary(summary, "verified" if arguments.read_contents else "complete")
    return _EXIT_DAMAGED if any(summary.faults for summary in summaries) else 0


def _print_summary(summary: CheckpointSummary, good: str) -> None:
    saved = "-" if summary.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.saved_at))
    tokens = "-" if summary.tokens is None else f"{summary.tokens:,}"
    loss = "-" if summary.validation_loss is None else f"{summary.validation_loss:.4f}"
    size = "-" if summary.bytes is None else _size(summary.bytes)
    state = "DAMAGED" if summary.faults else good if summary.is_good else f"{good}, but its last step was skipped"
    print(f"{summary.step:>10} {saved:19} {tokens:>18} {loss:>9} {size:>10}  {state}")
    for fault in summary.faults:
        print(f"{'':>10} {fault}")


def _size(count: int) -> str:
    power = min(int(math.log(count, 1024)), 5) if count else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def show(arguments: argparse.Namespace) -> int:
    """Print the meta and the tensors of a checkpoint. Returns the exit code."""
    meta, tensors = contents(arguments.folder)
    for key, value in meta.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if "\n" in text or len(text) > _LONGEST_SHOWN:
            text = f"{len(text):,} characters, in {arguments.folder / 'meta.json'}"
        print(f"{key:20} {text}")
    width = max((len(tensor.name) for tensor in tensors), default=0)
    for tensor in tensors:
        shape = " x ".join(str(extent) for extent in tensor.shape) or "scalar"
        print(f"{tensor.name:{width}}  {tensor.dtype:9} {shape:24} {_size(tensor.bytes):>10}  {tensor.parts} part(s)")
    print(f"{len(tensors)} tensors, {_size(sum(tensor.bytes for tensor in tensors))}")
    return 0


def prune(arguments: argparse.Namespace) -> int:
    """Remove old checkpoints, or say which. Returns the exit code."""
    require_kind(arguments.folder, Kind.STEPS)
    rule = Retention(arguments.keep_latest_k, arguments.keep_every, arguments.keep_best_k)
    complete = {one.step: one for one in summarise(arguments.folder, read_contents=False) if not one.faults}
    losses = {step: one.validation_loss for step, one in complete.items()}
    removed = steps_to_remove(losses, rule, doubtful=[step for step, one in complete.items() if not one.is_good])
    if not removed:
        print("nothing to remove")
        return 0
    newest = step_folder(arguments.folder, max(complete))
    faults = summarise(newest, read_contents=True)[0].faults
    if faults:
        raise UserError(
            *faults, f"{newest}: the newest checkpoint is damaged, so no older one is removed; remove it first"
        )
    for step in removed:
        print(f"{'removed' if arguments.yes else 'would remove'} {complete[step].path} ({_size(complete[step].bytes)})")
        if arguments.yes:
            remove(complete[step].path)
    if not arguments.yes:
        print("nothing was removed; add --yes to remove them")
    return 0
