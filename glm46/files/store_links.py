"""Links to objects whose ranges are read: where the fetched blocks lie, and what is known of the object.

`store_ranges.py` reads the blocks. This file does not import numpy: commands that only list and link files use it.
"""

import os
import shutil
from pathlib import Path

from glm46.files.block_digests import BLOCK_BYTES, blocks_name, decoded
from glm46.files.store import Store, link

_RANGES = ".ranges"
LIMIT = "limit"
"""File next to the folders of ranges of a bounded cache: its bytes, and the blocks that one miss fetches."""
BLOCKS_OF_REQUEST = (1 << 23) // BLOCK_BYTES
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_stores: dict[tuple[int, str], Store] = {}
"""Connections by process and URL: a connection does not survive a fork."""


def link_ranges(file: Path, url: str, length: int, key: str, sha256: str | None) -> bool:
    """Make a file a link to an object whose ranges are read; blocks that were fetched before stay. One process of a
    machine at a time calls it.

    Args:
        key: text that changes when the object is written again.
        sha256: of the whole object; None if nothing is known, then ranges are not verified.

    Returns:
        False if the object has no digests of its blocks although its hash is known: it must be fetched whole.
    """
    data = data_of(file)
    # Blocks of an earlier boot may have been lost with it, although they are marked.
    state = f"{_BOOT.read_text().strip()} {length} {key} {sha256}\n"
    state_file = data.with_name(f"{data.name}.state")
    if not (state_file.is_file() and state_file.read_text() == state):
        digests = _read_digests(url, length, sha256)
        if digests is None and sha256 is not None:
            return False
        data.parent.mkdir(parents=True, exist_ok=True)
        for path, size in ((data, length), (have_of(data), -(-length // BLOCK_BYTES))):
            path.unlink(missing_ok=True)
            with path.open("wb") as output:
                output.truncate(size)
        digests_of(data).write_bytes(digests or b"")
        state_file.write_text(state)
    link(file, url)
    return True


def stated_sha256(path: Path) -> str | None:
    """Return the SHA-256 of the object of a link, if it was known when the link was made."""
    data = data_of(path)
    sha256 = data.with_name(f"{data.name}.state").read_text().split()[-1]
    return None if sha256 == "None" else sha256


def limit_ranges(folder: Path, cache_bytes: int) -> None:
    """Bound the bytes that the ranges of a folder take on the disk, together with those of the folders of other URLs
    that are bounded. If the folder fits, a miss fetches 8 MiB, else single blocks."""
    ranges = _ranges_of(folder)
    ranges.mkdir(parents=True, exist_ok=True)
    total = sum(data.stat().st_size for data in ranges.iterdir() if data.suffix == ".safetensors")
    blocks = BLOCKS_OF_REQUEST if total <= cache_bytes else 1
    (ranges.parent / LIMIT).write_text(f"{cache_bytes} {blocks}")


def limited_bytes(cache: Path) -> int:
    """Return the bytes that bounded ranges take in a cache, the folder of the folders of URLs."""
    return sum(limited_sizes(cache).values())


def remove_ranges(folder: Path) -> None:
    """Remove all fetched ranges of the files of a folder."""
    shutil.rmtree(_ranges_of(folder), ignore_errors=True)


def limited_sizes(cache: Path) -> dict[Path, int]:
    """Return the bytes on the disk of each bounded file of ranges in a cache."""
    folders = [file.parent for file in cache.glob(f"*/{_RANGES}/{LIMIT}")]
    files = [have.with_suffix("") for folder in folders for have in folder.glob("*/*.have")]
    return {file: 512 * file.stat().st_blocks for file in files}


def _read_digests(url: str, length: int, sha256: str | None) -> bytes | None:
    folder, _, name = url.rpartition("/")
    try:
        content = store_of(folder).read(blocks_name(name))
    except FileNotFoundError:
        return None
    return decoded(content, length, sha256)


def store_of(url: str) -> Store:
    """Return the connection of this process to the store of a URL."""
    key = (os.getpid(), url)
    if key not in _stores:
        _stores[key] = Store(url)
    return _stores[key]


def _ranges_of(folder: Path) -> Path:
    return folder.parent / _RANGES / folder.name


def data_of(path: Path) -> Path:
    """Return the sparse file with the fetched blocks of a link."""
    return _ranges_of(path.parent) / path.name


def have_of(data: Path) -> Path:
    """Return the file with the marks of the blocks, of a sparse file."""
    return data.with_name(f"{data.name}.have")


def digests_of(data: Path) -> Path:
    """Return the file with the digests of the blocks, of a sparse file."""
    return data.with_name(f"{data.name}.digests")
