"""Checkpoints in an object store, and the local folder that lists them.

In the store, ``step-000123/`` holds the objects of a step folder, ``manifest.json`` written last: without it the step
does not exist. So plain readers of DCP's format read the prefix as a folder. On each node a *mirror* lists the steps:
real step folders whose manifests and meta are files, and whose other files are links to the URLs of the objects until
they are read. What lists, compares and selects checkpoints reads the mirror like any checkpoint folder.
"""

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from glm46.config.errors import UserError
from glm46.config.store_address import is_store_address, store_url
from glm46.files.store import Store, StoredObject, fetch_links, link, mark_mirror, store_of
from glm46.files.store_links import remove_ranges
from glm46.storage.checkpoint.integrity import (
    MANIFEST,
    META,
    published_steps,
    read_manifest,
    records_of,
    step_folder,
    step_of,
)
from glm46.storage.checkpoint.publish import LATEST

_FILES = (MANIFEST, META)
"""Objects that a mirror holds as files."""


def refresh_mirror(url: str, folder: Path) -> None:
    """Make a local folder list the complete checkpoints of a store. One process of a node at a time calls it.

    A listing that lags loses no checkpoint: the name of the newest one is read from an object, and so is the manifest
    of each step.

    Raises:
        OSError: the store does not answer, or the disk is full.
        UserError: the packages of the store are not installed.
    """
    store = Store(url)
    mark_mirror(folder, url)
    objects = store.objects()
    names = {
        PurePosixPath(name).parent.name for name in objects if name.count("/") == 1 and name.endswith(f"/{MANIFEST}")
    }
    names |= {_latest(store)}
    steps = sorted(name for name in names if step_of(folder / name) is not None)
    manifests = {name: content for name in steps if (content := _read(store, f"{name}/{MANIFEST}")) is not None}
    for step in published_steps(folder):
        path = step_folder(folder, step)
        if path.name not in manifests or (path / MANIFEST).read_bytes() != manifests[path.name]:
            shutil.rmtree(path)
            remove_ranges(path)
    for name, content in manifests.items():
        if not (folder / name).is_dir():
            _mirror_step(store, folder / name, content, objects)


@contextmanager
def local_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to read: the path, or for the URL of a prefix of checkpoints, or of one step, a temporary mirror.

    Raises:
        UserError: the store cannot be read; or the block has raised one, whose faults then name the URL.
    """
    if not is_store_address(str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        mirror = Path(folder, "mirror")
        try:
            url = store_url(str(path))
            is_step = step_of(path) is not None
            root = url.rpartition("/")[0] if is_step else url
            refresh_mirror(root, mirror)
            yield mirror / path.name if is_step else mirror
        except ValueError as error:
            raise UserError(f"the folder is a URL that {error}") from error
        except OSError as error:
            raise UserError(f"{url}: cannot be read: {error.strerror}; set the variables of the provider") from error
        except UserError as error:
            raise UserError(*(fault.replace(str(mirror), root) for fault in error.faults)) from error


def shown(path: Path) -> str:
    """Return the URL of a path in a mirror, for messages; the path itself elsewhere."""
    store = store_of(path.parent)
    return str(path) if store is None else store.url_of(path.name)


def _latest(store: Store) -> str:
    content = _read(store, LATEST) or b""
    return content.decode("utf-8", "replace").strip()


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def _mirror_step(store: Store, path: Path, manifest: bytes, objects: Mapping[str, StoredObject]) -> None:
    """Make the step folder of a manifest: links for the objects of the expected length; empty files of the actual
    length for others, so that the quick checks name them."""
    draft = path.with_suffix(".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    (draft / MANIFEST).write_bytes(manifest)
    body, _ = read_manifest(draft, None)
    records = {} if body is None else records_of(body)
    for name, record in records.items():
        key = f"{path.name}/{name}"
        length = objects[key].bytes if key in objects else store.size(key)
        if length == record.bytes:
            link(draft / name, store.url_of(key))
        elif length is not None:
            with (draft / name).open("wb") as file:
                file.truncate(length)
    with suppress(OSError):  # it stays a link, and the check of hashes names it
        fetch_links(draft, [META] if META in records else [], records)
    draft.rename(path)


def fetch_step(path: Path, names: Collection[str] | None = None) -> None:
    """Replace the links of a step folder in a mirror by the content of the objects, verified. Raises OSError for the
    first object that cannot be read or has other bytes; it stays a link. ``names``: files to fetch; None: all."""
    body, _ = read_manifest(path, None)
    records = {} if body is None else records_of(body)
    fetch_links(path, records if names is None else names, records)


def release_step(path: Path) -> None:
    """Replace the fetched files of a step folder in a mirror by links and remove fetched ranges, which frees the
    disk."""
    remove_ranges(path)
    body, _ = read_manifest(path, None)
    store = store_of(path.parent)
    if store is None or body is None:
        return
    for name in records_of(body):
        if name not in _FILES and (path / name).is_file():
            link(path / name, store.url_of(f"{path.name}/{name}"))
