"""Batches: their tensors, the mixture of sources, and one stream under every layout."""

import gc
import os
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.errors import UserError
from glm46.storage.data.loader import (
    BatchLayout,
    SampleSpan,
    TrainSource,
    build_train_loader,
    build_validation_loader,
)
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.mixing import WEIGHT_TOTAL, integer_weights, mix, permute, source_and_sample
from glm46.storage.data.packing import full_rows

EOS = 8156
LAST_START = 200
LENGTHS = [3, 1, 40, 7, 2, 2, 19, 64, 5, 11, 8, 30, 1, 1, 25, 90, 6, 13, 17, 10] * 5


@pytest.fixture(scope="module")
def sources(make_source, counting_documents, tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    documents = counting_documents(LENGTHS)
    make_source(root / "a", documents, documents[:33])
    make_source(root / "b", counting_documents(LENGTHS[::-1]), documents[:1], documents_per_shard=3)
    return root


def loader(root, *, rank=0, degree=1, rows=1, start=0, workers=0, mask=True, seq_len=32, depth=2, seed=5, **span):
    return build_train_loader(
        [TrainSource(name, load_manifest(root / name), weight) for name, weight in (("a", 0.7), ("b", 0.3))],
        BatchLayout(seq_len, depth, rows, rank, degree, mask), seed=seed, start_sample=start, num_workers=workers,
        span=SampleSpan(**span),
    )  # fmt: skip


def take(iterable, count):
    return [batch for batch, _ in zip(iterable, range(count), strict=False)]


def stream(root, samples, **layout):
    """The first samples of the stream under a layout, as rows by global sample number."""
    rows = {}
    per_batch = layout.get("rows", 1) * layout["degree"]
    for rank in range(layout["degree"]):
        for batch in take(loader(root, rank=rank, **layout), -(-samples // per_batch)):
            for j, number in enumerate(batch["sample_numbers"].tolist()):
                assert number not in rows, "a sample came twice"
                rows[number] = {name: tensor[j] for name, tensor in batch.items()}
    return rows


def slow_targets(row, ends, seq_len, ahead):
    """Targets by the rule itself: the token some places ahead, if it is in the same document."""
    document = np.searchsorted(ends, np.arange(len(row)), side="right")
    return [int(row[t + ahead]) if document[t] == document[t + ahead] else -100 for t in range(seq_len)]


def test_a_batch_has_the_promised_tensors(sources):
    batch = next(iter(loader(sources, rows=3)))
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()}
    assert shapes == {
        "input_ids": (torch.int64, (3, 32)), "labels": (torch.int64, (3, 32)), "positions": (torch.int32, (3, 32)),
        "document_ids": (torch.int32, (3, 32)), "mtp_input_ids": (torch.int64, (3, 2, 32)),
        "mtp_labels": (torch.int64, (3, 2, 32)), "sample_numbers": (torch.int64, (3,)),
    }  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("mask", [True, False])
def test_rows_follow_the_rules_token_by_token(make_source, counting_documents, tmp_path, depth, mask):
    documents = counting_documents(LENGTHS)
    folder = make_source(tmp_path / "a", documents)
    tokens = np.concatenate([[*d, EOS] for d in documents])
    ends = np.cumsum([len(d) + 1 for d in documents])
    length, count = 32, (len(tokens) - 1 - depth) // 32
    source = TrainSource("a", load_manifest(folder), 1.0)
    batches = take(build_train_loader(
        [source], BatchLayout(length, depth, 1, 0, 1, mask), seed=0, start_sample=0), count)  # fmt: skip
    starts = []
    for batch in batches:
        first = batch["input_ids"][0]
        # A token names its place unless it is an end token, and no two of those are neighbours.
        start = int(first[0]) if first[0] != EOS else int(first[1]) - 1
        starts.append(start)
        row, row_ends = tokens[start : start + length + 1 + depth], ends - start
        assert first.tolist() == row[:length].tolist()
        assert batch["labels"][0].tolist() == slow_targets(row, row_ends, length, 1)
        for k in range(1, depth + 1):
            assert batch["mtp_input_ids"][0, k - 1].tolist() == row[k : k + length].tolist()
            assert batch["mtp_labels"][0, k - 1].tolist() == slow_targets(row, row_ends, length, k + 1)
        document = np.searchsorted(row_ends, np.arange(length), side="right")
        assert batch["document_ids"][0].tolist() == (document - document[0]).tolist()
        if mask:
            begins = [max([0, *(e for e in row_ends if e <= t)]) for t in range(length)]
            assert batch["positions"][0].tolist() == [t - b for t, b in enumerate(begins)]
        else:
            assert batch["positions"][0].tolist() == list(range(length))
    assert sorted(starts) == [length * i for i in range(count)], "one pass reads every row once"


@pytest.fixture(scope="module")
def reference(sources):
    return stream(sources, LAST_START + 40, degree=1, rows=1)


@pytest.mark.slow
@settings(max_examples=25)
@given(degree=st.integers(1, 6), rows=st.integers(1, 5), start=st.integers(0, LAST_START))
def test_any_world_size_and_batch_size_give_one_stream(sources, reference, degree, rows, start):
    other = stream(sources, 40, degree=degree, rows=rows, start=start)
    assert set(range(start, start + 40)) <= set(other)
    for number in range(start, start + 40):
        assert all(torch.equal(reference[number][name], other[number][name]) for name in reference[number])


def test_worker_processes_change_nothing(sources):
    alone, helped = take(loader(sources, rows=2), 9), take(loader(sources, rows=2, workers=2), 9)
    assert len(helped) == 9
    assert all(torch.equal(a[name], b[name]) for a, b in zip(alone, helped, strict=True) for name in a)


def test_a_batch_ramp_with_a_change_of_ranks_reads_every_sample_once(sources):
    seen, start = [], 0
    for degree, rows, steps in [(8, 1, 3), (6, 2, 2), (3, 1, 5), (2, 4, 2)]:
        for rank in range(degree):
            for batch in take(loader(sources, degree=degree, rank=rank, rows=rows, start=start), steps):
                seen += batch["sample_numbers"].tolist()
        start += degree * rows * steps
    assert sorted(seen) == list(range(start))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumes_at_the_next_sample_under_another_layout(sources, workers):
    *batches, expected = take(loader(sources, rows=2, degree=3, start=5, workers=workers), 5)
    for step, batch in enumerate(batches):
        assert batch["sample_numbers"].tolist() == [5 + 6 * step, 6 + 6 * step]
    resumed = take(loader(sources, rows=1, start=5 + 6 * 4, workers=2 - workers), 2)
    for place, batch in enumerate(resumed):
        assert all(torch.equal(batch[name][0], expected[name][place]) for name in expected)


def test_a_stage_mixes_from_its_first_sample(sources):
    whole_run = take(loader(sources), 12)
    stage = take(loader(sources, start=20, first=20), 12)
    for place, (batch, expected) in enumerate(zip(stage, whole_run, strict=True)):
        assert batch.pop("sample_numbers").tolist() == [20 + place]
        assert all(torch.equal(batch[name], expected[name]) for name in batch)


@pytest.mark.slow
def test_readers_close_their_files(sources):
    gc.collect()  # files of loaders that earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        take(loader(sources), 3)
        list(validation(sources, limit=2))
        gc.collect()
    assert [w for w in caught if w.category is ResourceWarning] == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_seed_is_another_order(sources):
    one, two = (torch.cat([b["input_ids"] for b in take(loader(sources, seed=s), 30)]) for s in (1, 2))
    assert not torch.equal(one, two)


def validation(root, *, rank=0, degree=1, rows=2, limit=None, seq_len=32):
    return build_validation_loader(
        load_manifest(root / "a"), BatchLayout(seq_len, 1, rows, rank, degree, True), max_batches=limit
    )  # fmt: skip


@pytest.mark.parametrize("degree, rows", [(1, 1), (1, 2), (3, 2), (4, 5), (7, 3)])
def test_validation_reads_every_token_once_and_gives_each_rank_as_many_batches(
    sources, counting_documents, degree, rows
):
    documents = counting_documents(LENGTHS[:33])
    tokens = np.concatenate([[*d, EOS] for d in documents])
    inputs, targets, batches = [], [], set()
    for rank in range(degree):
        mine = list(validation(sources, rank=rank, degree=degree, rows=rows))
        batches.add(len(mine))
        for batch in mine:
            real = batch["document_ids"] >= 0
            assert (batch["labels"][~real] == -100).all() and (batch["mtp_labels"][:, 0][~real] == -100).all()
            inputs += batch["input_ids"][real].tolist()
            targets += batch["labels"][batch["labels"] != -100].tolist()
            assert ((batch["sample_numbers"] == -1) == ~real.any(dim=1)).all()
    assert len(batches) == 1
    assert sorted(inputs) == sorted(tokens.tolist())
    firsts = {d[0] for d in documents}
    assert sorted(targets) == sorted(t for t in tokens.tolist() if t not in firsts)


def test_validation_stops_at_the_limit(sources):
    every = -(-sum(n + 1 for n in LENGTHS[:33]) // (2 * 32))
    assert [len(list(validation(sources, limit=limit))) for limit in (0, 1, 3, 1000)] == [0, 1, 3, every]


def test_a_source_shorter_than_a_row_is_refused(make_source, counting_documents, tmp_path):
    short = [TrainSource("x", load_manifest(make_source(tmp_path / "x", counting_documents([5]))), 1.0)]
    with pytest.raises(UserError, match="fewer than one row .*training.seq_len"):
        build_train_loader(short, BatchLayout(32, 1, 1, 0, 1, False), seed=0, start_sample=0)


@pytest.mark.parametrize("mtp_depth", [0, 1, 3])
def test_full_rows_are_as_many_as_have_all_targets(mtp_depth):
    for tokens in range(30):
        rows = full_rows(tokens, 4, mtp_depth)
        fitting = [count for count in range(1, 9) if 4 * count + 1 + mtp_depth <= tokens]
        assert rows == max(fitting, default=0)


@given(st.integers(1, 3_000), st.text(max_size=5))
def test_permutation_is_a_bijection(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 4**8, 4**8 + 1, 10**6])
def test_permutation_is_a_bijection_at_the_edges_of_the_network(size):
    assert np.array_equal(np.sort(permute(np.arange(size), size, "0/web/0")), np.arange(size))


def test_permutation_of_terabytes_answers_at_single_places():
    size = 2**60 + 12_345
    places = np.array([0, 1, 2, size - 1])
    values = permute(places, size, "k")
    assert len(set(values.tolist())) == 4 and values.min() >= 0 and values.max() < size


def test_permutation_looks_random():
    size = 100_000
    values = permute(np.arange(size), size, "0/web/0").astype(float)
    # Independent samples have a correlation of about 1/sqrt(n) = 0.003; five times that is not chance.
    assert abs(np.corrcoef(np.arange(size), values)[0, 1]) < 0.016
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.016
    # A random permutation leaves one element in place on average.
    assert (values == np.arange(size)).sum() < 10
    other = permute(np.arange(size), size, "0/web/1")
    assert (other == values).sum() < 10


@settings(max_examples=40)
@given(st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=8))
def test_every_prefix_holds_each_source_within_two_samples_of_its_share(weights):
    whole = integer_weights(weights)
    source, index = mix(np.arange(20_000), whole)
    for i, weight in enumerate(whole):
        taken = np.cumsum(source == i)
        exact = np.arange(1, 20_001) * weight / WEIGHT_TOTAL
        assert np.abs(taken - exact).max() <= 2.0
        assert np.array_equal(index[source == i], np.arange(taken[-1]))


def test_prefix_error_over_a_long_run_of_eight_sources_stays_below_two():
    whole = integer_weights([0.31, 0.22, 0.17, 0.11, 0.08, 0.06, 0.03, 0.02])
    numbers = np.arange(10**9, 10**9 + 100_000)
    source, index = mix(numbers, whole)
    for i, weight in enumerate(whole):
        exact = (numbers + 1) * weight / WEIGHT_TOTAL
        # index + 1 is how many of the source there are up to and with this sample, since number zero.
        mine = source == i
        assert np.abs(index[mine] + 1 - exact[mine]).max() <= 2.0


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20))
def test_integer_weights_are_within_a_millionth(weights):
    total = sum(weights)
    if min(weights) / total < 2e-6:
        return
    whole = integer_weights(weights)
    assert sum(whole) == WEIGHT_TOTAL
    assert max(abs(w / WEIGHT_TOTAL - e / total) for w, e in zip(whole, weights, strict=True)) <= 1e-6 + 1e-12


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0], [1.0, 1e-8]])
def test_weights_that_cannot_be_kept_are_refused(weights):
    with pytest.raises(UserError, match="data.sources"):
        integer_weights(weights)


def test_each_pass_reads_every_sample_of_a_source_once():
    names, sizes, weights = ["a", "b"], [37, 11], integer_weights([0.6, 0.4])
    source, sample = source_and_sample(np.arange(1_000), weights, names, sizes, seed=3)
    for i, size in enumerate(sizes):
        mine = sample[source == i]
        passes = len(mine) // size
        orders = np.split(mine[: passes * size], passes)
        for order in orders:
            assert sorted(order.tolist()) == list(range(size))
        # Two of at most 16 passes over 11 samples have the same order by chance once in 300,000 times.
        assert len({tuple(order.tolist()) for order in orders}) == passes


def test_a_source_keeps_its_order_when_others_change():
    _, alone = source_and_sample(np.arange(37), [WEIGHT_TOTAL], ["a"], [37], seed=3)
    source, mixed = source_and_sample(np.arange(200), integer_weights([0.5, 0.5]), ["b", "a"], [99, 37], seed=3)
    assert mixed[source == 1][:37].tolist() == alone.tolist()


def test_the_order_of_samples_is_that_of_earlier_versions():
    """A run that resumes with a newer version reads each sample once."""
    weights = integer_weights([0.5, 0.3, 0.2])
    source, sample = source_and_sample(np.arange(24), weights, ["a", "b", "c"], [7, 5, 3], seed=3)
    assert source.tolist() == [1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0]
    assert sample.tolist() == [4, 2, 1, 6, 3, 1, 0, 3, 0, 5, 2, 0, 2, 4, 1, 3, 2, 4, 3, 0, 1, 6, 1, 2]
