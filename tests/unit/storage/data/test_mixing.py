"""The order of samples: a bijection per pass, exact shares in every prefix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.errors import UserError
from glm46.storage.data.mixing import WEIGHT_TOTAL, integer_weights, mix, permute, source_and_sample


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
