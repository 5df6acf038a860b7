"""Schedules at 0, first, boundary - 1, boundary, last and beyond."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm46.config.optimizer import LRSchedulerConfig
from glm46.run.schedule import batch_sequences, learning_rate_factor, schedule_value

# One rounding of a double on values near one.
EXACT = 1e-12


SCHEDULES = {
    "a number": (0.3, {0: 0.3, 1: 0.3, 10**13: 0.3}),
    "points, joined by lines": (
        ((100, 1.0), (200, 3.0), (400, 2.0)),
        {0: 1.0, 99: 1.0, 100: 1.0, 101: 1.02, 150: 2.0, 199: 2.98, 200: 3.0, 300: 2.5, 400: 2.0, 10**12: 2.0},
    ),
    "a jump": (((0, 0.3), (15_000, 0.3), (15_000, 0.1)), {0: 0.3, 14_999: 0.3, 15_000: 0.1, 15_001: 0.1}),
    "a jump at zero": (((0, 1.0), (0, 2.0)), {0: 2.0}),
    "one point": (((5, 7.0),), {0: 7.0, 5: 7.0, 6: 7.0}),
}


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_has_these_values(schedule, expected):
    assert {tokens: schedule_value(schedule, tokens) for tokens in expected} == pytest.approx(expected, abs=EXACT)


WARM = {"warmup_tokens": 100}
MIDDLES = {"cosine": 0.55, "linear": 0.55, "sqrt": 1 - 0.9 * math.sqrt(0.5)}
RATES = {
    **{
        decay_type: (
            WARM | {"decay_type": decay_type, "min_lr_factor": 0.1}, 1000,
            {0: 0.0, 1: 0.01, 99: 0.99, 100: 1.0, 550: middle, 1000: 0.1, 1001: 0.1, 10**9: 0.1},
        )
        for decay_type, middle in MIDDLES.items()
    },
    "constant until the decay part": (
        WARM | {"decay_type": "linear", "decay_ratio": 0.2, "min_lr_factor": 0.0}, 1000,
        {0: 0.0, 99: 0.99, 100: 1.0, 799: 1.0, 800: 1.0, 801: 0.995, 900: 0.5, 999: 0.005, 1000: 0.0, 2000: 0.0},
    ),
    "no warm-up": ({}, 1000, {0: 1.0}),
    "total_tokens before the end of the run": (
        {"total_tokens": 2000, "decay_type": "linear", "min_lr_factor": 0.0}, 1000, {1000: 0.5}
    ),
    "a warm-up longer than the run": (WARM | {"min_lr_factor": 0.1}, 60, {50: 0.5, 99: 0.99, 100: 0.1}),
}  # fmt: skip
"""Keys of the table, tokens of the run, and factors by tokens."""


@pytest.mark.parametrize(("keys", "total", "expected"), RATES.values(), ids=RATES)
def test_the_learning_rate_has_these_factors(keys, total, expected):
    scheduler = LRSchedulerConfig(**keys)
    found = {tokens: learning_rate_factor(tokens, scheduler, total) for tokens in expected}
    assert found == pytest.approx(expected, abs=EXACT)


def test_the_first_step_has_its_share_of_the_warmup():
    scheduler = LRSchedulerConfig(warmup_tokens=100, decay_type="linear")
    assert [learning_rate_factor(t, scheduler, 1000, 30) for t in (0, 30, 60, 90, 120)] == pytest.approx(
        [0.3, 0.6, 0.9, 1.0, learning_rate_factor(120, scheduler, 1000)], abs=EXACT
    )


@given(
    st.integers(0, 5000),
    st.sampled_from(["cosine", "linear", "sqrt"]),
    st.one_of(st.none(), st.floats(0.01, 1.0)),
    st.floats(0.0, 1.0),
)
def test_factor_never_rises_after_warmup_nor_leaves_its_range(tokens, decay_type, ratio, least):
    scheduler = LRSchedulerConfig(warmup_tokens=300, decay_type=decay_type, decay_ratio=ratio, min_lr_factor=least)
    now, later = (learning_rate_factor(t, scheduler, 4000) for t in (tokens, tokens + 1))
    assert 0.0 <= now <= 1.0
    if tokens >= 300:
        assert least <= later + EXACT and later <= now + EXACT


@pytest.mark.parametrize(("schedule", "expected"), [
    (((0, 16.0), (1000, 64.0)), {0: 16, 166: 16, 167: 24, 500: 40, 999: 56, 1000: 64, 5000: 64}),  # rounded down
    (3.0, {0: 8}), (None, {123: 8}), (24.0, {0: 24}),  # at least one micro-batch, and that when absent
])  # fmt: skip
def test_a_batch_is_of_whole_micro_batches(schedule, expected):
    assert {tokens: batch_sequences(schedule, tokens, 8) for tokens in expected} == expected


@given(st.integers(0, 10**9), st.integers(1, 64), st.integers(1, 512), st.integers(1, 512))
def test_batch_is_a_multiple_and_never_above_the_schedule(tokens, multiple, first, last):
    ramp = ((0, float(first)), (10**8, float(last)))
    size = batch_sequences(ramp, tokens, multiple)
    assert size % multiple == 0
    assert size <= max(multiple, schedule_value(ramp, tokens) + 1e-6)
