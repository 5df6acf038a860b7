"""Plans of best-fit packing on disk: the first process makes them, every process that reads rows maps them to memory.

A plan is a safetensors file ``packs-<row length>-<key>.safetensors`` in the folder of its source.
The key is a hash of the shards, the range of documents and the row length. A damaged file is made again.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from glm46.config.errors import UserError
from glm46.files.array_file import map_arrays, write_arrays
from glm46.files.lock import FileLock
from glm46.storage.data.best_fit import PackPlan, concatenate, plan_groups
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.packing import open_tokens
from glm46.storage.data.shards import SHARD_REMEDY

# Raise it when a change packs the same documents differently.
_FORMAT = "glm46-packs-1"

# Errors of a folder that cannot hold a plan: each process then makes the same plan for itself.
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)

# Above this size a load checks only the header of a plan, not the hash of its content.
_HASHED_AT_LOAD_BYTES = 2**30


def plan_of(manifest: Manifest, seq_len: int, share: tuple[float, float] = (0.0, 1.0)) -> PackPlan:
    """Return the packing plan of a source's training split, from a file if the folder can hold one.

    Args:
        share: the range of documents, as in `open_tokens`.
    """
    try:
        return keep_plan(manifest, seq_len, share)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
    return concatenate(_groups(manifest, seq_len, share))


def keep_plan(manifest: Manifest, seq_len: int, share: tuple[float, float] = (0.0, 1.0)) -> PackPlan:
    """Return the plan of `plan_of` from its file, and make the file if it is missing or damaged.

    Any number of processes may call this concurrently: one makes the plan, the others wait and read it.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    folder = manifest.folder
    key = _key(manifest, seq_len, share)
    file = folder / f"packs-{seq_len}-{key[:16]}.safetensors"
    if (plan := _read(file, key)) is not None:
        return plan
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".packs.lock")
    lock.acquire(timeout_seconds=None)
    try:
        if _read(file, key) is None:
            _write(file, key, _groups(manifest, seq_len, share))
    finally:
        lock.release()
    if (plan := _read(file, key)) is None:
        raise OSError(errno.EIO, "a plan that was just written cannot be read", str(file))
    return plan


def _groups(manifest: Manifest, seq_len: int, share: tuple[float, float]) -> Iterator[PackPlan]:
    return plan_groups(open_tokens(manifest, "train", share).doc_ends_by_shard(), seq_len)


def _key(manifest: Manifest, seq_len: int, share: tuple[float, float]) -> str:
    shards = [shard.sha256 for shard in manifest.splits["train"].shards]
    return hashlib.sha256(json.dumps([_FORMAT, seq_len, share, shards]).encode()).hexdigest()


def _read(file: Path, key: str) -> PackPlan | None:
    """Read a plan; None if the file is missing or damaged."""
    try:
        tensors, metadata, _ = map_arrays(file, SHARD_REMEDY)
        plan = PackPlan(**tensors)
    except (UserError, TypeError):
        return None
    sizes = [len(tensor) for tensor in vars(plan).values()]
    if (metadata.get("key"), metadata.get("sizes")) != (key, json.dumps(sizes)):
        return None
    if sum(tensor.nbytes for tensor in tensors.values()) <= _HASHED_AT_LOAD_BYTES and metadata["sha256"] != _hash(plan):
        return None
    return plan


def _write(file: Path, key: str, groups: Iterator[PackPlan]) -> None:
    """Write a plan group by group, so that memory does not grow with the documents. The file is complete or absent."""
    scratch = file.with_name(".packs.partial")
    # Left by a process that died; only the holder of the lock uses this folder.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        starts_of_rows = scratch / "row_starts"
        starts_of_pieces = scratch / "piece_starts"
        lengths_of_pieces = scratch / "piece_lengths"
        rows = 0
        pieces = 0
        with (
            starts_of_rows.open("wb") as row_starts,
            starts_of_pieces.open("wb") as starts,
            lengths_of_pieces.open("wb") as lengths,
        ):
            row_starts.write(np.zeros(1, np.int64).data)
            for group in groups:
                row_starts.write((group.row_starts[1:] + pieces).data)
                starts.write(group.piece_starts.data)
                lengths.write(group.piece_lengths.data)
                rows += group.rows
                pieces += len(group.piece_starts)
        sizes = (rows + 1, pieces, pieces)
        plan = PackPlan(*map(_mapped, (starts_of_rows, starts_of_pieces, lengths_of_pieces), sizes))
        metadata = {"format": _FORMAT, "key": key, "sizes": json.dumps(sizes), "sha256": _hash(plan)}
        write_arrays(file, vars(plan), metadata)
    finally:
        shutil.rmtree(scratch)


def _mapped(file: Path, size: int) -> np.ndarray:
    return np.memmap(file, np.int64, "r", shape=(size,)) if size else np.empty(0, np.int64)


def _hash(plan: PackPlan) -> str:
    digest = hashlib.sha256()
    for tensor in vars(plan).values():
        digest.update(tensor.view(np.uint8).data)
    return digest.hexdigest()
