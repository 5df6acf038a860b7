"""Shards and manifests: size on disk, and an error for every kind of damage."""

import json
import os

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from glm46.config.errors import UserError
from glm46.storage.data import packing
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import open_shard
from glm46.storage.prepare.sharding import write_shard

EOS = 8156


@pytest.fixture
def source(make_source, counting_documents, tmp_path):
    return make_source(tmp_path / "s", counting_documents([10, 20, 30, 5]), counting_documents([9]), 2)


def test_a_shard_costs_little_more_than_its_tokens(tmp_path):
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.exponential(1_000, 3_000)).astype(np.int64)
    tokens = rng.integers(0, 8_192, lengths.sum()).astype(np.uint32)
    file = tmp_path / "x.safetensors"
    write_shard(file, tokens, np.cumsum(lengths), {"source": "web", "tokenizer": "0" * 64})
    # 4 bytes per token, 8 per document of 1,000 tokens, and a header.
    assert file.stat().st_size / len(tokens) <= 4.02


def test_any_safetensors_reader_opens_a_shard(tmp_path):
    tokens, ends = np.arange(11, dtype=np.uint32), np.array([4, 11], np.int64)
    write_shard(tmp_path / "x.safetensors", tokens, ends, {"source": "web"})
    loaded, ours = load_file(tmp_path / "x.safetensors"), open_shard(tmp_path / "x.safetensors")
    assert np.array_equal(loaded["tokens"], tokens) and np.array_equal(loaded["doc_ends"], ends)
    assert np.array_equal(ours.tokens, tokens) and np.array_equal(ours.doc_ends, ends)
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"source": "web", "format": "glm46-shard-2", "tokens": "11", "documents": "2"}


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("glm46.files.durable.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_shard(tmp_path / "x.safetensors", np.arange(3, dtype=np.uint32), np.array([3]), {})
    assert list(tmp_path.iterdir()) == []


def test_a_sound_source_loads(source):
    manifest = load_manifest(source, full=True)
    train, held_out = manifest.splits["train"], manifest.splits["validation"]
    assert (train.documents, train.tokens, len(train.shards)) == (4, 69, 2)
    assert (held_out.documents, held_out.tokens, len(held_out.shards)) == (1, 10, 1)


def _flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def _edit(change):
    def apply(file):
        manifest = file.parent / "manifest.json"
        content = json.loads(manifest.read_text())
        change(content)
        manifest.write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize("damage, reason", [
    (lambda f: f.unlink(), "train-00001.safetensors: missing"),
    (lambda f: f.write_bytes(b""), "train-00001.safetensors: .*truncated: 0 bytes"),
    (lambda f: f.write_bytes(f.read_bytes()[:-4]), "truncated"),
    (lambda f: f.write_bytes(f.read_bytes()[:100]), "truncated"),
    (lambda f: f.write_bytes(f.read_bytes() + b"more"), "damaged"),
    (lambda f: f.write_bytes(b"\xff" * 500), "not a safetensors file"),
    (lambda f: f.write_bytes((20).to_bytes(8, "little") + b"x" * 500), "header is corrupt"),
    (lambda f: f.write_bytes((2).to_bytes(8, "little") + b"{}"), "not a glm46-shard-2 file"),
    (_flip, "SHA-256"),
    (lambda f: f.write_bytes((f.parent / "train-00000.safetensors").read_bytes()), "the manifest says"),
    (lambda f: (f.parent / "manifest.json").unlink(), "no manifest.json in it"),
    (lambda f: (f.parent / "manifest.json").write_text("{"), "not a manifest"),
    (_edit(lambda c: c.pop("splits")), "not a manifest"),
    (_edit(lambda c: c.update(format="glm46-data-9")), "glm46-data-9"),
    (_edit(lambda c: c["splits"]["train"].update(tokens=1)), "totals"),
    (_edit(lambda c: c.update(tokenizer="other")), "another tokenizer"),
])  # fmt: skip
def test_damage_is_reported(source, damage, reason):
    damage(source / "train-00001.safetensors")
    with pytest.raises(UserError, match=reason):
        load_manifest(source)


def test_a_path_that_is_no_folder_is_named_for_what_it_is(source):
    for place, reason in (
        (source / "none", "none: no such folder"),
        (source / "manifest.json", "a file, not a folder"),
    ):
        with pytest.raises(UserError, match=reason):
            load_manifest(place)


def test_all_faults_are_reported_at_once(source):
    (source / "train-00000.safetensors").unlink()
    _flip(source / "validation-00000.safetensors")
    with pytest.raises(UserError) as caught:
        load_manifest(source)
    assert len(caught.value.faults) == 2


def test_document_ends_that_do_not_fit_are_refused(tmp_path):
    write_shard(tmp_path / "x.safetensors", np.arange(11, dtype=np.uint32), np.array([4, 10], np.int64), {})
    with pytest.raises(UserError, match="do not cover"):
        open_shard(tmp_path / "x.safetensors")


def test_another_tokenizer_than_the_models_is_refused(source):
    with pytest.raises(UserError, match="model.tokenizer_path"):
        load_manifest(source).require_tokenizer("f" * 64)


def test_a_source_of_many_shards_keeps_few_of_them_open(make_source, counting_documents, tmp_path):
    documents = counting_documents([5] * 150)
    folder = make_source(tmp_path / "s", documents, documents_per_shard=1)
    stream = TokenStream(folder, load_manifest(folder).splits["train"], 8192)
    before = len(os.listdir("/proc/self/fd"))
    out = np.empty(12, np.int64)
    for start in (0, 888, *range(0, 880, 7), 3):
        assert stream.read(start, out)[0] == 12
        assert out[out != EOS].tolist() == [t for t in range(start, start + 12) if t % 6 != 5]
    assert len(stream.doc_ends()) == 150
    assert len(os.listdir("/proc/self/fd")) - before <= packing._MAX_OPEN_SHARDS
