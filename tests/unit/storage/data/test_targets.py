"""Tokens of chats that are no target: never a label at any depth, and never visible in an id."""

import json

import numpy as np
import pytest

from glm46.config.errors import UserError
from glm46.engine.evaluation.position import Position
from glm46.storage.data.batches import IGNORE
from glm46.storage.data.loader import BatchLayout, SampleSpan, TrainSource, build_train_loader, build_validation_loader
from glm46.storage.data.manifest import FILE_NAME, load_manifest
from glm46.storage.data.packing import TokenStream
from glm46.storage.data.shards import NOT_A_TARGET, open_shard
from glm46.storage.data.verified import VerifiedShard

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
