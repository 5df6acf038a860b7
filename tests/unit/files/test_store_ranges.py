"""Ranges of objects on the local disk: fetched once, verified, bounded, and right while other threads empty them."""

import os
import random
from itertools import count
from pathlib import Path

import pytest

from glm46.files import store as store_module
from glm46.files import store_ranges
from glm46.files.block_digests import BLOCK_BYTES, LEAST_BYTES, blocks_name
from glm46.files.durable import hash_file
from glm46.files.store import Store, StoreError
from glm46.files.store_links import limit_ranges, limited_bytes, link_ranges, remove_ranges
from glm46.files.store_ranges import range_file
from glm46.files.threads import map_in_threads

memory = pytest.importorskip("fsspec.implementations.memory", reason="not installed; pip install '.[cloud]'")
CONTENT = os.urandom(LEAST_BYTES + 3 * BLOCK_BYTES + 5)
NUMBERS = count()


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A store with an object; pauses between attempts take no time."""
    monkeypatch.setattr(store_module, "_PAUSES", (0.0, 0.0))
    (tmp_path / "source").write_bytes(CONTENT)
    store = Store(f"memory://ranges/{next(NUMBERS)}")
    store.put(tmp_path / "source", "a.safetensors", hash_file(tmp_path / "source"))
    return store


def linked(store: Store, folder: Path, *, name: str = "a.safetensors", key: str = "", sha256: str | None = "") -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    known = hash_file(folder.parents[1] / "source").sha256 if sha256 == "" else sha256
    return link_ranges(folder / name, store.url_of(name), len(CONTENT), key, known)


def requests(monkeypatch) -> list[tuple[int, int]]:
    """Returns a list that gets the ranges of all requests."""
    ranges = []
    original = Store.range

    def counted(self, name, start, stop):
        ranges.append((start, stop))
        return original(self, name, start, stop)

    monkeypatch.setattr(Store, "range", counted)
    return ranges


def test_only_missing_blocks_are_fetched_and_no_other_program_reads_holes(store, tmp_path, monkeypatch):
    file = tmp_path / "cache" / "folder" / "a.safetensors"
    assert linked(store, file.parent)
    asked = requests(monkeypatch)
    ranges = range_file(file)
    assert ranges.read(BLOCK_BYTES + 1, 10) == CONTENT[BLOCK_BYTES + 1 : BLOCK_BYTES + 11]
    assert ranges.read(len(CONTENT) - 3, 100) == CONTENT[-3:]
    assert asked == [(BLOCK_BYTES, 2 * BLOCK_BYTES), (len(CONTENT) - 5, len(CONTENT))]
    asked.clear()
    assert linked(store, file.parent), "what was fetched stays"
    range_file(file).fetch([(0, 3 * BLOCK_BYTES), (BLOCK_BYTES, 5 * BLOCK_BYTES)])
    assert sorted(asked) == [(0, BLOCK_BYTES), (2 * BLOCK_BYTES, 5 * BLOCK_BYTES)]
    with pytest.raises(FileNotFoundError):
        file.read_bytes()
    assert linked(store, file.parent, key="written again")
    asked.clear()
    range_file(file).read(0, 1)
    assert asked == [(0, BLOCK_BYTES)]
    remove_ranges(file.parent)
    assert range_file(file) is None


@pytest.mark.parametrize("damage", ["once", "always"])
def test_a_block_of_other_bytes_is_fetched_again_and_never_used(damage, store, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "folder"
    assert linked(store, folder)
    cat_file = memory.MemoryFileSystem.cat_file
    calls = []

    def flipped(self, *arguments, **options):
        content = cat_file(self, *arguments, **options)
        calls.append(1)
        is_damaged = len(calls) == 1 or damage == "always"
        return content[:7] + bytes([content[7] ^ 1]) + content[8:] if is_damaged else content

    monkeypatch.setattr(memory.MemoryFileSystem, "cat_file", flipped)
    ranges = range_file(folder / "a.safetensors")
    if damage == "once":
        assert ranges.read(0, 100) == CONTENT[:100]
        return
    with pytest.raises(StoreError, match="differ from their digests") as raised:
        ranges.read(0, 100)
    assert raised.value.filename == store.url_of("a.safetensors")
    monkeypatch.undo()
    assert ranges.read(0, 100) == CONTENT[:100]


@pytest.mark.parametrize("digests", ["missing", "damaged", "of other content"])
def test_an_object_without_its_digests_must_be_fetched_whole_if_its_hash_is_known(digests, store, tmp_path):
    folder = tmp_path / "cache" / "folder"
    name = blocks_name("a.safetensors")
    content = store.read(name)
    if digests == "missing":
        store.remove([name])
    elif digests == "damaged":
        store.write(name, content[:50] + bytes([content[50] ^ 1]) + content[51:])
    assert not linked(store, folder, sha256="0" * 64 if digests == "of other content" else "")
    assert not (folder / "a.safetensors").is_symlink()
    if digests == "missing":
        assert linked(store, folder, sha256=None), "another program wrote it: nothing is known"
        assert range_file(folder / "a.safetensors").read(5, 5) == CONTENT[5:10]


def test_a_bounded_cache_stays_below_its_limit_and_readers_see_no_holes(store, tmp_path, monkeypatch):
    monkeypatch.setattr(store_ranges, "_UNCHECKED_BYTES", 1 << 16)
    cache = tmp_path / "cache"
    names = [f"{letter}.safetensors" for letter in "bcd"]
    for name in names:
        store.put(tmp_path / "source", name, hash_file(tmp_path / "source"))
        assert linked(store, cache / "hash" / "folder", name=name, sha256=None)
    limit = 1 << 20
    limit_ranges(cache / "hash" / "folder", limit)
    files = [range_file(cache / "hash" / "folder" / name) for name in names]
    sizes = []

    def read(seed: int) -> bool:
        chance = random.Random(seed)
        equal = True
        for _ in range(150):
            start = chance.randrange(len(CONTENT))
            size = chance.randrange(1, 3 * BLOCK_BYTES)
            equal &= chance.choice(files).read(start, size) == CONTENT[start : start + size]
            sizes.append(limited_bytes(cache))
        return equal

    assert all(map_in_threads(read, range(4), 4))
    assert max(sizes) <= limit + 4 * (1 << 16) and max(sizes) > limit // 2


def test_a_cache_with_room_for_all_fetches_more_than_it_needs(store, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "folder"
    assert linked(store, folder)
    limit_ranges(folder, 10 * len(CONTENT))
    asked = requests(monkeypatch)
    ranges = range_file(folder / "a.safetensors")
    assert ranges.read(5, 1) == CONTENT[5:6] and ranges.read(len(CONTENT) // 2, 9) == CONTENT[len(CONTENT) // 2 :][:9]
    assert asked == [(0, len(CONTENT))]
