"""Some documents of a source, and how many samples a mixture has taken: what stages of other lengths stand on."""

import numpy as np
import pytest

from glm46.storage.data.loader import BatchLayout, SampleSpan, TrainSource, build_train_loader
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.mixing import integer_weights, mix, samples_by_source
from glm46.storage.data.packing import SelectedTokens, TokenStream, falls_into


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
