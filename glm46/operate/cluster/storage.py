"""Checks of the folders of a run: rights, speed, free space."""

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from glm46.config.optimizer import state_folder_message
from glm46.files.durable import sync_folder
from glm46.files.local_disk import local_disk_fault
from glm46.operate.cluster.results import FAIL, WARN, Result, Subject, limited
from glm46.operate.estimate.memory import largest_stage, stage_memory
from glm46.run.checkpoint_size import checkpoint_size
from glm46.run.plan import Plan

_GB = 10**9
_GIB = 2**30
CHUNK_BYTES = 8 * 2**20
_QUICK_BYTES = 32 * 2**20
_FULL_BYTES = 2**30
_SAVE_SECONDS = 300
"""A save that takes longer loses more of a large run than failures do."""
_SYNC_SECONDS = 1.0
_CHECKPOINTS = 3
"""Minimum number of saves that must fit: one kept, one being written, and one to spare."""
_INODES = 10_000
STATES_SECONDS = 60
"""Time to read and write the optimizer states of a host, once in each step: as long as a step of a large run. The
guide's 7 GB/s is the peak of reading from one drive, and does not depend on the run."""


def run_folders(plan: Plan) -> dict[str, Path]:
    """Return the folders that a run writes, by key."""
    config = plan.config
    folders = {"job.dump_folder": Path(config.job.dump_folder), **config.folders_apart}
    if config.checkpoint.node_local_folder:
        folders["checkpoint.node_local_folder"] = Path(config.checkpoint.node_local_folder)
    if config.optimizer.state_offload == "nvme":
        folders["optimizer.state_offload_folder"] = Path(config.optimizer.state_offload_folder or "")
    return folders


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def writing(subject: Subject) -> Iterator[Result]:
    """Check that each folder can be written, renamed in and synced, and whether a checkpoint can be written in time."""
    plan = subject.plan
    folders = run_folders(plan) if plan else {"current folder": Path.cwd()}
    gb_per_second = 0.0
    if plan is not None and plan.config.checkpoint.enable:
        gb_per_second = checkpoint_size(plan).total / _SAVE_SECONDS / subject.nodes / _GB
    for key, folder in folders.items():
        # The ranks measure this one, all at once, as they write their states.
        needed = 0.0 if key == "optimizer.state_offload_folder" else gb_per_second
        yield from probe_folder(key, folder, needed, probe_size(is_full=subject.is_full))


def probe_size(*, is_full: bool) -> int:
    """Return the bytes to write for a measurement."""
    return _FULL_BYTES if is_full else _QUICK_BYTES


def probe_folder(key: str, folder: Path, gb_per_second: float, size: int) -> Iterator[Result]:
    """Return the results for one folder; the files written for it are removed.

    Args:
        gb_per_second: minimum speed of writing, synced.
        size: bytes to write, a multiple of 8 MiB.
    """
    place = existing(folder)
    if not os.access(place, os.W_OK | os.X_OK):
        yield Result(key, FAIL, f"{place} cannot be written", "writable", "chown the folder, or set another one")
        return
    draft = place / f".preflight-{uuid.uuid4().hex}"
    final = draft.with_suffix(".done")
    chunk = os.urandom(CHUNK_BYTES)
    try:
        seconds = write_synced(draft, chunk, size)
        began = time.monotonic()
        draft.rename(final)
        sync_folder(place)
        renamed = time.monotonic() - began
        is_intact = _holds(final, chunk)
    except OSError as error:
        remedy = "free space, mount it writable, or set another folder"
        yield Result(key, FAIL, f"{place}: {error.strerror}", "writable", remedy)
        return
    finally:
        draft.unlink(missing_ok=True)
        final.unlink(missing_ok=True)
    speed = size / seconds / _GB
    remedy = f"a checkpoint waits for it; look at the load of {place}, or set another folder"
    value = f"{place}: {speed:.2f} GB/s written and synced"
    limit = f">= {gb_per_second:.2f} GB/s" if gb_per_second else "writable"
    yield limited(key, speed >= gb_per_second, value, limit, remedy, otherwise=WARN)
    remedy = "the server of the file system is slow: a save syncs hundreds of files"
    limit = f"<= {_SYNC_SECONDS:.0f} s"
    yield limited(f"{key}: sync", renamed <= _SYNC_SECONDS, f"{renamed:.3f} s", limit, remedy, otherwise=WARN)
    if not is_intact:
        value = f"{place}: other bytes are read than were written"
        yield Result(key, FAIL, value, "equal", "ISOLATE the host, replace the disk")


def write_synced(path: Path, chunk: bytes, size: int) -> float:
    """Write a new file of whole chunks, and sync it; return the seconds."""
    began = time.monotonic()
    with path.open("xb") as file:
        for _ in range(size // len(chunk)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return max(time.monotonic() - began, 1e-6)


def _holds(path: Path, chunk: bytes) -> bool:
    with path.open("rb") as file:
        return all(part == chunk for part in iter(lambda: file.read(len(chunk)), b""))


def free_space(subject: Subject) -> Iterator[Result]:
    """Check that the run's checkpoints fit, by the planner's size of a checkpoint."""
    plan = subject.plan
    if plan is None:
        return
    config = plan.config
    if config.checkpoint.enable:
        count = max(config.checkpoint.keep_latest_k + 1, _CHECKPOINTS)
        needed = count * checkpoint_size(plan).total
        place = existing(config.checkpoint_folder)
        free = shutil.disk_usage(place).free
        inodes = os.statvfs(place)
        limit = f">= {needed / _GIB:,.2f} GiB, {count} checkpoints"
        remedy = "free space, set checkpoint.folder to a larger disk, or lower checkpoint.keep_latest_k"
        yield limited("space for checkpoints", free >= needed, f"{place}: {free / _GIB:,.2f} GiB", limit, remedy)
        if inodes.f_files:  # some file systems count none
            value = f"{inodes.f_favail:,} files can be made"
            yield limited("inodes", inodes.f_favail >= _INODES, value, f">= {_INODES:,}", "remove small files")
    if config.optimizer.state_offload == "nvme":
        folder = Path(config.optimizer.state_offload_folder or "")
        fault = local_disk_fault(folder)
        needed = state_bytes(plan) * subject.processes
        if fault is None and shutil.disk_usage(folder).free < needed:
            fault = f"optimizer states need {needed / _GIB:,.2f} GiB"
        message = fault and state_folder_message(folder, fault)
        limit = f"local, {needed / _GIB:,.2f} GiB free"
        remedy = "set another folder on a local disk"
        yield limited("space for optimizer states", fault is None, message or str(folder), limit, remedy)


def state_bytes(plan: Plan) -> float:
    """Return the bytes of optimizer states that a rank keeps on its local disk."""
    return largest_stage(stage_memory(plan)).disk


STORAGE_CHECKS = {"folders": writing, "space for checkpoints": free_space}
