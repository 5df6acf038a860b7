"""Shards damaged after the start: every damaged byte that is read raises an error with file and bytes."""

import os
import re

import numpy as np
import pytest

from glm46.config.errors import UnreadableError, UserError
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK
from glm46.storage.data import shards
from glm46.storage.data.loader import BatchLayout, TrainSource, build_train_loader
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.verified import VerifiedShard
from glm46.storage.prepare.sharding import write_shard

VOCABULARY, TOKENS = 5000, 30_000


@pytest.fixture(scope="module")
def content():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 4000)
    ends = lengths.cumsum()
    ends = np.append(ends[ends < TOKENS], TOKENS).astype(np.int64)
    assert len(ends) > 3 * 512  # some blocks of ends
    return rng.integers(0, VOCABULARY, TOKENS).astype(np.uint32), ends


@pytest.fixture
def file(tmp_path, content):
    write_shard(tmp_path / "x.safetensors", *content, {"tokenizer": "t"})
    return tmp_path / "x.safetensors"


def flip(file, place, bits=1):
    with open(file, "r+b") as handle:
        handle.seek(place)
        byte = handle.read(1)[0]
        handle.seek(place)
        handle.write(bytes([byte ^ bits]))


def test_reads_are_slices(file, content):
    tokens, ends = content
    shard = VerifiedShard(file, VOCABULARY)
    rng = np.random.default_rng(1)
    for low, high in [(0, TOKENS), (1023, 1024), (1024, 2048), (TOKENS - 1, TOKENS)] + [
        sorted(rng.choice(TOKENS, 2, replace=False).tolist()) for _ in range(300)
    ]:
        assert np.array_equal(shard.tokens(low, high), tokens[low:high])
        assert np.array_equal(shard.ends_in(low, high), ends[(ends > low) & (ends <= high)])
    assert np.array_equal(shard.all_ends(), ends)


def test_every_flipped_byte_that_is_read_is_caught_and_named(file):
    shard = VerifiedShard(file, VOCABULARY)
    rows = [(low, min(low + 700, TOKENS)) for low in range(0, TOKENS, 700)]
    for low, high in rows:  # a first pass: bytes that were once good are verified again
        shard.tokens(low, high), shard.ends_in(low, high)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    rng = np.random.default_rng(2)
    # Anywhere: ends, tokens, or the checksums themselves.
    for place in [header, file.stat().st_size - 1, *rng.integers(header, file.stat().st_size, 250).tolist()]:
        bits = int(rng.integers(1, 256))
        flip(file, place, bits)
        faults = []
        for low, high in rows:
            for read in (shard.tokens, shard.ends_in):
                try:
                    read(low, high)
                except UserError as error:
                    faults.append(str(error))
        assert faults, f"a flip at byte {place} was not caught"
        for fault in faults:
            first, last, checksum = map(int, re.search(r"bytes (\d+) to (\d+): .* at byte (\d+);", fault).groups())
            assert first <= place <= last or checksum <= place < checksum + 4, fault
            assert fault.startswith(f"{file}: ") and last - first < shards.BLOCK_BYTES
        flip(file, place, bits)
    for low, high in rows:
        shard.tokens(low, high), shard.ends_in(low, high)


def test_a_lost_file_is_an_error_after_which_a_restart_may_help(file, content):
    """As after its network disk has failed: the open file stays broken, and the next read opens it again."""
    shard, away = VerifiedShard(file, VOCABULARY), file.with_name("away")
    shard.tokens(0, 9)
    broken = os.open(file.parent, os.O_RDONLY)  # a folder: every read of it fails
    os.dup2(broken, shard._handle.fileno())
    os.close(broken)
    file.rename(away)
    for _ in range(2):
        with pytest.raises(UnreadableError, match="x.safetensors: bytes .* cannot be read: .*; mount") as failed:
            shard.tokens(0, 9)
        assert failed.value.exit_code == EXIT_FAILED_RANK
    away.rename(file)
    assert np.array_equal(shard.tokens(0, 9), content[0][:9])


def test_a_truncated_file_is_an_error_and_not_a_crash(file):
    shard, size = VerifiedShard(file, VOCABULARY), file.stat().st_size
    shard.tokens(0, TOKENS), shard.ends_in(0, TOKENS)
    os.truncate(file, size // 2)
    with pytest.raises(UserError, match=f"x.safetensors: bytes {size // 2} to .* missing, .*truncated"):
        shard.tokens(0, TOKENS)
    os.truncate(file, 0)
    for read in (shard.tokens, shard.ends_in):
        with pytest.raises(UserError, match="truncated"):
            read(5, 6)


def test_invalid_content_is_refused(tmp_path, content):
    tokens, ends = (array.copy() for array in content)
    tokens[2500], same = VOCABULARY, ends.copy()
    same[700] = same[699]  # an empty document
    write_shard(tmp_path / "a", tokens, ends, {})
    shard = VerifiedShard(tmp_path / "a", VOCABULARY)
    shard.tokens(0, 2500), shard.tokens(2501, TOKENS)
    place = shard._tokens.values_at + 4 * 2500
    with pytest.raises(UserError, match=f"a: bytes {place} to {place + 3}: token id {VOCABULARY} is not below"):
        shard.tokens(2400, 2600)
    write_shard(tmp_path / "b", tokens, same, {})
    with pytest.raises(UserError, match="b: bytes .* document 700 ends at token"):
        VerifiedShard(tmp_path / "b", VOCABULARY).ends_in(0, 1)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_returns_nothing_damaged(make_source, counting_documents, tmp_path, packing, workers):
    folder = make_source(tmp_path / "s", counting_documents([50] * 40), documents_per_shard=10)
    source = TrainSource("s", load_manifest(folder), 1.0, packing)
    batches = iter(
        build_train_loader([source], BatchLayout(64, 1, 1, 0, 1, True), seed=0, start_sample=0, num_workers=workers)
    )
    first = next(batches)
    place = VerifiedShard(folder / "train-00002.safetensors", 8192)._tokens.values_at + 40
    flip(folder / "train-00002.safetensors", place)
    taken = [first]
    with pytest.raises(UserError, match=r"train-00002.safetensors: bytes \d+ to \d+: .*checksum"):
        for _ in range(100):
            taken.append(next(batches))
    ids = np.concatenate([batch["input_ids"].numpy().ravel() for batch in taken])
    assert set(np.unique(ids)) <= {*range(2040), 8156}
