"""Schedules at 0, first, boundary - 1, boundary, last and beyond."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm46.config.optimizer import LRSchedulerConfig
from glm46.run.schedule import batch_sequences, learning_rate_factor, schedule_value

# One rounding of a double on values near one.
EXACT = 1e-12


def test_number_is_a_constant_schedule():
    assert [schedule_value(0.3, tokens) for tokens in (0, 1, 10**13)] == [0.3] * 3


def test_points_are_joined_by_lines_and_held_outside():
    points = ((100, 1.0), (200, 3.0), (400, 2.0))
    expected = {0: 1.0, 99: 1.0, 100: 1.0, 101: 1.02, 150: 2.0, 199: 2.98, 200: 3.0, 300: 2.5, 400: 2.0, 10**12: 2.0}
    for tokens, value in expected.items():
        assert schedule_value(points, tokens) == pytest.approx(value, abs=EXACT)


def test_two_points_with_one_token_count_are_a_jump():
    points = ((0, 0.3), (15_000, 0.3), (15_000, 0.1))
    assert [schedule_value(points, tokens) for tokens in (0, 14_999, 15_000, 15_001)] == [0.3, 0.3, 0.1, 0.1]


def test_jump_at_zero_and_single_point():
    assert schedule_value(((0, 1.0), (0, 2.0)), 0) == 2.0
    assert [schedule_value(((5, 7.0),), tokens) for tokens in (0, 5, 6)] == [7.0] * 3


@pytest.mark.parametrize(
    ("decay_type", "middle"), [("cosine", 0.55), ("linear", 0.55), ("sqrt", 1 - 0.9 * math.sqrt(0.5))]
)
def test_warmup_then_decay(decay_type, middle):
    scheduler = LRSchedulerConfig(warmup_tokens=100, decay_type=decay_type, min_lr_factor=0.1)
    expected = {0: 0.0, 1: 0.01, 99: 0.99, 100: 1.0, 550: middle, 1000: 0.1, 1001: 0.1, 10**9: 0.1}
    for tokens, factor in expected.items():
        assert learning_rate_factor(tokens, scheduler, 1000) == pytest.approx(factor, abs=EXACT)
    assert 0.1 < learning_rate_factor(999, scheduler, 1000) < 0.11


def test_constant_until_the_decay_part():
    scheduler = LRSchedulerConfig(warmup_tokens=100, decay_type="linear", decay_ratio=0.2, min_lr_factor=0.0)
    expected = {0: 0.0, 99: 0.99, 100: 1.0, 799: 1.0, 800: 1.0, 801: 0.995, 900: 0.5, 999: 0.005, 1000: 0.0, 2000: 0.0}
    for tokens, factor in expected.items():
        assert learning_rate_factor(tokens, scheduler, 1000) == pytest.approx(factor, abs=EXACT)


def test_without_warmup_the_first_token_has_the_peak():
    assert learning_rate_factor(0, LRSchedulerConfig(), 1000) == 1.0


def test_the_first_step_has_its_share_of_the_warmup():
    scheduler = LRSchedulerConfig(warmup_tokens=100, decay_type="linear")
    assert [learning_rate_factor(t, scheduler, 1000, 30) for t in (0, 30, 60, 90, 120)] == pytest.approx(
        [0.3, 0.6, 0.9, 1.0, learning_rate_factor(120, scheduler, 1000)], abs=EXACT
    )


def test_total_tokens_of_the_table_goes_before_the_end_of_the_run():
    scheduler = LRSchedulerConfig(total_tokens=2000, decay_type="linear", min_lr_factor=0.0)
    assert learning_rate_factor(1000, scheduler, 1000) == pytest.approx(0.5, abs=EXACT)


def test_warmup_longer_than_the_run_still_rises():
    scheduler = LRSchedulerConfig(warmup_tokens=100)
    assert learning_rate_factor(50, scheduler, 60) == 0.5
    assert learning_rate_factor(99, scheduler, 60) == 0.99
    assert learning_rate_factor(100, scheduler, 60) == scheduler.min_lr_factor


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


def test_batch_ramp_is_rounded_down_to_the_multiple():
    ramp = ((0, 16.0), (1000, 64.0))
    assert [batch_sequences(ramp, tokens, 8) for tokens in (0, 166, 167, 500, 999, 1000, 5000)] == [
        16,
        16,
        24,
        40,
        56,
        64,
        64,
    ]


def test_batch_is_at_least_one_micro_batch_and_that_when_absent():
    assert batch_sequences(3.0, 0, 8) == 8
    assert batch_sequences(None, 123, 8) == 8
    assert batch_sequences(24.0, 0, 8) == 24


@given(st.integers(0, 10**9), st.integers(1, 64), st.integers(1, 512), st.integers(1, 512))
def test_batch_is_a_multiple_and_never_above_the_schedule(tokens, multiple, first, last):
    ramp = ((0, float(first)), (10**8, float(last)))
    size = batch_sequences(ramp, tokens, multiple)
    assert size % multiple == 0
    assert size <= max(multiple, schedule_value(ramp, tokens) + 1e-6)
