"""Folders in an object store: weights, tokenizers and step folders, fetched to a cache of this machine and published.

A published folder has a file ``SHA256SUMS``, as ``sha256sum --check`` reads it, and the object without which no reader
takes it for a folder of its kind is written last: config.json, adapter_config.json or manifest.json.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from glm46.config.errors import UserError
from glm46.config.store_address import is_store_address, store_url
from glm46.files.block_digests import LEAST_BYTES
from glm46.files.durable import hash_file
from glm46.files.lock import FileLock
from glm46.files.store import OBJECTS_AT_ONCE, Store, StoredObject
from glm46.files.store_links import limit_ranges, limited_bytes, link_ranges
from glm46.files.threads import map_in_threads
from glm46.storage.checkpoint.integrity import MANIFEST, read_manifest, records_of

RangedKind: TypeAlias = Literal["weights", "text"]
SUMS = "SHA256SUMS"
CACHE = "glm46-store"
"""Folder of the cache, under ~/.cache."""
_LAST = ("config.json", "adapter_config.json", MANIFEST)


def cache_folder(url: str) -> Path:
    """Return the local folder of a URL; it has the same name, after a folder that is named by a hash of the URL."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path.home() / ".cache" / CACHE / digest / url.rpartition("/")[2]


def fetch_folder(address: str, option: str, by_range: RangedKind | None = None) -> Path:
    """Return the local folder with the files of a folder in a store, in the cache. Objects that are not there, or that
    were written again, are downloaded and compared with the hashes that the folder has.

    Args:
        address: a URL, see `is_store_address`.
        option: option or key, for messages.
        by_range: contents of large safetensors files that are read by range: they become links, see `link_ranges`.
            Ranges of text share a bounded cache. None: all objects are downloaded.

    Raises:
        UserError: the store cannot be read, has no such folder, or has other bytes than its hashes.
    """
    try:
        url = store_url(address)
        folder = cache_folder(url)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name("lock"))
        lock.acquire(None)
        try:
            _fetch(Store(url), folder, by_range)
        finally:
            lock.release()
    except ValueError as error:
        raise UserError(f"{option} is a URL that {error}") from error
    except OSError as error:
        remedy = "correct the URL, let this user read it, or complete its upload"
        raise UserError(f"{option} {error.filename or url}: cannot be read: {error.strerror}; {remedy}") from error
    return folder


def _fetch(store: Store, folder: Path, by_range: RangedKind | None) -> None:
    objects = {name: stored for name, stored in store.objects().items() if "/" not in name}
    if not objects:
        raise FileNotFoundError(None, "the store has no objects there", store.url)
    versions = folder.with_name("versions")
    old_lines = set(versions.read_text().splitlines()) if versions.is_file() else set()
    lines = {name: f"{name} {stored}" for name, stored in objects.items()}
    ranged = {name for name, stored in objects.items() if by_range and _is_ranged(name, stored)}
    missing = {name for name, line in lines.items() if line not in old_lines or not (folder / name).is_file()} | ranged
    versions.unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in objects or path.name in missing - ranged:  # a link is replaced at once
            path.unlink()
    for name in (SUMS, MANIFEST):
        if name in missing:
            store.fetch(name, folder / name, objects[name].bytes, None)
    sums = _hashes(folder)
    if absent := sorted(sums.keys() - objects.keys()):
        raise FileNotFoundError(None, f"lacks {absent[0]}, which its list of hashes has", store.url)

    def fetch(name: str) -> None:
        stored = objects[name]
        is_linked = name in ranged and link_ranges(
            folder / name, store.url_of(name), stored.bytes, stored.version, sums.get(name)
        )
        if not is_linked:
            store.fetch(name, folder / name, stored.bytes, sums.get(name))

    map_in_threads(fetch, sorted(missing - {SUMS, MANIFEST}), OBJECTS_AT_ONCE)
    linked_bytes = sum(objects[name].bytes for name in ranged if (folder / name).is_symlink())
    cache = ""
    if by_range == "text":
        limit = cache_bytes(folder)
        limit_ranges(folder, limit)
        cache = f", through a cache of {limit / 1e6:,.1f} MB"
    if linked_bytes:
        whole_bytes = sum(stored.bytes for stored in objects.values()) - linked_bytes
        print(
            f"{store.url}: {whole_bytes / 1e6:,.1f} MB fetched, {linked_bytes / 1e6:,.1f} MB read by range{cache}",
            flush=True,
        )
    versions.write_text("".join(f"{line}\n" for line in lines.values()))


def _is_ranged(name: str, stored: StoredObject) -> bool:
    return name.endswith(".safetensors") and stored.bytes >= LEAST_BYTES


def cache_bytes(folder: Path) -> int:
    """Return how many bytes of text are kept on the disk of a folder: half of what is free there, or cached."""
    return (shutil.disk_usage(folder).free + limited_bytes(folder.parents[1])) // 2


def _hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 by name that a folder lists; a folder of another program lists none."""
    if (folder / SUMS).is_file():
        lines = (folder / SUMS).read_text().splitlines()
        return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    body, _ = read_manifest(folder, None)
    return {} if body is None else {name: record.sha256 for name, record in records_of(body).items()}


def publish_folder(folder: Path, address: str) -> None:
    """Upload a folder and its subfolders to a store; each object is read back. Objects of an earlier folder there are
    removed before, the one that completes it first.

    Raises:
        OSError: the store refuses.
    """
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    store = Store(store_url(address))
    for name in sorted(store.objects(), key=_is_last, reverse=True):
        store.remove([name])
    records = {name: hash_file(path) for name, path in files.items()}

    def upload(name: str) -> None:
        store.put(files[name], name, records[name])

    map_in_threads(upload, [name for name in files if not _is_last(name)], OBJECTS_AT_ONCE)
    store.write(SUMS, "".join(f"{record.sha256}  {name}\n" for name, record in sorted(records.items())).encode())
    map_in_threads(upload, filter(_is_last, files), OBJECTS_AT_ONCE)


def _is_last(name: str) -> bool:
    return name.rpartition("/")[2] in _LAST


@contextmanager
def local_output(output: Path) -> Iterator[Path]:
    """Yield the folder that a conversion writes: the output, or for a URL a temporary folder, which is uploaded when
    the block succeeds.

    Raises:
        UserError: the URL has objects already, or the store cannot be used.
    """
    if not is_store_address(str(output)):
        yield output
        return
    try:
        url = store_url(str(output))
        if Store(url).objects():
            raise UserError(f"--output {url}: has objects already; choose a new prefix")
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / output.name
            yield local
            publish_folder(local, url)
    except ValueError as error:
        raise UserError(f"--output is a URL that {error}") from error
    except OSError as error:
        raise UserError(f"--output {output}: cannot be used: {error.strerror}; allow it, or give a folder") from error
    print(f"{url}: uploaded, each object was read back")
