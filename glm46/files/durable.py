"""Durable files: after a write or rename, a file is either complete and on the disk, or absent; hashes of files."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm46.files.regular_file import open_descriptor

_READ_BYTES = 1 << 20
_WAITING_FILES = 4


@dataclass(frozen=True)
class FileRecord:
    """Length of a file and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


def hash_file(path: Path) -> FileRecord:
    """Return length and SHA-256 of a file. A second thread hashes each piece while the next one is read. Raises OSError
    if the file cannot be read."""
    digest = hashlib.sha256()
    length = 0
    reading, other = (memoryview(bytearray(_READ_BYTES)) for _ in range(2))
    hashed: Future[None] | None = None
    with (
        open(open_descriptor(path), "rb", buffering=0) as file,
        ThreadPoolExecutor(1, thread_name_prefix="hash") as hasher,
    ):
        while count := file.readinto(reading):
            if hashed is not None:
                hashed.result()
            hashed = hasher.submit(digest.update, reading[:count])
            reading, other = other, reading
            length += count
    return FileRecord(bytes=length, sha256=digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make new, renamed and removed names in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_durably(path: Path, blocks: Iterable[Any]) -> FileRecord:
    """Create a file; its bytes, but not yet its name, are on the disk when this returns. Raises OSError if the disk is
    full or not writable.

    Args:
        path: must not exist.
        blocks: bytes-like objects, written one after another.
    """
    digest = hashlib.sha256()
    length = 0
    with path.open("xb") as file:
        for block in blocks:
            digest.update(block)
            file.write(block)
            length += memoryview(block).nbytes
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=length, sha256=digest.hexdigest())


def replace_durably(path: Path, blocks: Iterable[Any]) -> FileRecord:
    """Write a file through a temporary one and a rename: a reader sees the old content or the new content.

    Several processes may replace the same file concurrently.

    Raises:
        OSError: the disk is full or not writable; `path` is unchanged and the temporary file is removed.
    """
    temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process with the same id
    try:
        record = create_durably(temporary, blocks)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return record


class Closer:
    """Closes written files in a second thread, so that one file is synced while the next is written.

    Closing includes fsync. Leaving the context waits for all files and raises the first error. At most four files wait,
    so that a slow disk slows the writer and the number of open files stays small.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> "Closer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()  # closes the waiting files, after an error too
        if kind is None:
            self.finish()

    def close(self, close: Callable[[], None]) -> None:
        """Schedule the closing of a file. Raises OSError if an earlier file could not be closed."""
        while len(self._waiting) >= _WAITING_FILES:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(close))

    def finish(self) -> None:
        """Wait until every file is closed. Raises OSError if a file could not be closed."""
        while self._waiting:
            self._waiting.popleft().result()
