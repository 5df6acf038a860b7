"""Objects of an object store under one URL, through fsspec: read, written, compared and removed, with retries.

fsspec and the package of the provider (s3fs, gcsfs, adlfs) are the extra [cloud]; they are imported when the first URL
is used. Credentials come from the environment or from the provider's chain, and no message shows one.
"""

import errno
import hashlib
import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from glm46.config.errors import UserError
from glm46.files.block_digests import LEAST_BYTES, BlockDigests, blocks_name
from glm46.files.durable import FileRecord
from glm46.files.regular_file import read_regular
from glm46.files.threads import in_thread, map_in_threads

_Result = TypeVar("_Result")

OBJECTS_AT_ONCE = 8
"""Objects that one process moves at the same time, each in one connection."""
_BLOCK_BYTES = 1 << 23
"""Bytes of one request when an object is read."""
_PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between two attempts of a request; after the last attempt its error is raised."""
_ANSWER_SECONDS = 120.0
"""Time for one request of a block."""
_SLOWEST = 1e6
"""Bytes per second below which an upload counts as lost."""
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
"""Errors that another attempt would not change."""
_BUGS = (TypeError, AttributeError, NameError, AssertionError)
_MARK = ".store"
"""File with the URL whose objects a local folder lists."""
_SECRET = re.compile(r"\?\S+|(?i:(?:key|token|secret|signature|credential|password)\w*\W{1,3})\S+")


class StoredObject(NamedTuple):
    """Length of an object, and a text that changes when it is written again."""

    bytes: int
    version: str


class StoreError(OSError):
    """A request failed in all of its attempts; ``strerror`` is the last error, without credentials."""


class Store:
    """The objects whose URLs begin with a URL and a slash, by the rest of their URLs.

    All methods raise StoreError when the store does not answer, FileNotFoundError for a missing object, and
    PermissionError without the right.

    Args:
        url: see `glm46.config.store_address.store_url`.

    Raises:
        UserError: fsspec or the package of the provider is not installed, or fsspec does not know the scheme.
    """

    def __init__(self, url: str):
        self.url = url
        self._is_disk = url.startswith(("file:", "local:"))
        try:
            core = import_module("fsspec.core")
            options = {"auto_mkdir": True} if self._is_disk else {}
            self._files, self._root = core.url_to_fs(url, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            reason = _described(error)
            raise UserError(f"{url}: cannot be used: {reason}; pip install 'glm46[cloud]', or give a folder") from error

    def url_of(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def objects(self, prefix: str = "") -> dict[str, StoredObject]:
        """Return the objects whose names begin with a prefix that is empty or ends with a slash. A listing may lag
        behind the writes of other processes."""
        root = self._root.rstrip("/") + "/"
        listing = self._call(prefix, self._files.find, self._path(prefix).rstrip("/"), detail=True)
        infos = {path.removeprefix(root): info for path, info in listing.items() if path.startswith(root)}
        return {name: StoredObject(info["size"], _version(info)) for name, info in infos.items()}

    def size(self, name: str) -> int | None:
        """Return the length of an object in bytes, None if it is missing. Not from a listing."""
        try:
            length: int = self._call(name, self._files.info, self._path(name))["size"]
        except FileNotFoundError:
            return None
        return length

    def read(self, name: str) -> bytes:
        """Return a small object."""
        content: bytes = self._call(name, self._files.cat_file, self._path(name))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, which replaces an earlier one at once."""
        self._send(name, lambda path: self._files.pipe_file(path, content))

    def create(self, name: str, content: bytes) -> None:
        """Write a small object by a conditional request, where the store has them. Raises FileExistsError if there is
        one."""
        self._call(name, self._files.pipe_file, self._path(name), content, mode="create")

    def put(self, file: Path, name: str, record: FileRecord) -> None:
        """Upload a file, in parallel parts if it is large, and read it back; then write the digests of its blocks. An
        equal object is not sent again.

        Args:
            record: length and hash that the object must have. A file of other content raises StoreError.
        """
        for attempt in range(3):
            if attempt:
                seconds = _ANSWER_SECONDS + record.bytes / _SLOWEST
                self._send(name, lambda path: self._files.put_file(str(file), path), seconds=seconds)
            if self.size(name) != record.bytes:
                continue
            digests = BlockDigests()
            for block in self.blocks(name, record.bytes):
                digests.update(block)
            if digests.record() == record:
                if record.bytes >= LEAST_BYTES:
                    self.write(blocks_name(name), digests.encoded())
                return
        raise StoreError(errno.EIO, f"arrived with other bytes than {file}, twice", self.url_of(name))

    def blocks(self, name: str, length: int) -> Iterator[bytes]:
        """Yield the content of an object of this length, in blocks of 8 MiB."""
        for start in range(0, length, _BLOCK_BYTES):
            yield self.range(name, start, min(start + _BLOCK_BYTES, length))

    def range(self, name: str, start: int, stop: int) -> bytes:
        """Return some bytes of an object, in one request."""
        return self._call(name, self._block, name, start, stop)

    def _block(self, name: str, start: int, stop: int) -> bytes:
        block: bytes = self._files.cat_file(self._path(name), start=start, end=stop)
        if len(block) != stop - start:
            raise StoreError(errno.EIO, f"the answer has {len(block)} of {stop - start} bytes", self.url_of(name))
        return block

    def hash(self, name: str, length: int) -> FileRecord:
        """Return length and SHA-256 of an object of this length, from its content."""
        digest = hashlib.sha256()
        for block in self.blocks(name, length):
            digest.update(block)
        return FileRecord(bytes=length, sha256=digest.hexdigest())

    def fetch(self, name: str, file: Path, length: int, sha256: str | None) -> None:
        """Download an object; the file has its name once it is complete and has this hash, if there is one. Raises
        StoreError if the bytes differ in two attempts."""
        draft = file.with_name(f"{file.name}.{os.uname().nodename}.{os.getpid()}.part")
        try:
            for _ in range(2):
                digest = hashlib.sha256()
                with draft.open("wb") as output:
                    for block in self.blocks(name, length):
                        digest.update(block)
                        output.write(block)
                if sha256 in (None, digest.hexdigest()):
                    draft.replace(file)
                    return
        finally:
            draft.unlink(missing_ok=True)
        raise StoreError(errno.EIO, f"SHA-256 {digest.hexdigest()}, expected {sha256}", self.url_of(name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are no error."""
        map_in_threads(self._remove, names, OBJECTS_AT_ONCE)

    def _remove(self, name: str) -> None:
        try:
            self._call(name, self._files.rm_file, self._path(name))
        except FileNotFoundError:
            return

    def remove_folder(self, folder: str, first: str) -> None:
        """Remove the objects of a folder, one of them before the others."""
        self._remove(f"{folder}/{first}")
        self.remove(self.objects(f"{folder}/"))

    def move_folder(self, folder: str, target: str, first: str) -> None:
        """Move the objects of a folder by copies inside the store. One of them is removed before the others, and
        written after them."""
        names = sorted(self.objects(f"{folder}/"), key=lambda name: name == f"{folder}/{first}")
        for name in names:
            path = self._path(f"{target}/{name.removeprefix(f'{folder}/')}")
            self._call(name, self._files.cp_file, self._path(name), path)
        self.remove_folder(folder, first)

    def _send(self, name: str, send: Callable[[str], object], seconds: float = _ANSWER_SECONDS) -> None:
        """Write an object at its path at once: a reader sees the old object or the new one."""
        path = self._path(name)
        # Stores do so by themselves. Hosts that share a disk write the same files of a save at the same time.
        draft = f"{path}.{os.uname().nodename}.{os.getpid()}.part" if self._is_disk else path
        self._call(name, send, draft, seconds=seconds)
        if self._is_disk:
            self._call(name, os.replace, draft, path)

    def _call(
        self,
        name: str,
        request: Callable[..., _Result],
        *arguments: object,
        seconds: float = _ANSWER_SECONDS,
        **options: object,
    ) -> _Result:
        """Return the result of a request, after further attempts with growing pauses if it fails."""
        error: BaseException = StoreError()
        for pause in (*_PAUSES, None):
            answer = in_thread(partial(request, *arguments, **options))
            try:
                failure = answer.exception(seconds)
            except TimeoutError as timeout:
                failure = timeout
            if failure is None:
                return answer.result()
            error = failure
            if isinstance(error, _BUGS):
                raise error
            if isinstance(error, _FINAL) or pause is None:
                break
            time.sleep(pause * random.uniform(0.5, 1.5))
        kind = next((kind for kind in _FINAL if isinstance(error, kind)), StoreError)
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        raise kind(number, _described(error), self.url_of(name)) from None


def _version(info: dict[str, Any]) -> str:
    """Return a text that changes when an object is written again; the names of the fields depend on the provider."""
    fields = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created", "size")
    return " ".join(str(info[field]) for field in fields if field in info)


def _described(error: BaseException) -> str:
    """Return kind and first line of an error, without queries of URLs and values that could be secrets."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {_SECRET.sub('...', text)}"[:300] if text else type(error).__name__


def link(file: Path, url: str) -> None:
    """Make a file a link to the URL of an object, instead of its content. It replaces an earlier file at once."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.link")
    draft.unlink(missing_ok=True)
    draft.symlink_to(url)
    draft.replace(file)


def linked_object(file: Path) -> tuple[Store, str] | None:
    """Return store and name of the object that a file is a link to; None if it is another file."""
    if not file.is_symlink():
        return None
    url = os.readlink(file)
    folder, _, name = url.rpartition("/")
    return (Store(folder), name) if "://" in folder else None


def read_linked(file: Path) -> bytes:
    """Return the content of a file, or of the object that it is a link to. Raises OSError if it cannot be read."""
    target = linked_object(file)
    return read_regular(file) if target is None else target[0].read(target[1])


def mark_mirror(folder: Path, url: str) -> None:
    """Record that a local folder lists the objects of a URL."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text(url, encoding="utf-8")


def store_of(folder: Path) -> Store | None:
    """Return the store whose objects a local folder lists; None for another folder."""
    mark = folder / _MARK
    return Store(mark.read_text(encoding="utf-8")) if mark.is_file() else None


def fetch_links(folder: Path, names: Collection[str], records: dict[str, FileRecord]) -> None:
    """Replace links to objects in a folder by the content of the objects, verified. Raises StoreError for the first
    object that cannot be read or has other bytes."""

    def fetch(name: str) -> None:
        if (target := linked_object(folder / name)) is not None:
            store, key = target
            store.fetch(key, folder / name, records[name].bytes, records[name].sha256)

    map_in_threads(fetch, names, OBJECTS_AT_ONCE)
