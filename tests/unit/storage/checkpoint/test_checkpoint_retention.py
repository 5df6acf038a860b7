"""Retention over any history: every rule keeps its steps, and the newest complete checkpoint is never removed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.storage.checkpoint.publish import Retention, steps_to_remove

LOSS = st.none() | st.floats(0, 10) | st.just(math.nan)


def test_each_rule_keeps_its_steps():
    losses = {100: 3.0, 200: 1.0, 300: math.nan, 400: 2.0, 500: None, 600: 2.5, 700: 2.9}
    assert steps_to_remove(losses, Retention(keep_latest_k=0)) == []
    assert steps_to_remove(losses, Retention(keep_latest_k=2)) == [100, 200, 300, 400, 500]
    assert steps_to_remove(losses, Retention(keep_latest_k=1, keep_best_k=2)) == [100, 300, 500, 600]
    assert steps_to_remove(losses, Retention(keep_latest_k=1, keep_every=300)) == [100, 200, 400, 500]
    assert steps_to_remove(losses, Retention(keep_latest_k=1), in_use={200}) == [100, 300, 400, 500, 600]
    # Checkpoints of a row of skipped steps never displace the newest one before it.
    assert steps_to_remove(losses, Retention(keep_latest_k=2), doubtful={600, 700}) == [100, 200, 300, 400]
    assert steps_to_remove({1: 2.0, 2: 2.0, 3: 5.0}, Retention(keep_latest_k=1, keep_best_k=1)) == [1]


def test_losses_of_unknown_steps_compete_only_among_themselves():
    losses = {100: 1.0, 200: 0.5, 300: 4.0, 400: 3.0, 500: 5.0}
    rule = Retention(keep_latest_k=1, keep_best_k=1)
    assert steps_to_remove(losses, rule, undated={100, 200}) == [100, 300]
    assert steps_to_remove(losses, Retention(keep_latest_k=1), undated={100, 200}) == [100, 200, 300, 400]


@settings(max_examples=2000)
@given(
    st.dictionaries(st.integers(0, 60), LOSS, max_size=20),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(0, 4),
    st.sets(st.integers(0, 60), max_size=2),
    st.sets(st.integers(0, 60)),
)
@pytest.mark.slow
def test_the_steps_of_the_rules_are_kept_and_no_others(losses, latest, every, best, in_use, doubtful):
    removed = steps_to_remove(losses, Retention(latest, every, best), in_use, doubtful)
    kept = set(losses) - set(removed)
    newest = set(sorted(losses)[-latest:]) | set(sorted(losses.keys() - doubtful)[-1:])
    multiples = {step for step in losses if every and step % every == 0}
    numbers = {step: loss for step, loss in losses.items() if loss is not None and not math.isnan(loss)}
    assert newest | multiples | (in_use & set(losses)) <= kept
    assert removed == sorted(set(removed)) and set(removed) <= set(losses)
    best_kept = kept - newest - multiples - in_use
    assert len(best_kept) <= best
    # Every removed step that has a loss is no better than the worst of those kept as best.
    ranked = sorted(numbers.values())[:best]
    assert all(numbers[step] >= ranked[-1] for step in removed if step in numbers and ranked)
    assert len([step for step in kept if step in numbers]) >= min(best, len(numbers))
