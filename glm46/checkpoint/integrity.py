"""What makes a checkpoint folder trustworthy: durable writes, file hashes, and the manifest that lists them.

``manifest.json`` is one canonical JSON text: ``{"body": {...}, "sha256": hash of the canonical body}``. A file whose
bytes are not exactly the canonical text of its content is refused, so no byte of it can change unseen.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
META = "meta.json"
FORMAT = 1
_READ_BYTES = 1 << 20
_WAITING_FILES = 4


@dataclass(frozen=True)
class FileRecord:
    """A file as it was handed to the disk: its length and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def hash_file(path: Path) -> FileRecord:
    """Length and SHA-256 of a file, read in pieces; each is hashed by another thread while the next one is read.

    Raises:
        OSError: when it cannot be read.
    """
    digest = hashlib.sha256()
    length = 0
    reading, other = (memoryview(bytearray(_READ_BYTES)) for _ in range(2))
    hashed: Future[None] | None = None
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="hash") as hasher:
        while count := file.readinto(reading):
            if hashed is not None:
                hashed.result()
            hashed = hasher.submit(digest.update, reading[:count])
            reading, other = other, reading
            length += count
    return FileRecord(bytes=length, sha256=digest.hexdigest())


class Closer:
    """Closes written files in another thread, so that the disk takes one while the next is filled.

    Closing means: on the disk. Leaving the context waits for all, and fails when one failed. Only a few wait at a time:
    each is an open file, and a disk that falls behind must hold up the writer.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> "Closer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()  # also what waits still is closed, whatever went wrong
        if kind is None:
            self.finish()

    def close(self, close: Callable[[], None]) -> None:
        """Have a file closed soon.

        Raises:
            OSError: an earlier one could not be closed.
        """
        while len(self._waiting) >= _WAITING_FILES:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(close))

    def finish(self) -> None:
        """Wait until every file is closed.

        Raises:
            OSError: one could not be closed.
        """
        while self._waiting:
            self._waiting.popleft().result()


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder (new, renamed, removed) survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> FileRecord:
    """Create a new file that is on the disk, not only in memory, when this returns."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def replace_durably(path: Path, content: bytes) -> None:
    """Give a file new content; a reader sees the old or the new one, never a mixture."""
    new = path.with_name(path.name + ".tmp")
    new.unlink(missing_ok=True)
    write_durably(new, content)
    os.replace(new, path)
    sync_folder(path.parent)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"


def write_manifest(folder: Path, step: int, files: dict[str, FileRecord], facts: dict[str, Any]) -> None:
    """Write ``manifest.json``, the last file of a checkpoint. ``facts`` are JSON values for people and tools."""
    body = {**facts, "format": FORMAT, "step": step, "files": {name: asdict(record) for name, record in files.items()}}
    seal = hashlib.sha256(_canonical(body)).hexdigest()
    write_durably(folder / MANIFEST, _canonical({"body": body, "sha256": seal}))


def read_manifest(folder: Path, step: int | None) -> tuple[dict[str, Any] | None, list[str]]:
    """The body of a folder's manifest, or None, and what is wrong with it.

    Args:
        folder: a published checkpoint.
        step: the step that the folder's name claims; None asks for no particular one.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None, [f"{path}: missing, so the checkpoint is incomplete"]
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror}"]
    try:
        sealed = json.loads(content)
        body, seal = sealed["body"], sealed["sha256"]
        found = hashlib.sha256(_canonical(body)).hexdigest()
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, [f"{path}: damaged ({type(error).__name__}: {error})"]
    if found != seal or content != _canonical(sealed):
        return None, [f"{path}: damaged: its content hashes to {found}, its seal says {seal}"]
    if body["format"] != FORMAT:
        return None, [f"{path}: format {body['format']}, but this version of glm46 reads format {FORMAT}"]
    if step is not None and body["step"] != step:
        return None, [f"{path}: of step {body['step']}, in the folder of step {step}"]
    outside = [name for name in files if Path(name).name != name]
    if outside:
        return None, [f"{path}: names a file outside its folder: {name!r}" for name in outside]
    return body, []


def records_of(body: dict[str, Any]) -> dict[str, FileRecord]:
    """The files that a manifest lists."""
    return {name: FileRecord(**record) for name, record in body["files"].items()}


def check_files(folder: Path, body: dict[str, Any]) -> list[str]:
    """The cheap half of verification: exactly the listed files, ordinary files, of the listed length."""
    records = records_of(body)
    present = {entry.name: entry for entry in os.scandir(folder)}
    faults = [f"{folder / name}: not in the manifest" for name in sorted(set(present) - set(records) - {MANIFEST})]
    for name, record in sorted(records.items()):
        entry = present.get(name)
        if entry is None:
            faults.append(f"{folder / name}: missing")
        elif not entry.is_file(follow_symlinks=False):
            faults.append(f"{folder / name}: not an ordinary file")
        elif entry.stat().st_size != record.bytes:
            faults.append(f"{folder / name}: {entry.stat().st_size} bytes, expected {record.bytes}")
    return faults


def check_hash(path: Path, record: FileRecord) -> list[str]:
    """The thorough half, for one file: its content."""
    try:
        found = hash_file(path)
    except OSError as error:
        return [f"{path}: cannot be read: {error.strerror}"]
    if found != record:
        return [f"{path}: SHA-256 {found.sha256}, expected {record.sha256}"]
    return []
