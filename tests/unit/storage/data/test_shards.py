"""Shards and sources: what is stored, what a run reads of it, and each damaged byte that is read."""

import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from glm46.cli import main
from glm46.config.errors import UnreadableError, UserError
from glm46.config.loader import dump_config
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK
from glm46.run.plan import resolve_plan
from glm46.storage.data import corpus, packing, shards
from glm46.storage.data.corpus import check_epochs, describe_sources, load_text, plan_sources
from glm46.storage.data.loader import BatchLayout, TrainSource, build_train_loader
from glm46.storage.data.manifest import Split, load_manifest
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import open_shard
from glm46.storage.data.verified import VerifiedShard
from glm46.storage.prepare.sharding import write_shard
from tests.builders import with_shape

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


def test_budget_in_steps_follows_the_ramp(make_config):
    config = make_config(training={"steps": 3, "seq_len": 16, "global_batch_size": [[0, 2], [64, 4]]})
    # Clocks 0, 32 and 80 ask for 2, 3 and 4 sequences, rounded down to whole micro-batches of 2 rows.
    assert resolve_plan(config).budget_tokens == (2 + 2 + 4) * 16
    assert resolve_plan(make_config(training={"steps": None, "tokens": 77})).budget_tokens == 77


def test_source_may_not_be_read_more_often_than_it_allows(make_config, source_folder):
    source = {"name": "test", "path": str(source_folder)}
    manifests = load_text(resolve_plan(make_config(data={"sources": [source]})))[1]
    tokens = manifests["test"].splits["train"].tokens
    rows = (tokens - 1 - 1) // 16  # one target beyond the row, and one more for the MTP layer
    training = {"steps": None, "tokens": 2 * rows * 16}

    def plan_with(limit: float):
        return resolve_plan(make_config(data={"sources": [source | {"max_epochs": limit}]}, training=training))

    for limit in (2.0, 2.5):
        check_epochs(plan_with(limit), manifests)
    with pytest.raises(UserError, match=r"max_epochs = 1\.9: test would be read 2 times in"):
        check_epochs(plan_with(1.9), manifests)


def test_planned_tokens_and_epochs_are_shown_per_source(make_config, source_folder):
    source = {"name": "test", "path": str(source_folder)}
    config = make_config(data={"sources": [source, source | {"name": "more", "weight": 3.0}]}, training={"steps": 10})
    plan = resolve_plan(config)
    manifests = load_text(plan)[1]
    plans = plan_sources(plan, manifests)
    assert [plan.tokens for plan in plans] == [
        10 * 2 * config.training.seq_len / 4,
        10 * 2 * config.training.seq_len * 3 / 4,
    ]
    assert plans[1].epochs == pytest.approx(3 * plans[0].epochs, rel=1e-12)
    line = describe_sources(plan, manifests)[1]
    assert "source       more: " in line and f"{plans[1].tokens:,.0f} planned, {plans[1].epochs:.3g} epochs" in line


@pytest.mark.slow
def test_launch_shows_the_plan_and_refuses_too_many_epochs(make_config, source_folder, tmp_path, capfd):
    source = {"name": "test", "path": str(source_folder), "max_epochs": 0.01}
    file = tmp_path / "run.toml"
    file.write_text(dump_config(make_config(data={"sources": [source]})))
    assert main(["launch", "--config", str(file), "--nproc", "1"]) == 2
    shown = capfd.readouterr()
    assert "tokens in 60 documents; 128 planned, " in shown.out
    assert (
        "max_epochs = 0.01: test would be read" in shown.err and "train on fewer tokens, lower its weight" in shown.err
    )


def test_another_tokenizer_and_no_held_out_documents_are_refused(make_config, source_folder, monkeypatch):
    source = {"name": "test", "path": str(source_folder)}
    config, manifest = (
        make_config(data={"sources": [source]}, validation={"enable": True}),
        load_manifest(source_folder),
    )
    nothing_held = replace(manifest, splits=manifest.splits | {"validation": Split.from_shards(())})
    no_targets = replace(manifest.splits["validation"], documents=3, tokens=3)
    no_targets = replace(manifest, splits=manifest.splits | {"validation": no_targets})
    for found, reason in (
        (replace(manifest, tokenizer="other"), "its tokens were made with another tokenizer"),
        (nothing_held, "validation.enable = true.*held_out"),
        (no_targets, "validation.enable = true.*held_out"),
    ):
        monkeypatch.setattr(corpus, "load_manifest", lambda _, found=found: found)
        with pytest.raises(UserError, match=reason):
            load_text(resolve_plan(config))


def test_a_small_vocabulary_and_a_missing_source_are_reported_together(make_config, tmp_path):
    config = make_config(data={"sources": [{"name": "none", "path": str(tmp_path / "none")}]})
    config = with_shape(config, vocab_size=8191)
    with pytest.raises(UserError) as caught:
        load_text(resolve_plan(config))
    assert len(caught.value.faults) == 2
    assert caught.value.faults[0].startswith(
        "model.shape.vocab_size = 8191: the tokenizer 'builtin' has ids up to 8191;"
    )


def test_a_prompt_without_room_for_a_continuation_is_refused_before_training(make_config, tokenizer):
    prompt = "def function_1(" * 40
    tokens = len(tokenizer.encode(prompt))
    keys = {"model": {"max_position_embeddings": tokens}, "inference": {"prompt": prompt}}
    with pytest.raises(UserError, match=f"inference.prompt: its {tokens} tokens leave none of .* = {tokens}.*shorten"):
        load_text(resolve_plan(make_config(**keys)))
    keys["model"]["max_position_embeddings"] += 1
    assert load_text(resolve_plan(make_config(**keys)))
