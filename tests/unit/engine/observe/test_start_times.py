"""The begin of a start, from one process to the next."""

import json

import pytest

from glm46.engine.observe.start_times import VARIABLE, StartTimes


def test_the_begin_is_handed_on():
    times = StartTimes("the failure", 12.5)
    assert StartTimes.inherited({VARIABLE: times.to_text()}).to_text() == times.to_text()


@pytest.mark.parametrize("others", [[], [[["ranks", 12.5]]], [None], ["12.5"], [12.5, 13.5]])
def test_the_form_of_another_version_begins_now(others, monkeypatch):
    monkeypatch.setattr("glm46.engine.observe.start_times.time.time", lambda: 100.0)
    times = StartTimes.inherited({VARIABLE: json.dumps(["the failure", *others])})
    assert times.to_text() == '["the failure", 100.0]'
    assert times.first_step() == "first step 0.0 s after the failure" and times.first_step() is None
