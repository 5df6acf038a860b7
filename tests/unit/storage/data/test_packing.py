"""Packing: best fit and its plans on disk, documents of a share, and tokens that are no targets."""

import errno
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.errors import UserError
from glm46.engine.evaluation.position import Position
from glm46.storage.data import pack_plans
from glm46.storage.data.batches import IGNORE
from glm46.storage.data.best_fit import best_fit, concatenate, plan_groups
from glm46.storage.data.loader import BatchLayout, SampleSpan, TrainSource, build_train_loader, build_validation_loader
from glm46.storage.data.manifest import FILE_NAME, load_manifest
from glm46.storage.data.mixing import integer_weights, mix, samples_by_source
from glm46.storage.data.pack_plans import keep_plan, plan_of
from glm46.storage.data.packing import SelectedTokens, TokenStream, falls_into, open_tokens
from glm46.storage.data.shards import NOT_A_TARGET, open_shard
from glm46.storage.data.verified import VerifiedShard

EOS = 8156


def slow_best_fit(lengths, capacity):
    """The rule without any trick: longest first, into the fullest row that takes it."""
    free, rows = [], {}
    for piece in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [r for r in range(len(free)) if free[r] >= lengths[piece]]
        if fitting:
            row = min(fitting, key=lambda r: free[r])
        else:
            row = len(free)
            free.append(capacity)
        free[row] -= lengths[piece]
        rows[piece] = row
    return sorted(free)


@given(st.lists(st.integers(1, 40), max_size=80))
def test_rows_are_as_full_as_by_the_plain_algorithm(lengths):
    row_of, count = best_fit(np.array(lengths, np.int64), 40)
    used = np.bincount(row_of, weights=lengths, minlength=count) if lengths else np.zeros(0)
    assert used.max(initial=0) <= 40
    assert sorted((40 - used).astype(int).tolist()) == slow_best_fit(lengths, 40)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_every_token_is_in_one_row_and_no_document_is_cut_that_fits(lengths):
    capacity, ends = 64, np.cumsum(lengths)
    plan = concatenate(plan_groups([ends], capacity))
    places = np.concatenate([np.arange(s, s + n) for s, n in zip(plan.piece_starts, plan.piece_lengths, strict=True)])
    assert sorted(places.tolist()) == list(range(ends[-1]))
    for first, last in zip(plan.row_starts, plan.row_starts[1:], strict=False):
        assert 0 < plan.piece_lengths[first:last].sum() <= capacity
    starts = set((ends - lengths).tolist())
    for start, length in zip(plan.piece_starts.tolist(), plan.piece_lengths.tolist(), strict=True):
        document = int(np.searchsorted(ends, start, side="right"))
        fits = lengths[document] <= capacity
        assert (start in starts and length == lengths[document]) if fits else length <= capacity


def test_rows_of_realistic_documents_are_full():
    rng = np.random.default_rng(0)
    lengths = np.maximum(2, rng.lognormal(6.4, 1.2, 50_000)).astype(np.int64)
    for seq_len in (4_096, 32_768):
        plan = concatenate(plan_groups([np.cumsum(lengths)], seq_len))
        assert lengths.sum() / (plan.rows * seq_len) >= 0.999


def test_the_loader_gives_whole_documents_with_their_targets(make_source, counting_documents, tmp_path):
    lengths = [3, 31, 40, 7, 100, 2, 19, 64, 5, 11, 8, 30, 1, 1, 25, 90]
    documents = counting_documents(lengths)
    folder = make_source(tmp_path / "a", documents, documents_per_shard=3)
    source = TrainSource("a", load_manifest(folder), 1.0, "best_fit")
    loader = build_train_loader([source], BatchLayout(32, 1, 1, 0, 1, True), seed=0, start_sample=0)
    whole = [[*d, EOS] for d in documents]
    following = {t: d[i + 1] for d in whole for i, t in enumerate(d[:-1])}
    rows = loader.dataset.rows_per_source[0]
    inputs, targets = [], []
    for batch, _ in zip(loader, range(rows), strict=False):
        ids, labels, numbers = batch["input_ids"][0], batch["labels"][0], batch["document_ids"][0]
        inputs += ids[numbers >= 0].tolist()
        targets += labels[labels >= 0].tolist()
        for number in range(int(numbers.max()) + 1):
            at = (numbers == number).nonzero().ravel()
            assert batch["positions"][0][at].tolist() == list(range(len(at)))
            for i in at.tolist():
                token = int(ids[i])
                if token != EOS and int(labels[i]) != -100:
                    assert int(labels[i]) == following[token]
        assert (labels[numbers < 0] == -100).all()
        assert torch.equal(batch["mtp_labels"][0, 0][numbers < 0], labels[numbers < 0])
    assert sorted(inputs) == sorted(t for d in whole for t in d)
    # Each token but the first of a document is a target, also across the cuts of a document longer than a row.
    assert sorted(targets) == sorted(t for d in whole for t in d[1:])


LENGTHS = np.random.default_rng(0).geometric(1 / 20, 400).tolist()


@pytest.fixture
def source(make_source, counting_documents, tmp_path):
    return make_source(tmp_path / "s", counting_documents(LENGTHS), documents_per_shard=90)


def equal(one, two):
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True))


def planned(folder, seq_len, share=(0.0, 1.0)):
    manifest = load_manifest(folder)
    return concatenate(plan_groups([open_tokens(manifest, "train", share).doc_ends()], seq_len))


def unwritable(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


def never(*_, **__):
    raise AssertionError("planned again")


@settings(max_examples=50)
@given(st.lists(st.integers(1, 90), max_size=60), st.integers(1, 12), st.lists(st.integers(0, 60), max_size=4))
def test_groups_do_not_depend_on_the_blocks_that_documents_come_in(lengths, group, cuts):
    ends = np.cumsum(lengths, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm46.storage.data.best_fit._GROUP", group)
        blocks = concatenate(list(plan_groups(np.split(ends, sorted(cuts)), 32)))
        assert equal(blocks, concatenate(plan_groups([ends], 32)))
        assert blocks.piece_lengths.sum() == sum(lengths)


@pytest.mark.parametrize("share", [(0.0, 1.0), (0.25, 0.75)])
def test_the_stream_is_the_same_with_and_without_a_file(source, monkeypatch, tmp_path, share):
    def batches():
        chosen = [TrainSource("s", load_manifest(source), 1.0, "best_fit")]
        layout = BatchLayout(64, 1, 2, 0, 1, True)
        loader = build_train_loader(chosen, layout, seed=3, start_sample=5, span=SampleSpan(documents=share))
        return [batch for batch, _ in zip(loader, range(40), strict=False)]

    with monkeypatch.context() as patch:
        patch.setattr(pack_plans, "_write", unwritable)
        without = batches()
    assert not list(source.glob("packs-*"))
    made = batches()
    (file,) = source.glob("packs-64-*.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(pack_plans, "plan_groups", never)
        read = batches()
        # A folder that cannot be written is no hindrance where the plan is there.
        patch.setattr(pack_plans.FileLock, "acquire", unwritable)
        assert equal(plan_of(load_manifest(source), 64, share), planned(source, 64, share))
    for one, two, three in zip(without, made, read, strict=True):
        assert all(torch.equal(one[key], two[key]) and torch.equal(one[key], three[key]) for key in one)


def test_a_damaged_plan_is_made_again_and_another_ones_is_not_taken(source):
    manifest, expected = load_manifest(source), planned(source, 64)
    keep_plan(manifest, 64)
    (file,) = source.glob("packs-64-*")
    whole = file.read_bytes()
    other = bytearray(whole)
    other[-9] ^= 1  # one bit of a length
    keep_plan(manifest, 32)
    (stranger,) = source.glob("packs-32-*")
    for content in (whole[:-1], whole[:5], b"", bytes(other), b"rubbish" * 99, stranger.read_bytes()):
        file.write_bytes(content)
        assert equal(keep_plan(manifest, 64), expected)
        assert file.read_bytes() == whole
    # What a process that was killed at work left behind does not stay.
    (source / ".packs.partial").mkdir()
    (source / ".packs.partial" / "row_starts").write_bytes(b"x" * 100)
    file.unlink()
    assert equal(keep_plan(manifest, 64), expected)
    assert sorted(f.name for f in source.iterdir() if "packs" in f.name) == [".packs.lock", stranger.name, file.name]


def test_other_text_has_another_plan(source, make_source, counting_documents, tmp_path):
    keep_plan(load_manifest(source), 64)
    other = make_source(tmp_path / "t", counting_documents(LENGTHS[1:]), documents_per_shard=90)
    keep_plan(load_manifest(other), 64)
    assert [f.name for f in source.glob("packs-*")] != [f.name for f in other.glob("packs-*")]


_BUILDER = """
import sys, time
from pathlib import Path
from glm46.storage.data import pack_plans
from glm46.storage.data.manifest import load_manifest
folder, start = Path(sys.argv[1]), Path(sys.argv[2])
original = pack_plans.plan_groups
def slow(*arguments):
    print("planning")
    time.sleep(0.3)
    return original(*arguments)
pack_plans.plan_groups = slow
manifest = load_manifest(folder)
print("ready", flush=True)
while not start.exists():
    time.sleep(0.002)
plan = pack_plans.plan_of(manifest, 64)
print(pack_plans._hash(plan))
"""


@pytest.mark.slow
def test_of_many_processes_one_plans(source, tmp_path):
    command = [sys.executable, "-c", _BUILDER, str(source), str(tmp_path / "start")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for run in runs:
        assert run.stdout.readline() == "ready\n"
    (tmp_path / "start").touch()
    outputs = [run.communicate()[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert sorted(map(len, outputs)) == [1, 1, 1, 2]
    assert {output[-1] for output in outputs} == {pack_plans._hash(planned(source, 64))}


def test_samples_taken_are_those_that_were_mixed():
    rng = np.random.default_rng(0)
    for _ in range(60):
        weights = integer_weights(rng.uniform(0.01, 1, rng.integers(1, 9)).tolist())
        count = int(rng.integers(0, 3_000))
        source, _ = mix(np.arange(count), weights)
        assert samples_by_source(count, weights) == np.bincount(source, minlength=len(weights)).tolist()


def test_ranges_share_out_all_documents():
    bounds = (0.0, 0.2, 0.75, 1.0)
    parts = [falls_into(100_000, share) for share in zip(bounds, bounds[1:], strict=False)]
    assert (sum(part.astype(int) for part in parts) == 1).all()
    # Three standard deviations of the largest binomial count are 474.
    assert np.allclose([part.sum() for part in parts], [20_000, 55_000, 25_000], atol=474)
    # More text moves no document.
    assert (falls_into(50_000, (0.0, 0.2)) == parts[0][:50_000]).all()


def test_selected_documents_read_as_one_sequence(make_source, counting_documents, tmp_path):
    rng = np.random.default_rng(1)
    folder = make_source(tmp_path / "s", counting_documents(rng.integers(1, 40, 80).tolist()))
    stream = TokenStream(folder, load_manifest(folder).splits["train"], 8192)
    whole = np.empty(stream.length, np.int64)
    stream.read(0, whole)
    for share in ((0.0, 0.3), (0.3, 1.0), (0.5, 0.5001)):
        selected, chosen = SelectedTokens(stream, share), falls_into(80, share)
        documents = np.split(whole, stream.doc_ends()[:-1])
        expected = np.concatenate(
            [np.empty(0, np.int64), *(d for d, take in zip(documents, chosen, strict=True) if take)]
        )
        assert selected.length == len(expected)
        for start in range(0, len(expected), 7):
            out = np.full(33, -7, np.int64)
            used, ends = selected.read(start, out)
            assert used == min(33, len(expected) - start)
            assert out[:used].tolist() == expected[start : start + used].tolist()
            inside = selected.doc_ends() - start
            assert np.concatenate(ends).tolist() == inside[(inside > 0) & (inside <= used)].tolist()


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_rows_behind_the_end_of_a_stage_are_padding(make_source, counting_documents, tmp_path, packing):
    manifest = load_manifest(make_source(tmp_path / "s", counting_documents([30] * 20)))
    keys = {"layout": BatchLayout(16, 1, 4, 0, 1, True), "seed": 0}
    loader = build_train_loader(
        [TrainSource("s", manifest, 1.0, packing)], start_sample=8, span=SampleSpan(5, 14, (3,)), **keys
    )
    batches = iter(loader)
    assert next(batches)["sample_numbers"].tolist() == [8, 9, 10, 11]
    last = next(batches)
    assert last["sample_numbers"].tolist() == [12, 13, -1, -1]
    assert (last["labels"][2:] == -100).all() and (last["document_ids"][2:] == -1).all()
    # Three rows were read before sample 5, so that sample 8 is the row that sample 6 is without a stage.
    plain = next(iter(build_train_loader([TrainSource("s", manifest, 1.0, packing)], start_sample=6, **keys)))
    again = next(
        iter(
            build_train_loader(
                [TrainSource("s", manifest, 1.0, packing)], start_sample=8, span=SampleSpan(5, 14, (3,)), **keys
            )
        )
    )
    assert plain["input_ids"].tolist() == again["input_ids"].tolist()


LENGTH, DEPTH = 24, 2


def chats(count, seed):
    """Documents of at most LENGTH - 1 ids below 8000, whose runs of targets begin at random places."""
    generator = np.random.default_rng(seed)
    documents = []
    for length in generator.integers(2, LENGTH, count).tolist():
        ids = generator.integers(0, 8000, length)
        is_target = np.repeat(generator.random(length) < 0.5, 3)[:length]
        is_target[0] = False
        documents.append(np.where(is_target, ids, ids + NOT_A_TARGET).tolist())
    return documents


@pytest.fixture(scope="module")
def folder(make_source, tmp_path_factory):
    return make_source(tmp_path_factory.mktemp("chats") / "a", chats(90, 0), chats(40, 1))


def split_of(folder, name):
    """Ids and marks of each document of a split, by the ids."""
    files = [folder / shard.file for shard in load_manifest(folder).splits[name].shards]
    marked = [d for file in files for d in np.split(open_shard(file).tokens, open_shard(file).doc_ends[:-1])]
    assert all(len(d) for d in marked)
    ids = [d & ~np.uint32(NOT_A_TARGET) for d in marked]
    return {tuple(d.tolist()): (m < NOT_A_TARGET) for d, m in zip(ids, marked, strict=True)}


def check(batch, documents):
    """Compare each document of a batch of one row with the documents of a split; returns its ids."""
    found = []
    ids, of_document = batch["input_ids"][0].numpy(), batch["document_ids"][0].numpy()
    for number in range(of_document.max() + 1):
        here = np.flatnonzero(of_document == number)
        tokens = tuple(ids[here].tolist())
        is_target = documents[tokens]
        found.append(tokens)
        for depth in range(DEPTH + 1):
            labels = batch["labels"][0] if depth == 0 else batch["mtp_labels"][0, depth - 1]
            expected = [
                tokens[i + depth + 1] if i + depth + 1 < len(tokens) and is_target[i + depth + 1] else IGNORE
                for i in range(len(tokens))
            ]
            assert labels[here].tolist() == expected
            if depth:
                inputs = batch["mtp_input_ids"][0, depth - 1][here].tolist()
                assert inputs[: len(tokens) - depth] == list(tokens[depth:])
                assert min(inputs) >= 0 and max(inputs) < NOT_A_TARGET
    assert (batch["labels"][0].numpy()[of_document < 0] == IGNORE).all()
    return found


@pytest.mark.parametrize("documents", [(0.0, 1.0), (0.25, 0.75)])
def test_a_label_is_a_target_at_every_depth(folder, documents):
    source = TrainSource("a", load_manifest(folder), 1.0, "best_fit")
    layout = BatchLayout(LENGTH, DEPTH, 1, 0, 1, True)
    loader = build_train_loader([source], layout, seed=3, start_sample=0, span=SampleSpan(documents=documents))
    rows = loader.dataset.rows_per_source[0]
    known = split_of(folder, "train")
    found = [d for batch, _ in zip(loader, range(rows), strict=False) for d in check(batch, known)]
    assert len(found) == len(set(found))
    assert set(found) == set(known) if documents == (0.0, 1.0) else 20 < len(found) < 70


def test_validation_reads_whole_documents_once_and_counts_each_target(folder):
    manifest, known = load_manifest(folder), split_of(folder, "validation")
    batches = list(build_validation_loader(manifest, BatchLayout(LENGTH, DEPTH, 1, 0, 1, True)))
    found = [d for batch in batches for d in check(batch, known)]
    assert sorted(found) == sorted(known)
    labels = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
    assert labels == manifest.splits["validation"].labels == sum(int(is_target.sum()) for is_target in known.values())


def test_other_readers_see_ids_only(folder):
    manifest = load_manifest(folder)
    tokens = np.empty(200, np.int64)
    TokenStream(folder, manifest.splits["train"], manifest.vocab_size).read(0, tokens)
    assert tokens.min() >= 0 and tokens.max() < manifest.vocab_size
    row = Position({"a": manifest}, lengths=[8], samples=1, seed=0).rows[0].build()
    assert row["input_ids"].max() < manifest.vocab_size and (row["labels"] != IGNORE).all()


def test_marks_and_their_counts_are_verified(make_source, counting_documents, folder, tmp_path):
    manifest = load_manifest(folder)
    shard = manifest.splits["train"].shards[0]
    with pytest.raises(UserError, match="token id 7... is not below 7000"):
        VerifiedShard(folder / shard.file, 7000).tokens(0, shard.tokens)
    text = load_manifest(make_source(tmp_path / "text", counting_documents([5, 9])))
    assert text.splits["train"].targets is None and text.splits["train"].labels == 14
    assert "targets" not in (tmp_path / "text" / FILE_NAME).read_text()
    file = make_source(tmp_path / "b", chats(20, 0)) / FILE_NAME
    content = json.loads(file.read_text())
    split = content["splits"]["train"]
    split["targets"], split["shards"][0]["targets"] = split["targets"] + 1, split["shards"][0]["targets"] + 1
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="train-00000.*targets"):
        load_manifest(tmp_path / "b")
