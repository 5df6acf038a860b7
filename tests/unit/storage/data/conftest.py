"""Sources of a few tokens, written by hand."""

import numpy as np
import pytest

from glm46.storage.data.manifest import Manifest, ShardEntry, Split
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.prepare.sharding import save_manifest, write_shard

EOS = 8156


def write_split(folder, name, documents, documents_per_shard, tokenizer):
    entries = []
    for number, first in enumerate(range(0, len(documents), documents_per_shard)):
        chosen = documents[first : first + documents_per_shard]
        tokens = np.concatenate([np.array([*d, EOS], np.uint32) for d in chosen])
        ends = np.cumsum([len(d) + 1 for d in chosen]).astype(np.int64)
        file = f"{name}-{number:05d}.safetensors"
        targets = (
            int((tokens < NOT_A_TARGET).sum()) if any(max(d, default=0) > NOT_A_TARGET for d in documents) else None
        )
        metadata = {"source": "test", "tokenizer": tokenizer, "split": name}
        metadata |= {"targets": str(targets)} if targets is not None else {}
        digest = write_shard(folder / file, tokens, ends, metadata)
        entries.append(ShardEntry(file, len(ends), len(tokens), 4 * len(tokens), digest, targets))
    return Split.from_shards(tuple(entries))


@pytest.fixture(scope="session")
def make_source():
    """Write documents (lists of ids, end token not included) as a source; returns its folder. The ids may have the bit
    `NOT_A_TARGET`."""

    def make(folder, train, validation=(), documents_per_shard=7, tokenizer="t"):
        folder.mkdir(parents=True, exist_ok=True)
        splits = {
            "train": write_split(folder, "train", list(train), documents_per_shard, tokenizer),
            "validation": write_split(folder, "validation", list(validation), documents_per_shard, tokenizer),
        }
        highest = max((max(document, default=0) & ~NOT_A_TARGET for document in [*train, *validation]), default=0)
        save_manifest(Manifest(folder, "test", tokenizer, max(8192, highest + 1), EOS, splits))
        return folder

    return make


@pytest.fixture(scope="session")
def counting_documents():
    """Documents whose tokens count on and on, so that a token names its place in the split."""

    def make(lengths, start=0):
        documents, at = [], start
        for length in lengths:
            documents.append(list(range(at, at + length)))
            at += length + 1  # the end token takes a place too
        return documents

    return make
