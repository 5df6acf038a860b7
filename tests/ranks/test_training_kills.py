"""The short form of training_kills.py, which says how to start the long one."""

import pytest

KINDS = ("kill", "signal")


@pytest.fixture(scope="module")
def started(server):
    """Both at once: each waits a part of its time."""
    options = ("--kills", "2", "--steps", "18", "--seed", "2")
    return {by: server.start("training_kills.main", *options, "--by", by) for by in KINDS}


@pytest.mark.parametrize("by", KINDS)
def test_a_run_that_is_ended_again_and_again_computes_what_an_undisturbed_one_does(started, by):
    said = started[by].text()
    assert "2 ends in" in said and "all equal to an undisturbed one" in said
