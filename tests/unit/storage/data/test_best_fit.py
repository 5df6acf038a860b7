"""Best-fit packing: no document cut that fits, nothing lost, almost no padding; and rows as the loader gives them."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm46.storage.data.best_fit import best_fit, concatenate, plan_groups
from glm46.storage.data.loader import BatchLayout, TrainSource, build_train_loader
from glm46.storage.data.manifest import load_manifest

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
